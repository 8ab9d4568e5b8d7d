"""Forests of few steps: trees of limited depth that share the links, for buffers of small and middle size.

``hops.py``: which device reaches which in one step. ``cheapest.py``: trees of limited depth of the least price.
``program.py``: the linear program that shares the buffer among such trees. ``forests.py``: its solutions as schedules.
"""
