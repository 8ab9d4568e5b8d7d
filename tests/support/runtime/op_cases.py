"""Ops for tests of invalid arguments: each case uses one op in turn, since all ops validate in the same way."""

import numpy as np
import pytest
from frameworks import NAMES
from pairs import each

import crossreduce as cr

OPS = [
    cr.ReductionToOneDevice(),
    cr.HierarchicalCopyAllReduce(),
    cr.AllReduceCrossDeviceOps("ring"),
    cr.NcclAllReduce(),
]


def label(x):
    """Return a test's id for an op; other values keep pytest's own."""
    return type(x).__name__ if isinstance(x, cr.CrossDeviceOps) else None


each_ops = pytest.mark.parametrize("ops", OPS, ids=label)
ops_and_framework = pytest.mark.parametrize(("ops", "framework"), each(OPS, NAMES), indirect=["framework"], ids=label)


def value(n=2):
    """Return a valid value of n replicas."""
    return cr.PerReplica([np.full(3, float(k)) for k in range(n)])


def refused_by_all(error, words, *calls):
    """Assert that each call raises an error with these words."""
    for call in calls:
        with pytest.raises(error, match=words):
            call()
