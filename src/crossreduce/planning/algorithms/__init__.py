"""Algorithms without a search for trees: those for equal links, and rings and exchanges on a topology."""
