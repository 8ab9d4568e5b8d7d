"""Invalid requests to ``plan``, and requests without a route."""

import itertools

import pytest
from strategies import NAMED, names
from test_plan import COLLECTIVES, MICRO, ends

import crossreduce as cr
from crossreduce import ArgumentError, DeviceError, Link, PlanError, Topology
from crossreduce.planning import REGISTRY

SQUARE = Topology.ring(4, 25, MICRO)
BAD = [
    ({"nbytes": -1}, r"nbytes must be an integer from 0 to[\s\S]*-1 \(int\)"),
    ({"nbytes": True}, r"nbytes must be an integer[\s\S]*True \(bool\)"),
    ({"nbytes": 8.0}, r"nbytes must be an integer[\s\S]*8\.0 \(float\)"),
    ({"nbytes": "8x"}, r"nbytes must be an integer[\s\S]*'8x' \(str\)[\s\S]*nbytes=1 << 20$"),
    ({"nbytes": None}, r"nbytes must be an integer[\s\S]*None"),
    ({"nbytes": 1 << 61}, r"nbytes must be an integer from 0 to 1152921504606846976[\s\S]*2305843009213693952"),
    ({"packs": 0}, r"packs must be an integer from 1 to 10000[\s\S]*0 \(int\)[\s\S]*packs=1"),
    ({"packs": 10_001}, r"packs must be an integer from 1 to 10000[\s\S]*10001"),
    ({"packs": True}, r"packs must be an integer[\s\S]*True \(bool\)"),
    ({"packs": 2.0}, r"packs must be an integer[\s\S]*2\.0"),
    ({"collective": "gather"}, r"no such collective[\s\S]*'gather'[\s\S]*one of all_reduce, reduce, broadcast"),
    *[({"collective": wrong}, "no such collective") for wrong in ("ALL_REDUCE", None, ["reduce"])],
    ({"algorithm": "best"}, r"no such algorithm[\s\S]*'best'[\s\S]*one of one_device[\s\S]*forest, nccl, auto"),
    *[({"algorithm": wrong}, "no such algorithm") for wrong in (None, {})],
    ({"root": "cpu:9"}, r"the root must be a device of the topology[\s\S]*'cpu:9'[\s\S]*one of cpu:0, cpu:1"),
    ({"collective": "broadcast", "root": "cpu:9"}, "the root must be a device of the topology"),
    ({"collective": "reduce_scatter", "root": "cpu:1"}, r"reduce_scatter has no root[\s\S]*root='cpu:1'"),
    ({"collective": "all_gather", "root": "cpu:1"}, r"all_gather has no root[\s\S]*reduce or broadcast"),
    ({"collective": "broadcast", "sources": [0], "root": 1}, r"a broadcast must have one root[\s\S]*root=cpu:1"),
    ({"collective": "reduce", "destinations": [0], "root": 1}, r"a reduce must have one root[\s\S]*root=cpu:1"),
    ({"collective": "broadcast", "sources": [0, 1]}, r"a broadcast must have one root[\s\S]*cpu:0', 'cpu:1"),
    ({"collective": "broadcast", "sources": [0, 1], "root": 0}, "a broadcast must have one root"),
    ({"collective": "reduce", "destinations": [0, 1]}, r"a reduce must have one root[\s\S]*all_reduce"),
    ({"collective": "all_gather", "sources": [0], "destinations": [1]},
     "the sources and the destinations of all_gather must be the same"),
    ({"collective": "reduce_scatter", "sources": [0], "destinations": [0, 1]},
     "the sources and the destinations of reduce_scatter must be the same"),
    ({"sources": []}, "at least one device must be named"),
    ({"destinations": ()}, "at least one device must be named"),
    ({"sources": ["cpu:0", "cpu:7"]}, r"the topology has no such device[\s\S]*cpu:7[\s\S]*one of cpu:0, cpu:1"),
    ({"sources": ["cpu:1", "CPU:1"]}, "cpu:1 is listed more than once"),
    ({"sources": "cpu:0"}, "devices must be a list of names"),
    ({"destinations": 3}, "devices must be a list of names"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), BAD, ids=[str(given) for given, _ in BAD])
def test_bad_requests_are_refused(given, text):
    """An invalid request raises an ArgumentError with the problem, the given value and a remedy."""
    with pytest.raises(ArgumentError, match=text) as caught:
        cr.plan(SQUARE, **given)
    assert "\n  given: " in str(caught.value)


@pytest.mark.parametrize("root", [4, -1, True, 1.0, "", "foo", ["cpu:0"], b"cpu:0"])
def test_roots_that_are_not_names(root):
    """A root must be the name or the number of a device."""
    with pytest.raises(DeviceError, match="device"):
        cr.plan(SQUARE, "reduce", root=root)


@pytest.mark.parametrize("wrong", [None, "dgx-9", 4, [[0, 1], [1, 0]], Topology])
def test_no_topology(wrong):
    """Anything that does not give a topology raises an ArgumentError with a hint."""
    with pytest.raises(ArgumentError, match=r"(this is not a topology|there is no machine of this name)[\s\S]*dgx-1v"):
        cr.plan(wrong)


@pytest.mark.parametrize("algorithm", [name for name, entry in REGISTRY.items() if not entry.has_root])
def test_algorithms_without_a_root(algorithm):
    """A root for an algorithm without roots raises a PlanError that lists the algorithms with roots."""
    with pytest.raises(
        PlanError, match=rf"{algorithm} does not reduce on a root[\s\S]*root=cpu:1[\s\S]*one_device, hierarch"
    ):
        cr.plan(SQUARE, algorithm=algorithm, root="cpu:1")


HALVES = Topology(
    names(4),
    [Link(*pair, 1) for pair in itertools.permutations(names(2))]
    + [Link(*pair, 1) for pair in itertools.permutations(names(4)[2:])],
)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_unreachable_devices_cannot_be_planned(collective):
    """If one device cannot be reached from another one, every algorithm raises a PlanError with the collective, a
    device, those that it cannot reach, and the cut between them; the connected parts can be planned."""
    src, dst, inside = (
        ("cpu:2", "cpu:0", "cpu:2, cpu:3") if collective == "reduce" else ("cpu:0", "cpu:2, cpu:3", "cpu:0, cpu:1")
    )
    root = "cpu:0" if collective in ("reduce", "broadcast") else None
    for algorithm in (*NAMED, "auto"):
        with pytest.raises(PlanError) as caught:
            cr.plan(HALVES, collective, 8, algorithm, root=root)
        first, *rest = str(caught.value).splitlines()
        assert first == f"{collective} needs a route from {src} to {dst}, but no link leads out of {{{inside}}}."
        assert rest[0] == f"  given: {HALVES!r}"
        assert "topology.subset" in rest[1]
        part = HALVES.subset(["cpu:2", "cpu:3"])
        assert cr.plan(part, collective, 8, algorithm).seconds > 0


def test_the_cut_of_links_in_one_direction_is_named():
    """If devices are linked in one direction only, the error names the missing route; other requests are planned."""
    down = Topology(names(2), [Link("cpu:0", "cpu:1", 1)])
    cut = r"all_reduce needs a route from cpu:1 to cpu:0, but no link leads out of \{cpu:1\}"
    with pytest.raises(PlanError, match=cut):
        cr.plan(down)
    assert ends(cr.plan(down, sources=["cpu:0"]), "all_reduce") == (("cpu:0",), names(2))
