"""Names of reduction ops and algorithms, and the options of a call."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from strategies import OPS

import crossreduce as cr
from crossreduce import ArgumentError, CollectiveHints, CommunicationOptions, ReduceOp
from crossreduce.options import ALGORITHMS, algorithm_name


def test_names_of_ops():
    """A name in any mix of cases, the names of torch and NCCL, and the member itself all give the same member."""
    for name in OPS:
        member = ReduceOp[name.upper()]
        for form in (name, name.upper(), name.title(), name.title().swapcase(), member):
            assert ReduceOp(form) is member
        assert repr(member) == f"ReduceOp.{name.upper()}"
    assert sorted(op.value for op in ReduceOp) == sorted(OPS)
    values = cr.PerReplica([np.float32(2), np.float32(4)])
    for name, member, due in (("avg", ReduceOp.MEAN, 3), ("prod", ReduceOp.PRODUCT, 8)):
        assert ReduceOp(name) is ReduceOp(name.upper()) is ReduceOp[name.upper()] is member
        assert cr.ReductionToOneDevice().reduce(name, values, values)[1] == due


@pytest.mark.parametrize("wrong", ["", "summ", " sum", "ReduceOp.SUM", "SUM\n", 0, None, True, b"sum", ["sum"], max])
def test_unknown_ops_are_errors(wrong):
    """An object that is neither an op nor a name raises an error that shows the object and lists all names."""
    given = re.escape(f"given: {' '.join(repr(wrong).split())}")
    listed = '"sum", "mean", "avg", "min", "max", "product", "prod"'
    words = rf"^this is not a known reduction\.\n  {given} .*\n  try:   one of {listed}, or a ReduceOp$"
    with pytest.raises(ArgumentError, match=words):
        ReduceOp(wrong)


@pytest.mark.parametrize("kind", [CommunicationOptions, CollectiveHints])
def test_valid_and_invalid_options(kind):
    """``bytes_per_pack`` must be an integer of at least 0, ``timeout_seconds`` a positive number or ``None``."""
    for nbytes in (0, 1, 1 << 40, np.int64(7), np.uint8(3)):
        stored = kind(bytes_per_pack=nbytes).bytes_per_pack
        assert (stored, type(stored)) == (nbytes, int)
    for nbytes in (-1, 1.0, 2.5, "1", None, True, False, np.float32(1), [1], math.inf, np.int64(-1)):
        with pytest.raises(ArgumentError, match=r"bytes_per_pack must be a whole number, 0 or more[\s\S]*given: "):
            kind(nbytes)
    for seconds in (None, 1, 0.5, math.inf, 10**9):
        assert kind(timeout_seconds=seconds).timeout_seconds == seconds
    for seconds in (0, -1.0, math.nan, -math.inf, "1", True, [1], 1j):
        with pytest.raises(ArgumentError, match=r"timeout_seconds must be a positive number[\s\S]*given: "):
            kind(timeout_seconds=seconds)


def test_names_of_algorithms():
    """The name of an algorithm may be in any mix of cases. An unknown name is an error. TensorFlow ignores it."""
    for name in ALGORITHMS:
        assert CommunicationOptions(implementation=name.upper()).implementation == algorithm_name(name) == name
    read = [algorithm_name, lambda name: CommunicationOptions(implementation=name), cr.AllReduceCrossDeviceOps]
    for call, wrong in itertools.product(read, ("", "bogus", "hierarchical copy", None, 0, b"ring", ["ring"])):
        with pytest.raises(ArgumentError, match=r"no such algorithm[\s\S]*one_device, hierarchical_copy, ring"):
            call(wrong)


def test_options_are_immutable_values():
    """Options are immutable, and equal options have the same hash. ``CollectiveHints`` are options, too."""
    a, b = CommunicationOptions(1024, 2.0, "ring"), CommunicationOptions(1024, 2.0, "RING")
    assert a == b
    assert hash(a) == hash(b)
    assert a != CommunicationOptions(1025, 2.0, "ring")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'bytes_per_pack'"):
        a.bytes_per_pack = 1
    hints = CollectiveHints(2048, 3)
    assert isinstance(hints, CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds, hints.implementation) == (2048, 3, "auto")
    assert repr(hints) == "CollectiveHints(bytes_per_pack=2048, timeout_seconds=3)"
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4 were given"):
        CollectiveHints(1, 2, "ring")
