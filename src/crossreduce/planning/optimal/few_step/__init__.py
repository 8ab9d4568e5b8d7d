"""Forests of few steps: trees of limited depth that share the links, for buffers of small and middle size.

``switch_routes.py``: which device reaches which in one step. ``shallow_trees.py``: the cheapest trees of limited depth.
``tree_program.py``: the linear program that divides the buffer among trees. ``few_step_forests.py``: schedules.
"""
