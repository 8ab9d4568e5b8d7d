"""Ranks: processes, on one host or on several, that reduce and exchange their arrays together.

Input: a rendezvous, a transport between hosts, and each rank's arrays. Output: the collectives of ``Communicator``.
PyTorch users use it through ``crossreduce.torch``, others through ``crossreduce.processes.join``
or ``crossreduce.mpi.join``.
"""
