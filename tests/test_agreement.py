"""What ranks are told when they do not agree, or do not come: the same text on all, with names and both values."""

import copy
import pickle
import re

import pytest

import crossreduce as cr
from crossreduce.ranks.diagnostics import Said, described, disagreement, lost, named, stalled, timed_out

SUM = described("all_reduce", "sum", dtype="float32", shape=(1024, 3))


def said(*texts, sequence=17):
    return {rank: Said(sequence, text) for rank, text in enumerate(texts)}


# How one rank's call differs from all_reduce sum float32[1024, 3], and what the error then calls it.
DIFFERENCES = {
    "shape": described("all_reduce", "sum", dtype="float32", shape=(3, 1024)),
    "dtype": described("all_reduce", "sum", dtype="float64", shape=(1024, 3)),
    "op": described("all_reduce", "mean", dtype="float32", shape=(1024, 3)),
    "op and dtype and shape": described("all_reduce", "max", dtype="int8", shape=()),
    "what they call": described("broadcast", root=0, dtype="float32", shape=(1024, 3)),
    "number of tensors": SUM + ", float32[4]",
}


@pytest.mark.parametrize(("what", "other"), DIFFERENCES.items(), ids=list(DIFFERENCES))
def test_what_differs_is_said_in_words_with_the_rank_and_both_values(what, other):
    """One rank among four that calls something else is named, with its call, theirs, and what is different."""
    text = disagreement(said(SUM, SUM, other, SUM), "world")
    head, given, remedy = text.splitlines()
    assert head == f'rank 2 differs from ranks 0, 1, 3 in {what} at op 17 of group "world".'
    assert given == f"  given: rank 2: {other}; ranks 0, 1, 3: {SUM}"
    assert remedy.startswith("  try:   ")


def test_roots_differ():
    """Broadcasts from different roots differ in root, and in nothing else."""
    calls = [described("broadcast", root=root, dtype="int8", shape=(7,)) for root in (2, 2, 1)]
    assert "rank 2 differs from ranks 0, 1 in root at op 17" in disagreement(said(*calls), "a")


def test_a_call_too_few_is_named_with_its_number():
    """A rank that is at another number of calls is named with both numbers."""
    calls = said(SUM, SUM, SUM, SUM, sequence=18) | {2: Said(17, SUM)}
    text = disagreement(calls, "world")
    assert "rank 2 differs from ranks 0, 1, 3 in how many calls they have made of" in text
    assert f"rank 2: op 17, {SUM}; ranks 0, 1, 3: op 18, {SUM}" in text


def test_the_many_are_believed_and_of_two_the_first():
    """The larger party is not to blame; where both are as large it is the one with the lowest rank."""
    assert disagreement(said("barrier", SUM, SUM), "a").startswith("rank 0 differs from ranks 1, 2")
    assert disagreement(said("barrier", SUM), "a").startswith("rank 1 differs from rank 0")
    assert disagreement(said("barrier", SUM, SUM, "barrier"), "a").startswith("ranks 1, 2 differ from ranks 0, 3")


def test_every_rank_would_write_the_same():
    """The text depends on who called what, and not on the order in which that was learnt."""
    calls = said(SUM, "barrier", DIFFERENCES["op"], SUM, "barrier")
    texts = {disagreement(dict(sorted(calls.items(), key=lambda x: x[0] * k % 5)), "a") for k in range(1, 5)}
    assert len(texts) == 1


def test_each_of_several_differing_ranks_is_named():
    """Three different calls are three parties, each with its value, and all that differs is said."""
    text = disagreement(said(SUM, DIFFERENCES["shape"], SUM, DIFFERENCES["dtype"]), "a")
    assert text.startswith("ranks 1, 3 differ from ranks 0, 2 in shape and dtype")
    assert f"rank 1: {DIFFERENCES['shape']}; rank 3: {DIFFERENCES['dtype']}; ranks 0, 2: {SUM}" in text


def test_texts_stay_short_on_many_ranks():
    """512 ranks of which each calls something else are counted, not listed; so are ranks with gaps."""
    texts = [described("all_reduce", "sum", dtype="float32", shape=(k,)) for k in range(512)]
    text = disagreement(said(*texts), "a")
    assert len(text) < 1000
    assert "and 504 other calls" in text
    assert len(named(range(0, 1000, 2))) < 100
    assert "(500 in all)" in named(range(0, 1000, 2))
    assert len(timed_out(1, Said(600, "barrier"), {k: Said(k, "barrier") for k in range(512)}, "a")) < 1000
    assert len(lost({k: f"pid {k}" for k in range(512)}, Said(1, "barrier"), "a")) < 1000


@pytest.mark.parametrize("text", ["", "what a user says: [1, 2]", "send 3 (tag 4)", "x" * 500, "a root b"])
def test_any_words_may_be_compared(text):
    """A call in words of its own is no error of ours: it differs in what is called."""
    assert "in what they call" in disagreement(said(SUM, SUM, text), "a")


def test_who_is_late_is_told_with_its_last_call():
    """The warning and the timeout name the late, what they did last, and what the others are in."""
    late = {3: Said(16, "barrier"), 5: Said(17, SUM), 6: None, 7: Said(0, "")}
    warning, end = stalled(5, Said(17, SUM), late, "world"), timed_out(30, Said(17, SUM), late, "world")
    assert warning.startswith(f'5 s without ranks 3, 5-7 in op 17, {SUM}, of group "world".')
    assert end.startswith(f"ranks 3, 5-7 did not come within the timeout of 30 s to op 17, {SUM}")
    for text in (warning, end):
        assert "rank 3 has not begun it: its last call was op 16, barrier" in text
        assert "rank 5 has begun it, and then stopped" in text
        assert "rank 6 has not answered" in text
        assert "rank 7 has made no call so far" in text
    assert "crossreduce doctor" in end


def test_the_lost_are_told_with_their_place_and_end():
    """Each lost rank comes with its process and host, and how it went."""
    where = {1: "pid 10 on host a", 4: "pid 11 on host b"}
    text = lost(where, Said(17, SUM), "world", "was interrupted")
    assert text.startswith(f'ranks 1, 4 were interrupted during op 17, {SUM}, of group "world"')
    assert "rank 1: pid 10 on host a; rank 4: pid 11 on host b" in text
    assert lost({1: "pid 10"}, Said(1, "barrier"), "a", "was interrupted").startswith("rank 1 was interrupted")


@pytest.mark.parametrize(
    ("kind", "builtin"), [(cr.PeerLostError, ConnectionError), (cr.CollectiveTimeout, TimeoutError)]
)
def test_errors_keep_their_ranks(kind, builtin):
    """An error of ranks is its built-in too, and has its text and ranks after pickling, copying and a prefix."""
    error = kind("rank 3 died", [3, 4])
    assert isinstance(error, builtin)
    assert isinstance(error, cr.ReductionError)
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.ranks) == (kind, "rank 3 died", (3, 4))
    error.prefix("leaf w")
    assert (str(error), error.ranks) == ("leaf w: rank 3 died", (3, 4))
    with pytest.raises(cr.ReductionError, match=re.escape("rank 3 died")):
        raise error


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
@pytest.mark.parametrize(("op", "root"), [(None, None), ("sum", None), ("max", 3), (None, 0)])
def test_a_described_call_can_be_taken_apart_again(shape, op, root):
    """Whatever the parts of a call, another dtype alone is seen as that."""
    one, other = (described("reduce", op, root, dtype, shape) for dtype in ("bfloat16", "float16"))
    assert "rank 1 differs from rank 0 in dtype at" in disagreement(said(one, other), "a")
