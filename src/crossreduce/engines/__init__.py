"""Engines: each compiles a lowered program for some arrays and runs it."""
