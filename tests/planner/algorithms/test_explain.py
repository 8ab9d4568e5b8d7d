"""``explain``: every number in the text about a plan is compared with one that is computed from the schedule."""

import re
from fractions import Fraction

import pytest
from budget import examples
from hypothesis import example, given
from hypothesis import strategies as st
from reports import explained
from strategies import NAMED, names, wired

import crossreduce as cr
from crossreduce import Link, Topology, simulate
from crossreduce.planning import hierarchical_copy
from crossreduce.planning.explain import duration, percent, shape, size, tree_lines, tree_text
from crossreduce.schedule import fluid_rate

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DGX = Topology.machine("dgx-1v")
H100S = Topology.machine("hgx-h100", hosts=2)
MESH = Topology.mesh(4, 4, 25, 1e-6)
STAR = Topology.star(6, 450, 1e-6)
PLANS = {
    "dgx": lambda: cr.plan(DGX, nbytes=64 * MIB),
    "dgx packs": lambda: cr.plan(DGX, nbytes=5000, algorithm="hierarchical_copy", packs=3),
    "dgx part": lambda: cr.plan(DGX, "reduce", MIB, sources=["cuda:0", "cuda:3", "cuda:5"], root="cuda:6"),
    "hosts gather": lambda: cr.plan(H100S, "all_gather", GIB, "forest"),
    "hosts broadcast": lambda: cr.plan(H100S, "broadcast", GIB, root="host1/cuda:2"),
    "mesh scatter": lambda: cr.plan(MESH, "reduce_scatter", MIB, "hierarchical_copy"),
    "star": lambda: cr.plan(STAR.with_switches(reducing=True), nbytes=MIB, algorithm="forest"),
    "dgx shots": lambda: cr.plan(DGX, nbytes=KIB, algorithm="one_shot"),
    "dgx doubling": lambda: cr.plan(DGX, nbytes=KIB, algorithm="recursive_doubling"),
    "grid doubling": lambda: cr.plan(Topology.mesh(2, 3, 25, 1e-6), nbytes=KIB, algorithm="recursive_doubling"),
    "star one": lambda: cr.plan(STAR, "reduce", 10**6, "one_device", root="cpu:4"),
}
each_plan = pytest.mark.parametrize("name", PLANS)


def trees(schedule):
    """Return (share, root, {child: parent}) for each tree of a chunk. A root is a device that completes the sum.

    The root of a chunk that is only copied is its source.
    """
    found = []
    for c, chunk in enumerate(schedule.chunks):
        cells = {s: ({s}, frozenset()) for s in chunk.sources}  # device: (contributions, transfers that moved them)
        roots = []
        for steps in schedule.rounds:
            made = {}
            for _, dst, srcs in [step for step in steps if step.chunk == c]:
                contributions = set().union(*(cells[src][0] for src in srcs))
                moved = frozenset().union(*(cells[src][1] for src in srcs), {(src, dst) for src in set(srcs) - {dst}})
                made[dst] = contributions, moved
                if len(srcs) > 1 and contributions == set(chunk.sources):
                    roots.append((chunk.share, dst, dict(moved)))
            cells |= made
        if not roots:
            moved = frozenset().union(*(cells[dst][1] for dst in chunk.destinations))
            roots = [(chunk.share, *chunk.sources, {child: parent for parent, child in moved})]
        found += roots
    return found


def hops(parents, device):
    """Return the number of hops from a device to the root of a tree."""
    return 1 + hops(parents, parents[device]) if device in parents else 0


def read(text):
    """Return (root, {child: parent}) of a tree in text, in which the children of a device follow it in brackets."""
    stack, parents, before, root = [], {}, None, None
    for word in re.findall(r"[^\s()]+|[()]", text):
        if word == "(":
            stack.append(before)
        elif word == ")":
            stack.pop()
        else:
            before = word
            if stack:
                assert word not in parents
                parents[word] = stack[-1]
            else:
                assert root is None
                root = word
    assert not stack
    return root, parents


@each_plan
def test_the_numbers(name):
    """The text has the request, the shape of the schedule, its time and rates, and the exact bound."""
    made = PLANS[name]()
    schedule, limit = made.schedule, made.bound
    devices = {device for chunk in schedule.chunks for device in (*chunk.sources, *chunk.destinations)}
    head, facts, *_ = explained(made.explain())
    hosts = len({schedule.devices[device].rpartition("/")[0] for device in devices})
    on_hosts = f" of {hosts} hosts" if hosts > 1 else ""
    assert head == f"{made.collective} of {size(made.nbytes)} by {made.algorithm} on {len(devices)} devices{on_hosts}"
    shares = [chunk.share for chunk in schedule.chunks]
    found = trees(schedule)
    roots = {root for _, root, _ in found}
    words = r"(\d+) chunks?, (\d+) roots?, trees of depth (\d+), (\d+) rounds?, (\d+) pieces? per chunk"
    numbers = re.fullmatch(words, facts["plan"]).groups()
    depth = max(hops(parents, child) for _, _, parents in found for child in parents)
    assert numbers == tuple(map(str, (len(shares), len(roots), depth, len(schedule.rounds), schedule.pieces)))

    seconds, large = simulate(schedule, made.topology, made.nbytes).seconds, fluid_rate(schedule, made.topology)
    time, now, later = re.fullmatch(r"(.+), (\S+) GB/s; (\S+) GB/s when large", facts["predicted"]).groups()
    number, unit = time.split()
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] == pytest.approx(seconds, rel=5.1e-3)
    assert float(now) == pytest.approx(made.nbytes / seconds / 1e9, abs=5.1e-3)
    assert float(later) == pytest.approx(float(large), abs=5.1e-3)

    limit.check()
    pattern = r"(\S+) GB/s(?: \(exactly (\S+)\))?, (\S+) % of it reached( \(a loss of (\S+) %\))?"
    near, exact, reached, loss, lost = re.fullmatch(pattern, facts["bound"]).groups()
    assert Fraction(exact or near) == limit.algbw
    assert float(near) == pytest.approx(float(limit.algbw), abs=5.1e-3)
    ratio = large / limit.algbw
    assert ratio <= 1
    assert 0 <= ratio * 100 - Fraction(reached) < Fraction(1, 100)
    assert (loss is None) == (reached == "100") == (ratio == 1)
    assert loss is None or Fraction(reached) + Fraction(lost) == 100


def unlabelled(root, parents):
    """Return the shape of a tree: nested tuples without names."""
    return tuple(sorted(unlabelled(child, parents) for child, parent in parents.items() if parent == root))


def described(text, nodes, outward):
    """Return the trees, as (root, {child: parent}), of a line about stars or about paths along a ring, or ``None``."""
    match = re.fullmatch(r"on each (device|of (.*)), (from all others|to all others|along the ring (.*))", text)
    if match is None:
        return None
    roots = nodes if match[1] == "device" else match[2].split(", ")
    if match[4] is None:
        assert ("to" in match[3]) == outward
        return [(root, {node: root for node in nodes if node != root}) for root in roots]
    ring = match[4].split(" -> ")
    assert ring.pop() == ring[0]
    assert sorted(ring) == sorted(nodes)
    after = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
    if outward:
        after = {b: a for a, b in after.items()}
    return [(root, {a: b for a, b in after.items() if a != root}) for root in roots]


@each_plan
def test_the_trees(name):
    """Each of up to 16 lines shows a tree and its share; or stars, paths of a ring, or trees of one shape, that have
    equal shares. The number of omitted trees is stated."""
    made = PLANS[name]()
    schedule, outward = made.schedule, made.collective in ("broadcast", "all_gather")
    wanted = {}
    for share, root, parents in trees(schedule):
        named = {schedule.devices[child]: schedule.devices[parent] for child, parent in parents.items()}
        key = schedule.devices[root], tuple(sorted(named.items()))
        wanted[key] = wanted.get(key, 0) + share
    shown = explained(made.explain())[2]
    assert 0 < len(shown) <= 16
    for part, text in shown:
        share = Fraction(part)
        found = described(text, sorted({*schedule.devices}), outward)
        if found is not None:
            assert len(found) >= 3
            for root, parents in found:
                assert wanted.pop((root, tuple(sorted(parents.items())))) == share
            continue
        text, _, others = text.partition(" and ")
        if text.endswith(" ..."):  # cut off: a tree must have this beginning and share
            start = text.removesuffix(" ...")
            candidates = [tree for tree in wanted if tree_text(tree[0], dict(tree[1])).startswith(start)]
            tree = next(tree for tree in candidates if wanted[tree] == share)
        else:
            root, parents = read(text)
            tree = root, tuple(sorted(parents.items()))
        assert wanted.pop(tree) == share
        if others:
            number = int(re.fullmatch(r"(\d+) more of this shape", others)[1])
            form = unlabelled(tree[0], dict(tree[1]))
            same = [key for key in wanted if wanted[key] == share and unlabelled(key[0], dict(key[1])) == form]
            assert number == len(same) >= 4
            for key in same:
                del wanted[key]
    more = re.search(r"\n         and (\d+) more\n", made.explain())
    assert len(wanted) == (int(more[1]) if more else 0)


def test_stars_rings_and_shapes_have_one_line():
    """ "direct" on a rack has one line for 72 trees, a ring one for its paths, and equal trees on switches one."""
    rack = explained(cr.plan("gb200-nvl72", algorithm="direct").explain())[2]
    assert rack == [("1/72", "on each device, from all others")]
    gather = explained(cr.plan("mi300x", "all_gather", "64M", "direct").explain())[2]
    assert gather == [("1/8", "on each device, to all others")]
    ring = Topology.ring(5, latency_s=1e-6)
    assert explained(cr.plan(ring, algorithm="ring").explain())[2] == [
        ("1/10", f"on each device, along the ring {' -> '.join(f'cpu:{k % 5}' for k in order)}")
        for order in (range(6), (0, 4, 3, 2, 1, 0))
    ] or explained(cr.plan(ring, algorithm="ring").explain())[2] == [
        ("1/5", "on each device, along the ring cpu:0 -> cpu:1 -> cpu:2 -> cpu:3 -> cpu:4 -> cpu:0")
    ]
    copies = hierarchical_copy([f"cpu:{k}" for k in range(8)], packs=8)
    assert tree_lines(shape(copies)) == [
        "     1/8 cpu:0(cpu:1 cpu:2 cpu:3 cpu:4(cpu:5 cpu:6 cpu:7)) and 7 more of this shape"
    ]


def test_trees_are_cut_only_to_a_width():
    """Without a width, as in a file or a pipe, the text of a long tree has all devices. With one it is cut."""
    hosts = Topology.machine("hgx-h100", hosts=4)
    made = cr.plan(hosts, "broadcast", MIB, "one_device", root="host0/cuda:0")
    ((_, tree),) = explained(made.explain())[2]
    assert sorted(re.findall(r"host\d/cuda:\d", tree)) == sorted(hosts.devices)
    ((_, tree),) = explained(made.explain(80))[2]
    assert tree.endswith(" ...")


@pytest.mark.parametrize("width", [60, 80, 120])
@each_plan
def test_the_text_fits_a_width(name, width):
    """With a width no line is longer, and no word but those of long trees is lost."""
    made = PLANS[name]()
    whole, lines = made.explain(), made.explain(width).splitlines()
    assert max(map(len, lines)) <= width
    facts = whole.partition("  shares of")[0].split()
    assert " ".join(lines).split()[: len(facts)] == facts


@each_plan
def test_the_others(name):
    """The text has the times, rates and ratios of "ring", "one_device" and, for an all-reduce, TensorFlow's trees."""
    made = PLANS[name]()
    chunk, devices = made.schedule.chunks[0], made.schedule.devices
    sources, destinations = ([devices[k] for k in end] for end in (chunk.sources, chunk.destinations))
    if made.collective in ("reduce_scatter", "all_gather"):
        sources = destinations = [device for device in devices if device in made.bound.devices]
    wanted = {}  # by algorithm: (seconds, rate)
    if made.collective == "all_reduce":
        tensorflow = hierarchical_copy(sources, packs=len(sources))
        seconds = simulate(tensorflow, made.topology, made.nbytes).seconds
        wanted["TensorFlow's trees"] = seconds, fluid_rate(tensorflow, made.topology)
    for algorithm in ("ring", "one_device"):
        other = cr.plan(made.topology, made.collective, made.nbytes, algorithm, sources, destinations)
        wanted[algorithm] = other.seconds, other.rate
    assert made.others() == wanted
    text = made.explain().splitlines()
    head = "  other algorithms, for the same request" + (" without its packs" if made.request.packs > 1 else "")
    assert head in text
    found = explained(made.explain())[3]
    wanted.pop(made.algorithm, None)  # the chosen algorithm is not another one
    assert list(found) == [name for name in wanted if made.comparisons[name].schedule != made.schedule]
    for name, (time, times, rate, part) in found.items():
        seconds, fluid = wanted[name]
        assert time == duration(seconds)
        assert float(times) == pytest.approx(seconds / made.seconds, abs=5.1e-3)
        assert float(rate) == pytest.approx(float(fluid), abs=5.1e-3)
        assert 0 <= fluid / made.bound.algbw * 100 - Fraction(part) < Fraction(1, 100)


def test_tensorflows_plan_on_a_dgx_1v():
    """On a DGX-1V, TensorFlow's trees reach 50 of 600/7 GB/s. Comparisons ignore packs and root of the request."""
    made = cr.plan(DGX, nbytes=GIB)
    seconds, rate = made.others()["TensorFlow's trees"]
    assert rate == 50
    assert GIB / seconds / 1e9 == pytest.approx(100 / 3, rel=1e-3)
    assert "50.00 GB/s when large, 58.33 % of the bound" in made.explain()
    assert "85.71 GB/s (exactly 600/7), 100 % of it reached" in made.explain()
    assert "\n  other algorithms, for the same request\n" in made.explain()
    for chosen in ({"packs": 2}, {"root": "cuda:3"}, {"packs": 2, "root": "cuda:3"}):
        other = cr.plan(DGX, nbytes=GIB, algorithm="one_device", **chosen)
        assert f"\n  other algorithms, for the same request without its {' and '.join(chosen)}\n" in other.explain()
        assert other.others() == made.others()


def test_what_is_counted_beside_links():
    """The text states what a queued operation costs on CUDA devices, and other costs; on CPUs there are none."""
    priced = cr.plan("hgx-h100", nbytes=MIB, costs=cr.Costs(reduction_gb_per_s=3350, messages_per_s=2e8))
    facts = {
        "2.00 us to queue each operation": cr.plan(DGX, nbytes=MIB),
        "no time to queue operations, as in one kernel": cr.plan(DGX, nbytes=MIB, operation_s=0),
        "2.00 us to queue each operation; reductions at 3350 GB/s; 2e+08 messages per second between two hosts": priced,
        None: cr.plan(STAR, nbytes=MIB),
    }
    for text, made in facts.items():
        assert explained(made.explain())[1].get("counted") == text


def test_one_line_if_no_data_has_to_move():
    """With one device, or with 0 bytes, the text is one line."""
    alone = "all_reduce of 8 bytes by one_device on 1 device: no data has to move."
    assert cr.plan(Topology.full_mesh(1), nbytes=8).explain() == alone
    assert cr.plan(DGX, "reduce", MIB, sources=["cuda:3"], root="cuda:3").explain().endswith("no data has to move.")
    none = "all_reduce of 0 bytes by forest on 6 devices: no data has to move."
    assert cr.plan(STAR, nbytes=0, algorithm="forest").explain() == none


@st.composite
def requested(draw):
    """Draw (topology, sources, destinations)."""
    topology = draw(st.integers(1, 6).flatmap(lambda n: wired(names(n))))
    some = st.lists(st.sampled_from(topology.devices), min_size=1, unique=True)
    return topology, draw(some), draw(some)


@examples(80)
@given(requested(), st.sampled_from([*NAMED, "auto"]), st.sampled_from([0, 1, MIB]))
@example((Topology.ring(5), ["cpu:0", "cpu:2"], ["cpu:2", "cpu:1"]), "ring", 1)
def test_any_plan_can_be_explained(ask, algorithm, nbytes):
    """For any sources and destinations a plan can be explained, and compared with the other algorithms."""
    topology, sources, destinations = ask
    made = cr.plan(topology, "all_reduce", nbytes, algorithm, sources, destinations)
    text = made.explain()
    assert text.startswith(f"all_reduce of {size(nbytes)} by {made.algorithm} on ")
    if made.rate is not None:
        assert set(made.others()) == {"TensorFlow's trees", "ring", "one_device"}
        assert all(seconds > 0 for seconds, _ in made.others().values()) == (nbytes > 0)


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
def test_plans_on_links_in_one_direction_can_be_explained(collective):
    """An algorithm that would need a missing route is left out of the comparison."""
    links = [Link("cpu:1", "cpu:0", 5, 1e-6), Link("cpu:1", "cpu:2", 5, 1e-6)]
    links = links if collective == "broadcast" else [link._replace(src=link.dst, dst=link.src) for link in links]
    made = cr.plan(Topology(names(3), links), collective, MIB, root="cpu:1")
    assert "ring" not in made.others()
    assert "bound     5.00 GB/s, 100 % of it reached" in made.explain()


def test_numbers_in_words():
    """Bytes are printed in the largest unit that divides them, and times in s, ms or us, with a number of 1 or more."""
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1536: "1536 bytes", 3 << 20: "3 MiB", 1 << 30: "1 GiB"}
    for nbytes, text in (sizes | {(1 << 30) + 1024: "1048577 KiB", 5 << 40: "5120 GiB"}).items():
        assert size(nbytes) == text
    for seconds, text in ((0, "0.00 us"), (4.2e-6, "4.20 us"), (1e-3, "1.00 ms"), (0.25, "250.00 ms"), (1, "1.00 s")):
        assert duration(seconds) == text


@given(st.fractions(0, 1))
def test_percents_are_rounded_down(ratio):
    """Percentages are rounded down to 0.01 %. So 100 % is only printed for a ratio of 1."""
    number = Fraction(percent(ratio).removesuffix(" %"))
    assert 0 <= ratio * 100 - number < Fraction(1, 100)
    assert (number == 100) == (ratio == 1)
