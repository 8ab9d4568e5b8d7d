"""``crossreduce bench``: time collectives in the options, columns and JSON keys of nccl-tests."""
