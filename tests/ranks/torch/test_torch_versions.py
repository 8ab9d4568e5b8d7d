"""Autograd notices what collectives and messages write: it refuses a backward pass that needs the values before."""
