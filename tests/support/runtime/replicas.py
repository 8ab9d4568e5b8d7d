"""Helpers of tests of failing replicas: an error class, the number of a replica, the notes of an error."""

import crossreduce as cr


class OwnError(Exception):
    """An error that only tests raise."""


def number():
    """Return the number of the replica that calls."""
    return cr.get_replica_context().replica_id_in_sync_group


def notes(error):
    return "\n".join(error.__notes__)
