"""The JAX engine: runs reductions inside SPMD code, where every device executes the same operations.

``permutations`` compiles a program without JAX; ``spmd`` runs the result under ``shard_map``, ``pmap`` and ``vmap``.
``in_process`` calls the compiled kernels, without a program, if the devices are CPU devices of one process. This engine
does not implement ``engines.base.Engine``: SPMD code has only the array of its own device, and the plug-in
``crossreduce.jax`` calls ``spmd.run`` and ``in_process.reduce`` with the mesh axes of the call.
"""
