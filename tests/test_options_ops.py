"""The reductions' names, their accumulators, and the options of a call."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from oracle import dtype_of
from strategies import COMPLEX, DTYPES, INTEGERS, OPS

from crossreduce import ArgumentError, CollectiveHints, CommunicationOptions, ReduceOp, UnsupportedError
from crossreduce.ops import ACCUMULATORS
from crossreduce.options import ALGORITHMS, DEFAULT, algorithm_name, count
from crossreduce.validation import read_options


@pytest.mark.parametrize("name", OPS)
def test_op_names_in_any_case(name):
    """Every mix of cases names the same member; a member stands for itself."""
    member = ReduceOp[name.upper()]
    for flags in itertools.product((str.lower, str.upper), repeat=len(name)):
        assert ReduceOp("".join(case(letter) for case, letter in zip(flags, name, strict=True))) is member
    assert ReduceOp(member) is member
    assert repr(member) == f"ReduceOp.{name.upper()}"


def test_there_are_five_ops():
    """The ops are the contract's five, no more."""
    assert sorted(op.value for op in ReduceOp) == sorted(OPS)


@pytest.mark.parametrize(
    "wrong", ["", "summ", " sum", "avg", "ReduceOp.SUM", "SUM\n", 0, 1, None, True, b"sum", ["sum"], max]
)
def test_unknown_ops_are_refused(wrong):
    """Anything else is an error that shows it and lists the five."""
    with pytest.raises(ArgumentError) as caught:
        ReduceOp(wrong)
    assert "there is no such reduction" in str(caught.value)
    assert f"given: {' '.join(repr(wrong).split())}" in str(caught.value)
    assert all(f'"{name}"' in str(caught.value) for name in OPS)


def wanted(op, dtype):
    if dtype in ("float16", "bfloat16") and op in ("sum", "mean", "product"):
        return "float32"
    if dtype in INTEGERS and op == "mean":
        return "float64"
    if (dtype == "bool" and op in ("sum", "mean")) or (dtype in COMPLEX and op in ("min", "max")):
        return None
    return dtype


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulators(op, dtype):
    """Halves accumulate in float32, means of integers in float64, the rest in their own dtype, if at all."""
    due = wanted(op, dtype)
    if due is None:
        with pytest.raises(UnsupportedError, match=f"op {op}, dtype {dtype}") as caught:
            ACCUMULATORS[ReduceOp(op), dtype]
        assert isinstance(caught.value, TypeError)
        assert "\n  try:" in str(caught.value)
    else:
        assert ACCUMULATORS[ReduceOp(op), dtype] == due


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype", ["object", "str", "float8_e4m3fn", "datetime64", "longdouble", "complex256", "int4", ""]
)
def test_unknown_dtypes_are_refused(op, dtype):
    """A dtype that no framework can add up is named, with those that will do."""
    with pytest.raises(UnsupportedError, match=rf"dtype {dtype} cannot be reduced[\s\S]*bfloat16, bool, complex128"):
        ACCUMULATORS[ReduceOp(op), dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulator_is_no_narrower(dtype):
    """No accumulator holds less than its dtype, so nothing is lost on the way in."""
    for op in OPS:
        if wanted(op, dtype):
            wide = dtype_of(ACCUMULATORS[ReduceOp(op), dtype])
            assert wide.itemsize >= dtype_of(dtype).itemsize


GOOD_BYTES = [0, 1, 1 << 40, np.int64(7), np.uint8(3)]
BAD_BYTES = [-1, 1.0, 2.5, "1", None, True, False, np.float32(1), [1], math.inf, np.int64(-1)]


@pytest.mark.parametrize("kind", [CommunicationOptions, CollectiveHints])
@pytest.mark.parametrize("nbytes", GOOD_BYTES)
def test_bytes_per_pack(kind, nbytes):
    """bytes_per_pack is a whole number from 0 on, held as a Python int."""
    options = kind(bytes_per_pack=nbytes)
    assert options.bytes_per_pack == nbytes
    assert type(options.bytes_per_pack) is int


@pytest.mark.parametrize("kind", [CommunicationOptions, CollectiveHints])
@pytest.mark.parametrize("nbytes", BAD_BYTES)
def test_bad_bytes_per_pack(kind, nbytes):
    """Anything else is refused by name, and shown."""
    with pytest.raises(ArgumentError, match=r"bytes_per_pack must be a whole number, 0 or more[\s\S]*given: "):
        kind(nbytes)


@pytest.mark.parametrize("kind", [CommunicationOptions, CollectiveHints])
@pytest.mark.parametrize("seconds", [None, 1, 0.5, math.inf, 10**9])
def test_timeouts(kind, seconds):
    """A timeout is a positive number of seconds, or none."""
    assert kind(timeout_seconds=seconds).timeout_seconds == seconds


@pytest.mark.parametrize("kind", [CommunicationOptions, CollectiveHints])
@pytest.mark.parametrize("seconds", [0, -1, -0.5, math.nan, -math.inf, "1", True, [1], 1j])
def test_bad_timeouts(kind, seconds):
    """A timeout that is no positive number is refused, and shown."""
    with pytest.raises(ArgumentError, match=r"timeout_seconds must be a positive number[\s\S]*given: "):
        kind(timeout_seconds=seconds)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_implementations(name):
    """Every algorithm's name is an implementation, in any case."""
    assert CommunicationOptions(implementation=name).implementation == name
    assert CommunicationOptions(implementation=name.upper()).implementation == name
    assert algorithm_name(name) == name


@pytest.mark.parametrize("wrong", ["", "bogus", "hierarchical copy", None, 0, b"ring", ["ring"]])
def test_bad_implementations(wrong):
    """An unknown algorithm is refused, with a list of those that exist; TF takes it for hierarchical copy."""
    for refuse in (algorithm_name, lambda name: CommunicationOptions(implementation=name)):
        with pytest.raises(ArgumentError, match=r"no such algorithm[\s\S]*one_device, hierarchical_copy, ring"):
            refuse(wrong)


def test_options_are_frozen_values():
    """Options are equal by value, hash alike, and cannot be changed."""
    a, b = CommunicationOptions(1024, 2.0, "ring"), CommunicationOptions(1024, 2.0, "RING")
    assert a == b
    assert hash(a) == hash(b)
    assert a != CommunicationOptions(1025, 2.0, "ring")
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.bytes_per_pack = 1


def test_hints_are_options():
    """The older class is the newer one without a choice of implementation."""
    hints = CollectiveHints(2048, 3)
    assert isinstance(hints, CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds, hints.implementation) == (2048, 3, "auto")
    assert repr(hints) == "CollectiveHints(bytes_per_pack=2048, timeout_seconds=3)"
    with pytest.raises(TypeError):
        CollectiveHints(1, 2, "ring")


def test_read_options():
    """None means the default; options and hints are taken as they are; anything else is refused."""
    assert read_options(None) is DEFAULT == CommunicationOptions(0, None, "auto")
    for options in (CommunicationOptions(8), CollectiveHints(8)):
        assert read_options(options) is options
    for wrong in ({}, 0, "auto", CommunicationOptions, False):
        with pytest.raises(ArgumentError, match="options must be CommunicationOptions"):
            read_options(wrong)


def test_count_names_its_argument():
    """The message starts with the argument's name and ends with what to do."""
    with pytest.raises(
        ArgumentError, match=r"^num_packs must be a whole number, 0 or more\.\n  given: -3 \(int\)\n  try:   less$"
    ):
        count("num_packs", -3, "less")
