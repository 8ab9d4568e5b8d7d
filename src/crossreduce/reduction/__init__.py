"""Reducing the per-replica values of one process: arguments, batches, cross-device ops."""
