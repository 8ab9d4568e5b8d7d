"""The JAX engine: runs a program inside SPMD code, where every device executes the same operations.

``permutations`` compiles a program without JAX; ``spmd`` runs the result under ``shard_map``, ``pmap`` and ``vmap``.
This engine does not implement ``engines.base.Engine``: SPMD code has only the array of its own device, and the plug-in
``crossreduce.jax`` calls ``spmd.run`` with the mesh axes of the call.
"""
