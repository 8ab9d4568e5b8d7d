"""The algorithms: each file has one public planner for lists of devices, or plans on a topology only.

A planner names devices in any spelling; its counterpart with positions is what the registry uses.
"""
