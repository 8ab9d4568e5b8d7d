"""Bounds, and plans that reach them."""
