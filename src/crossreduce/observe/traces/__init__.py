"""Traces of collectives: files that the ranks write, and that are read together for a viewer or a summary."""
