"""Ranks: processes, on one host or on several, that reduce and exchange their arrays together.

Input: a rendezvous, a transport between hosts, and each rank's arrays. Output: the collectives of ``Communicator``.
PyTorch users use it through ``crossreduce.torch``, MPI users through ``crossreduce.mpi.join``.
"""
