"""Ranks: processes that each have one part of a value, on one host or on several.

Input: a rendezvous, a transport between hosts, and each rank's arrays. Output: the collectives of ``Communicator``.
PyTorch users use it through ``crossreduce.torch``, MPI users through ``crossreduce.mpi.join``.
"""
