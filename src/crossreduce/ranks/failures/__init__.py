"""Ranks that are lost, late or stopped: how they are detected, which errors name them, and how the group ends."""
