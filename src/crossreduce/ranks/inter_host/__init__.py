"""Collectives over one or several hosts, and the exchange between them."""
