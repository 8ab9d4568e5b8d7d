"""Forests of few steps: trees of limited depth that share the links, for buffers of small and middle size.

``switch_routes.py``: which device reaches which in one step. ``shallow_trees.py``: trees of limited depth of the least
price. ``tree_program.py``: the linear program that shares the buffer. ``few_step_forests.py``: schedules.
"""
