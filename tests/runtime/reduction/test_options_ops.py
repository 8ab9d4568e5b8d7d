"""Reduction ops and their accumulators, and the options of a call."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from oracle import dtype_of
from pairs import each
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


@pytest.mark.parametrize(("name", "member"), [("avg", ReduceOp.MEAN), ("prod", ReduceOp.PRODUCT)])
def test_torchs_names_of_ops(name, member):
    """The names in torch and NCCL give the same members; the canonical names stay."""
    assert ReduceOp(name) is ReduceOp(name.upper()) is ReduceOp[name.upper()] is member
    values = cr.PerReplica([np.float32(2), np.float32(4)])
    assert cr.ReductionToOneDevice().reduce(name, values, values)[1] == {"avg": 3, "prod": 8}[name]
    assert (repr(member), member.value) == ({"avg": "ReduceOp.MEAN", "prod": "ReduceOp.PRODUCT"}[name], member.value)


def test_there_are_five_ops():
    """There are exactly the five ops of the contract."""
    assert sorted(op.value for op in ReduceOp) == sorted(OPS)


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
    dtype; an op that is not defined for a dtype raises a TypeError with a remedy."""
    for op in OPS:
        due = wanted(op, dtype)
        if due is None:
            with pytest.raises(UnsupportedError, match=rf"given: op {op}, dtype {dtype}\n  try: ") as caught:
                ACCUMULATORS[ReduceOp(op), dtype]
            assert isinstance(caught.value, TypeError)
        else:
            assert ACCUMULATORS[ReduceOp(op), dtype] == due


@pytest.mark.parametrize(
    ("dtype", "op"),
    each(["object", "str", "float8_e4m3fn", "datetime64", "longdouble", "complex256", "int4", ""], OPS),
)
def test_unknown_dtypes_are_errors(op, dtype):
    """A dtype that the library does not support raises an error that lists the supported dtypes."""
    with pytest.raises(UnsupportedError, match=rf"dtype {dtype} cannot be reduced[\s\S]*bfloat16, bool, complex128"):
        ACCUMULATORS[ReduceOp(op), dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulators_are_not_narrower_than_the_dtype(dtype):
    """An accumulator has at least as many bytes as the dtype of the components."""
    for op in OPS:
        if wanted(op, dtype):
            wide = dtype_of(ACCUMULATORS[ReduceOp(op), dtype])
            assert wide.itemsize >= dtype_of(dtype).itemsize


KINDS = [CommunicationOptions, CollectiveHints]
GOOD_BYTES = [0, 1, 1 << 40, np.int64(7), np.uint8(3)]
BAD_BYTES = [-1, 1.0, 2.5, "1", None, True, False, np.float32(1), [1], math.inf, np.int64(-1)]


@pytest.mark.parametrize(("nbytes", "kind"), each(GOOD_BYTES, KINDS))
def test_bytes_per_pack(kind, nbytes):
    """bytes_per_pack is an integer, 0 or more, and is stored as a Python int."""
    options = kind(bytes_per_pack=nbytes)
    assert options.bytes_per_pack == nbytes
    assert type(options.bytes_per_pack) is int


@pytest.mark.parametrize(("nbytes", "kind"), each(BAD_BYTES, KINDS))
def test_invalid_bytes_per_pack(kind, nbytes):
    """A bytes_per_pack that is not an integer, 0 or more, raises an error with its name and the object."""
    with pytest.raises(ArgumentError, match=r"bytes_per_pack must be a whole number, 0 or more[\s\S]*given: "):
        kind(nbytes)


@pytest.mark.parametrize(("seconds", "kind"), each([None, 1, 0.5, math.inf, 10**9], KINDS))
def test_timeouts(kind, seconds):
    """A timeout is a positive number of seconds, or None."""
    assert kind(timeout_seconds=seconds).timeout_seconds == seconds


@pytest.mark.parametrize(("seconds", "kind"), each([0, -1.0, -0.5, math.nan, -math.inf, "1", True, [1], 1j], KINDS))
def test_invalid_timeouts(kind, seconds):
    """A timeout that is not a positive number raises an error that shows it."""
    with pytest.raises(ArgumentError, match=r"timeout_seconds must be a positive number[\s\S]*given: "):
        kind(timeout_seconds=seconds)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_implementations(name):
    """The argument implementation may be the name of any algorithm, in lower or upper case."""
    assert CommunicationOptions(implementation=name).implementation == name
    assert CommunicationOptions(implementation=name.upper()).implementation == name
    assert algorithm_name(name) == name


@pytest.mark.parametrize("wrong", ["", "bogus", "hierarchical copy", None, 0, b"ring", ["ring"]])
def test_unknown_implementations(wrong):
    """An unknown algorithm raises an error that lists the known ones. (TensorFlow uses hierarchical copy instead.)"""
    for read in (algorithm_name, lambda name: CommunicationOptions(implementation=name)):
        with pytest.raises(ArgumentError, match=r"no such algorithm[\s\S]*one_device, hierarchical_copy, ring"):
            read(wrong)


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


def test_count_reports_its_argument():
    """The error of ``count`` starts with the name of the argument and ends with the remedy."""
    with pytest.raises(
        ArgumentError, match=r"^num_packs must be a whole number, 0 or more\.\n  given: -3 \(int\)\n  try:   less$"
    ):
        count("num_packs", -3, "less")
