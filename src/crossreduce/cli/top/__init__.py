"""``crossreduce top``: a live view of the groups of ranks on this machine."""
