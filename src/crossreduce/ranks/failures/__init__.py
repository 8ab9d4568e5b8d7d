"""Ranks that are lost, late or stopped: who notices it, which errors name them, and how a group ends for it."""
