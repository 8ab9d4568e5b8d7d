"""The texts about ranks that are late or lost, or whose calls differ, name these ranks and their calls."""

import copy
import pickle
from types import SimpleNamespace

import pytest

import crossreduce as cr
from crossreduce.errors import rank_list
from crossreduce.observe import diagnostics
from crossreduce.observe.diagnostics import CallSignature, call_text, lost_text, mismatch_text, stall_text, timeout_text

SUM = call_text("all_reduce", "sum", dtype="float32", shape=(1024, 3))
# Calls that differ from all_reduce sum float32[1024, 3], by the aspect that the error names.
DIFFERENCES = {
    "shape": call_text("all_reduce", "sum", dtype="float32", shape=(3, 1024)),
    "dtype": call_text("all_reduce", "sum", dtype="float64", shape=(1024, 3)),
    "op": call_text("all_reduce", "mean", dtype="float32", shape=(1024, 3)),
    "op and dtype and shape": call_text("all_reduce", "max", dtype="int8", shape=()),
    "the call": call_text("broadcast", root=0, dtype="float32", shape=(1024, 3)),
    "number of tensors": SUM + ", float32[4]",
}


def calls_of(*texts, sequence=17):
    return {rank: CallSignature(sequence, text) for rank, text in enumerate(texts)}


def test_the_call_of_most_ranks_counts_as_correct():
    """The text states that the minority of ranks differs from the majority; if they are equally many, the lowest rank
    counts as one of the majority. It lists each call with its ranks. The order of the mapping does not matter."""
    assert mismatch_text(calls_of("barrier", SUM, SUM), "a").startswith("rank 0 differs from ranks 1, 2")
    text = mismatch_text(calls_of(SUM, SUM, SUM, sequence=18) | {2: CallSignature(17, SUM)}, "world")
    assert text.startswith('rank 2 differs from ranks 0, 1 in the number of calls of group "world"')
    assert f"rank 2: op 17, {SUM}; ranks 0, 1: op 18, {SUM}" in text
    assert mismatch_text(calls_of("barrier", SUM), "a").startswith("rank 1 differs from rank 0")
    assert mismatch_text(calls_of("barrier", SUM, SUM, "barrier"), "a").startswith("ranks 1, 2 differ from ranks 0, 3")
    text = mismatch_text(calls_of(SUM, DIFFERENCES["shape"], SUM, DIFFERENCES["dtype"]), "a")
    assert text.startswith("ranks 1, 3 differ from ranks 0, 2 in shape and dtype")
    assert "try:   the same shape and dtype on all ranks" in text
    assert f"rank 1: {DIFFERENCES['shape']}; rank 3: {DIFFERENCES['dtype']}; ranks 0, 2: {SUM}" in text
    for other in ("", "a user's text: [1, 2]", "send 3 (tag 4)", "x" * 500):  # texts that cannot be parsed
        assert "in the call" in mismatch_text(calls_of(SUM, SUM, other), "a")
    calls = calls_of(SUM, "barrier", DIFFERENCES["op"], SUM, "barrier")
    orders = [dict(sorted(calls.items(), key=lambda item: item[0] * k % 5)) for k in range(1, 5)]
    assert len({mismatch_text(each, "a") for each in orders}) == 1


def test_only_programs_with_torch_are_referred_to_its_libraries(monkeypatch):
    """The error about an all-gather of unequal arrays names accelerate only if the program uses torch."""
    calls = calls_of(*(call_text("all_gather", "", None, "float32", (k,)) for k in (3, 4)))
    for loaded in (True, False):
        monkeypatch.setattr(diagnostics, "sys", SimpleNamespace(modules={"torch": None} if loaded else {}))
        text = mismatch_text(calls, "a")
        assert ("pad the arrays" in text, "accelerate" in text) == (True, loaded)


def test_texts_stay_short_on_many_ranks():
    """Of 512 different calls, or of 500 ranks that are not consecutive, a text lists only a few, and their number."""
    text = mismatch_text(calls_of(*(call_text("all_reduce", "sum", None, "float32", (k,)) for k in range(512))), "a")
    assert len(text) < 1000
    assert "and 504 other calls" in text
    assert len(rank_list(range(0, 1000, 2))) < 100
    assert "(500 in all)" in rank_list(range(0, 1000, 2))
    late = {k: CallSignature(k, "barrier") for k in range(512)}
    assert len(timeout_text(1, CallSignature(600, "barrier"), late, "a")) < 1000
    assert len(lost_text({k: f"pid {k}" for k in range(512)}, CallSignature(1, "barrier"), "a")) < 1000


def test_late_and_lost_ranks_are_named():
    """The warning and the timeout name the late ranks, their last calls, and the call of the others. The text about
    lost ranks names their processes and hosts, and how they were lost."""
    late = {3: CallSignature(16, "barrier"), 5: CallSignature(17, SUM), 6: None, 7: CallSignature(0, "")}
    call = CallSignature(17, SUM)
    warning, end = stall_text(5, call, late, "world"), timeout_text(30, call, late, "world")
    assert warning.startswith(f'waited 5 s for ranks 3, 5-7 in op 17, {SUM}, of group "world".')
    assert end.startswith(f'ranks 3, 5-7 did not complete op 17, {SUM}, of group "world", within the timeout of 30 s. ')
    for text in (warning, end):
        assert "rank 3 has not begun it: its last call was op 16, barrier" in text
        assert "rank 5 has begun it, but not completed it" in text
        assert "rank 6 has not answered" in text
        assert "rank 7 has made no call so far" in text
    assert "crossreduce doctor" in end
    text = lost_text({1: "pid 10 on host a", 4: "pid 11 on host b"}, call, "world", "was interrupted")
    assert text.startswith(f'ranks 1, 4 were interrupted during op 17, {SUM}, of group "world"')
    assert "rank 1: pid 10 on host a; rank 4: pid 11 on host b" in text
    assert lost_text({1: "pid 10"}, call, "a", "was interrupted").startswith("rank 1 was interrupted")


@pytest.mark.parametrize(
    ("kind", "builtin"), [(cr.PeerLostError, ConnectionError), (cr.CollectiveTimeout, TimeoutError)]
)
def test_errors_keep_their_ranks(kind, builtin):
    """An error about ranks has built-in base classes, such as RuntimeError, which torch's backends raise. It keeps its
    ranks when it is pickled, copied or prefixed."""
    error = kind("rank 3 died", [3, 4])
    assert all(isinstance(error, base) for base in (builtin, RuntimeError, cr.ReductionError))
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.ranks) == (kind, "rank 3 died", (3, 4))
    error.prefix("leaf w")
    assert (str(error), error.ranks) == ("leaf w: rank 3 died", (3, 4))
