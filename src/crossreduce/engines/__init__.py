"""Engines: each compiles lowered programs for some kinds of arrays and runs them. See ``base.py``."""
