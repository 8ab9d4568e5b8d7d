"""Reduction ops and their accumulators, and the options of a call."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from strategies import COMPLEX, DTYPES, INTEGERS, OPS

import crossreduce as cr
from crossreduce import ArgumentError, CollectiveHints, CommunicationOptions, ReduceOp, UnsupportedError
from crossreduce.ops import ACCUMULATORS
from crossreduce.options import ALGORITHMS, DEFAULT, algorithm_name, count
from crossreduce.reduction.validation import read_options


@pytest.mark.parametrize("name", OPS)
def test_op_names_in_any_case(name):
    """A name in any mix of cases, and the member itself, give the same member."""
    member = ReduceOp[name.upper()]
    for flags in itertools.product((str.lower, str.upper), repeat=len(name)):
        assert ReduceOp("".join(case(letter) for case, letter in zip(flags, name, strict=True))) is member
    assert ReduceOp(member) is member
    assert repr(member) == f"ReduceOp.{name.upper()}"
    assert sorted(op.value for op in ReduceOp) == sorted(OPS)


@pytest.mark.parametrize(("name", "member"), [("avg", ReduceOp.MEAN), ("prod", ReduceOp.PRODUCT)])
def test_torchs_names_of_ops(name, member):
    """The names in torch and NCCL give the same members; the canonical names stay."""
    assert ReduceOp(name) is ReduceOp(name.upper()) is ReduceOp[name.upper()] is member
    values = cr.PerReplica([np.float32(2), np.float32(4)])
    assert cr.ReductionToOneDevice().reduce(name, values, values)[1] == {"avg": 3, "prod": 8}[name]
    assert (repr(member), member.value) == ({"avg": "ReduceOp.MEAN", "prod": "ReduceOp.PRODUCT"}[name], member.value)


@pytest.mark.parametrize(
    "wrong", ["", "summ", " sum", "average", "ReduceOp.SUM", "SUM\n", 0, 1, None, True, b"sum", ["sum"], max]
)
def test_unknown_ops_are_errors(wrong):
    """An object that is not an op or its name raises an error that shows the object and lists all names of ops."""
    given = re.escape(f"given: {' '.join(repr(wrong).split())}")
    listed = '"sum", "mean", "avg", "min", "max", "product", "prod"'
    words = rf"^this is not a known reduction\.\n  {given} .*\n  try:   one of {listed}, or a ReduceOp$"
    with pytest.raises(ArgumentError, match=words):
        ReduceOp(wrong)


def wanted(op, dtype):
    if dtype in ("float16", "bfloat16") and op in ("sum", "mean", "product"):
        return "float32"
    if dtype in INTEGERS and op == "mean":
        return "float64"
    if (dtype == "bool" and op in ("sum", "mean")) or (dtype in COMPLEX and op in ("min", "max")):
        return None
    return dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulators(dtype):
    """Sums, means and products of half types accumulate in float32, means of integers in float64, all else in its own
    dtype; an op that is not defined for a dtype, and an unknown dtype, raise a TypeError with a remedy."""
    for op in OPS:
        due = wanted(op, dtype)
        if due is None:
            with pytest.raises(UnsupportedError, match=rf"given: op {op}, dtype {dtype}\n  try: ") as caught:
                ACCUMULATORS[ReduceOp(op), dtype]
            assert isinstance(caught.value, TypeError)
        else:
            assert ACCUMULATORS[ReduceOp(op), dtype] == due
        for unknown in ("object", "float8_e4m3fn", "longdouble", "int4", ""):
            words = rf"dtype {unknown} cannot be reduced[\s\S]*bfloat16, bool, complex128"
            with pytest.raises(UnsupportedError, match=words):
                ACCUMULATORS[ReduceOp(op), unknown]


KINDS = [CommunicationOptions, CollectiveHints]


@pytest.mark.parametrize("kind", KINDS)
def test_valid_options(kind):
    """bytes_per_pack is an integer, 0 or more, and is stored as an int; a timeout is a positive number or None."""
    for nbytes in (0, 1, 1 << 40, np.int64(7), np.uint8(3)):
        stored = kind(bytes_per_pack=nbytes).bytes_per_pack
        assert (stored, type(stored)) == (nbytes, int)
    for seconds in (None, 1, 0.5, math.inf, 10**9):
        assert kind(timeout_seconds=seconds).timeout_seconds == seconds
    for name in ALGORITHMS:
        assert CommunicationOptions(implementation=name.upper()).implementation == algorithm_name(name) == name


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_options(kind):
    """An invalid option raises an error with its name, the object and a remedy. (TensorFlow replaces an unknown
    algorithm by hierarchical copy.)"""
    for nbytes in (-1, 1.0, 2.5, "1", None, True, False, np.float32(1), [1], math.inf, np.int64(-1)):
        with pytest.raises(ArgumentError, match=r"bytes_per_pack must be a whole number, 0 or more[\s\S]*given: "):
            kind(nbytes)
    for seconds in (0, -1.0, math.nan, -math.inf, "1", True, [1], 1j):
        with pytest.raises(ArgumentError, match=r"timeout_seconds must be a positive number[\s\S]*given: "):
            kind(timeout_seconds=seconds)
    read = [algorithm_name, lambda name: CommunicationOptions(implementation=name), cr.AllReduceCrossDeviceOps]
    for call, wrong in itertools.product(read, ("", "bogus", "hierarchical copy", None, 0, b"ring", ["ring"])):
        with pytest.raises(ArgumentError, match=r"no such algorithm[\s\S]*one_device, hierarchical_copy, ring"):
            call(wrong)
    with pytest.raises(
        ArgumentError, match=r"^n must be a whole number, 0 or more\.\n  given: -3 \(int\)\n  try:   less$"
    ):
        count("n", -3, "less")


def test_options_are_immutable_values():
    """Options with equal arguments are equal and have the same hash; they cannot be changed."""
    a, b = CommunicationOptions(1024, 2.0, "ring"), CommunicationOptions(1024, 2.0, "RING")
    assert a == b
    assert hash(a) == hash(b)
    assert a != CommunicationOptions(1025, 2.0, "ring")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'bytes_per_pack'"):
        a.bytes_per_pack = 1


def test_hints_are_options():
    """CollectiveHints are CommunicationOptions without the argument for the implementation."""
    hints = CollectiveHints(2048, 3)
    assert isinstance(hints, CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds, hints.implementation) == (2048, 3, "auto")
    assert repr(hints) == "CollectiveHints(bytes_per_pack=2048, timeout_seconds=3)"
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4 were given"):
        CollectiveHints(1, 2, "ring")


def test_read_options():
    """None gives the default; options and hints are returned unchanged; any other object raises an error."""
    assert read_options(None) is DEFAULT == CommunicationOptions(0, None, "auto")
    for options in (CommunicationOptions(8), CollectiveHints(8)):
        assert read_options(options) is options
    for wrong in ({}, 0, "auto", CommunicationOptions, False):
        with pytest.raises(ArgumentError, match="options must be CommunicationOptions"):
            read_options(wrong)
