"""Transports: how bytes get from one host to another."""
