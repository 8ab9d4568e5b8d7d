"""Forests of few steps: trees of limited depth that share the links, for buffers of small and middle size.

``switch_routes.py``: which device reaches which in one step. Compiled code (native/flows/) searches the cheapest trees.
``tree_program.py``: the linear program that divides the buffer among trees. ``few_step_forests.py``: schedules.
"""
