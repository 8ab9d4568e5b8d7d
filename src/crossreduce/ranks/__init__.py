"""Ranks: processes that each have one part of a value, on one host or on several.

In: where the ranks meet, and each rank's memory.  Out: the collectives of ``Communicator``. PyTorch users reach it
through ``crossreduce.torch``, MPI users through ``join``.
"""
