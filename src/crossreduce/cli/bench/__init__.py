"""``crossreduce bench``: time collectives in the options, columns and JSON keys of nccl-tests.

``command.py`` reads the options; ``devices.py`` measures the devices of this process and ``ranks.py`` measures ranks,
each of which is a process.
"""
