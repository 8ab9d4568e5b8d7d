"""A stand-in for the parts of vLLM that make groups of ranks on CPUs, after its public documentation (0.19 to 0.32).

A platform names the class of its communicator, and each group of two ranks or more makes an object of that class.
"""
