"""``crossreduce train``: train a small classifier with the arrays of each framework."""
