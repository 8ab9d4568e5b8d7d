"""Traces of collectives: files that the ranks write, read together on one clock, for a viewer and for a summary."""
