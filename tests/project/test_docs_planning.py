"""docs/planning.md is correct: its code prints its output and draws its pictures, and its numbers are computed again.

The stored results of benchmarks/planning.py, which the page quotes, are those of the current code.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from fractions import Fraction
from itertools import combinations, pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT
from test_chakra import WITHIN

import crossreduce as cr
from crossreduce.export.formats.chakra import writer
from crossreduce.export.pictures.folding import DEVICES_FROM, HOSTS_FROM
from crossreduce.export.pictures.grouping import tree_groups
from crossreduce.planning import Request, hierarchical_copy, plans, schedules
from crossreduce.planning.forest import forest
from crossreduce.planning.optimal.bounds import helped
from crossreduce.planning.optimal.bounds.steiner import MANY, few_enough
from crossreduce.planning.optimal.few_step.forests import MOST_DEVICES
from crossreduce.planning.optimal.symmetric.forest import FEW_DEVICES
from crossreduce.planning.optimal.trees import fitting
from crossreduce.schedule import fluid_rate
from crossreduce.schedule.costs import OPERATION_S
from crossreduce.schedule.simulate import LONGER

DOCS = ROOT / "docs"
PAGE = (DOCS / "planning.md").read_text()
CODE = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)
DATA = Path(cr.__file__).parent / "topology" / "data"
KEPT = json.loads((ROOT / "benchmarks" / "results" / "planning.json").read_text())
REPLANNED = json.loads((ROOT / "benchmarks" / "results" / "live_replan.json").read_text())

BOX = cr.Topology.machine("dgx-1v")
PART = BOX.subset([f"cuda:{k}" for k in (0, 1, 2, 4, 6)])
N = len(PART.devices)
# For each row of the page's table of times, a pattern of the stored results of which the row shows the slowest.
TIMES = {
    "cut bound, up to 16 devices": r"(all_gather|reduce_scatter|broadcast|reduce) bound, up to 16 devices",
    "cut bound, 256 devices": r".* bound, 256 devices",
    "cut bound, 1,024 devices": r".* bound, 1,024 devices",
    "all-reduce bound, up to 16 devices": r"all_reduce bound, .*",
    "forest, up to 16 devices": r".* forest, up to 16 devices",
    "forest, 32 devices": r".* forest, 32 devices",
    "forest, 64 and 72 devices": r".* forest, 64 and 72 devices",
    "a new forest after a lost link or device, 8 devices": r"re-plan by forest .*",
    "a new plan by auto after a lost link or device, 8 devices": r"re-plan by auto .*",
    "a cached plan": r"a cached plan.*",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the code of the page; return what each block prints, the code's variables, and the folder of its pictures."""
    folder = tmp_path_factory.mktemp("docs")
    names, printed = {}, []
    for code, _ in CODE.findall(PAGE):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.chdir(folder):
            exec(code, names)
        printed.append(out.getvalue())
    return SimpleNamespace(printed=printed, names=SimpleNamespace(**names), folder=folder)


def texts(picture):
    """Return the contents of the text elements of an SVG picture."""
    return re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text(), re.DOTALL)


def test_page_code_prints_the_output_of_the_page(run):
    """Each Python block prints the text block that follows it, or nothing if none follows."""
    shown = [output for _, output in CODE.findall(PAGE)]
    assert len(shown) == PAGE.count("```python") > 8
    assert run.printed == shown


def test_page_pictures_are_those_of_its_code(run):
    """The page shows the pictures that its code draws; the stored pictures have the texts of newly drawn ones."""
    named = re.findall(r"\]\(pictures/([\w-]+\.svg)\)", PAGE)
    assert sorted(named) == sorted(file.name for file in run.folder.glob("*.svg"))
    for name in named:
        assert texts(DOCS / "pictures" / name) == texts(run.folder / name) != []


def ratio(value):
    """Return a fraction as text."""
    return f"{value.numerator} / {value.denominator}"


def decimal(value):
    """Return a number of at most 10 significant digits as decimal text."""
    assert Fraction(f"{float(value):.10g}") == value
    return f"{float(value):.10g}"


def pairs(topology):
    """Return {(last digit of a, last digit of b): bandwidth} for each pair of linked devices a < b."""
    return {(link.src[-1], link.dst[-1]): link.bandwidth for link in topology.links if link.src < link.dst}


def wiring():
    """Yield the page's statements about the links."""
    brick = min(link.bandwidth for link in BOX.links)
    yield f"NVLink bricks of {brick} GB/s each way"
    assert sum(link.bandwidth for link in BOX.links) / 2 / brick == 24  # the page: "one brick of twenty-four"
    assert len(pairs(PART)) == 6  # the page: "six pairs"
    sorts = {width: [f"{a}-{b}" for (a, b), now in pairs(PART).items() if now == width] for width in (25, 50)}
    slow, fast = (", ".join(names[:-1]) + f" and {names[-1]}" for names in sorts.values())
    yield f"{slow} of 25 GB/s, {fast.replace(', ', ' and ')} of 50 GB/s"
    numbers = [device[-1] for device in PART.devices]
    none = [f"{a}-{b}" for a, b in combinations(numbers, 2) if (a, b) not in pairs(PART)]
    yield f"{', '.join(none[:-1])} and {none[-1]} have none"


def tensorflow():
    """Yield the page's statements about TensorFlow's trees."""
    for board in (BOX.devices[:4], BOX.devices[4:]):  # the page: "each fully connected"
        assert all(BOX.link(a, b) for a, b in permutations(board, 2))
    numbers = [device[-1] for device in PART.devices]
    yield f"are {', '.join(numbers[: N // 2])} and {', '.join(numbers[N // 2 :])}"
    halves = hierarchical_copy(PART.devices, packs=N)
    used = cr.simulate(halves, PART, nbytes=5000).bytes
    share = Fraction(used["cuda:0", "cuda:1"], 5000)
    width, rate = PART.link("cuda:0", "cuda:1").bandwidth, fluid_rate(halves, PART)
    assert width / share == rate
    yield f"So {ratio(share)} of the buffer cross the link from 0 to 1, which carries {width} GB/s"
    yield f"{width} / ({ratio(share)}) = {ratio(rate)} GB/s, about {float(rate):.2f}"
    assert ("cuda:1", "cuda:2") not in used
    yield "the link from 1 to 2 idles"
    rings = cr.plan(BOX, "all_reduce", nbytes=256 << 20, algorithm="ring")
    assert len(tree_groups(rings.schedule, BOX)) == 2  # the page: "two panels"
    yield f"the {len(rings.schedule.chunks)} chunks of the rings of a complete DGX-1V"
    yield f"more than {HOSTS_FROM} devices in all"
    yield f"one host with more than {DEVICES_FROM} devices"


def limits():
    """Yield the page's statements about the bound."""
    best = cr.bound(PART, "all_reduce").algbw
    into = [link.bandwidth for link in PART.links if link.dst == "cuda:6"]
    assert into == [25, 25]
    assert sum(into) == best
    yield f"Look at 6. It has two links, of {into[0]} GB/s each"
    yield f"as {best} GB/s allow"
    yield "6 on one side"
    part, both = Fraction(N - 1, N), Fraction(2 * (N - 1), N)
    twice = cr.bound(PART, "all_gather").algbw / 2
    assert best / both == twice
    yield f"{ratio(part)} of the buffer into each device twice, into 6 too"
    yield f"{best} / ({ratio(both)}) = {decimal(twice)} GB/s"
    there, _ = (order for order in permutations(PART.devices[1:]) if ring(order))  # one ring, found in both directions
    stops = "-".join(device[-1] for device in (PART.devices[0], *there))
    yield f"one ring, {stops}. Its slowest links have {ring(there)} GB/s in each direction"
    assert cr.plan(PART, "all_reduce", 1 << 20, "ring").rate == 2 * ring(there) / both == twice
    yield f"sends {ratio(both)} of the ring's data"
    yield f"together have {2 * ring(there)} GB/s, so this is {2 * ring(there)} / ({ratio(both)}) GB/s again"


def ring(order):
    """Return the least bandwidth on the ring of PART's first device and ``order``; None if a link is missing."""
    stops = (PART.devices[0], *order, PART.devices[0])
    found = [PART.link(a, b) for a, b in pairwise(stops)]
    return min(link.bandwidth for link in found) if all(found) else None


def trees():
    """Yield the page's statements about the plan, its pieces and small buffers."""
    plan = cr.plan(PART, "all_reduce", nbytes=256 << 20)
    packed = forest(Request("all_reduce", PART.devices, PART.devices, topology=PART))
    assert (packed.trees, [chunk.share for chunk in plan.schedule.chunks]) == (2, [Fraction(1, 2)] * 2)
    assert len([line for line in plan.explain().splitlines() if " 1/2 cuda:0(" in line]) == 2
    yield f"both rooted at 0, each with half of the buffer, so each runs at {plan.rate / 2} GB/s"
    simulation = cr.simulate(plan.schedule, PART, 5 << 20)
    assert {simulation.bytes[link[:2]] / link.bandwidth for link in PART.links} == {
        (5 << 20) / plan.rate
    }  # all links are busy for the same time
    yield "a link of 25 GB/s is in one tree, a link of 50 GB/s in both"
    yield "6 gets half of the sum"
    whole, sends = sum(link.bandwidth for link in PART.links), 2 * (N - 1)
    yield f"takes at least {N - 1} sends of each byte, and another {N - 1} to give"
    yield f"{sends} buffers over links of {whole} GB/s in all, {whole} / {sends} = {whole / sends} GB/s"
    latency = max(link.latency_s for link in PART.links) * 10**6
    rounds, pieces = len(plan.schedule.rounds), plan.schedule.pieces
    ticks = rounds + pieces - 1
    alone = float((256 << 20) / plan.rate / 1000)
    yield f"bytes of 256 MiB alone take {alone:.2f} us at {plan.rate} GB/s"
    yield f"In {rounds} rounds and {pieces} pieces there are {ticks} ticks of {float(latency)} us"
    yield f"of latency, {float(ticks * latency):.2f} us"
    assert plan.seconds * 1e6 > alone + float(ticks * latency)  # the page calls the difference "the rest"
    small = cr.plan(PART, nbytes=1 << 10)
    assert (small.algorithm, small.schedule.round_count) == ("one_shot", 1)
    yield f"For 2**{10} bytes only latency and operations matter"
    operations = cr.simulate(small.schedule, PART, 1 << 10).operations
    host = operations * OPERATION_S
    assert host > 5e-6
    yield f"1.4 us, and the host queues {operations} operations of {host * 1e6 / operations:.0f} us"
    assert small.seconds == pytest.approx(host + 2 * float(latency) * 1e-6)
    yield f"The {OPERATION_S * 1e6:.0f} us of an operation"
    yield f"each in {OPERATION_S * 1e6:.0f} us (`operation_s`)"
    yield f"if that takes at most {100 * (LONGER - 1):.1f} % longer"
    assert max(len(PART.route(a, b)) for a, b in permutations(PART.devices, 2)) == 3  # the page: "two hops at most"


# For each row of the page's table of groups: the machine, its hosts, and the sizes of the mesh.
MESHES = (
    ("dgx-1v", 1, (2, 4)), ("dgx-1v", 1, (4, 2)), ("mi250", 1, (2, 8)), ("mi300x", 1, (2, 4)),
    ("hgx-h100", 2, (2, 8)), ("hgx-h100", 4, (4, 8)),
)  # fmt: skip


def groups_table():
    """Return the page's table of the rates of groups."""
    lines = ["| machine | mesh | together | separately | without helpers |", "|---|---|---|---|---|"]
    for name, hosts, shape in MESHES:
        topology = cr.Topology.machine(name, hosts)
        job = cr.plan_groups(topology, cr.mesh_groups(topology.devices, shape))
        assert job.ratio == 1
        without = job.separate_without_helpers
        rates = [job.rates, job.separate.rates, None if without is None else without.rates]
        cells = ["-" if found is None else f"{float(min(found)):.4g} to {float(max(found)):.4g}" for found in rates]
        machine = f"{name}, {hosts} hosts" if hosts > 1 else name
        lines.append("| " + " | ".join([machine, " x ".join(map(str, shape)), *cells]) + " |")
    return "\n".join(lines)


def groups():
    """Yield the page's statements about several groups."""
    yield groups_table()
    job = cr.plan_groups(BOX, cr.mesh_groups(BOX.devices, (2, 4)))
    yield f"no plans give all groups more than {ratio(min(job.rates))} GB/s"
    one, two = cr.plan_groups("hgx-h100", [range(4), range(4, 8)], [1, 2]).rates
    assert one * 2 == two
    yield "a group of weight 2 has twice the rate"
    exact = [max(n for n in range(30) if few_enough(n, devices, MANY)) for devices in (16, 72)]
    yield f"up to {exact[0]} devices on a machine of 16, and up to {exact[1]} on one of 72"


def large():
    """Return the statements about large machines, from the stored results of benchmarks/scale.py."""
    devices = [
        row["devices"]
        for row in json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())["machines"].values()
    ]
    return [f"wherever it has more than {FEW_DEVICES} devices", f"tori of up to {max(devices):,} devices"]


def lost():
    """Yield the page's statements about the failed link."""
    yield "the link 0-1 fails"
    left = PART.without_link("cuda:0", "cuda:1")
    limit = cr.bound(left, "all_reduce")
    yield f"No single cut proves {ratio(limit.algbw)}"
    widths = [
        sum(link.bandwidth for link in left.links if (link.src in some) > (link.dst in some))
        for size in range(1, N)
        for some in combinations(left.devices, size)
    ]
    yield f"each leaves {min(widths)} GB/s or more"
    assert min(widths) > limit.algbw
    islands = [{"cuda:0", "cuda:4"}, {"cuda:1", "cuda:2"}, {"cuda:6"}]
    yield "into 0 and 4, 1 and 2,\nand 6"
    assert {frozenset(set(left.devices) - island) for island in islands} == {cut.nodes for cut in limit.cuts}
    between = [link for link in left.links if not any({link.src, link.dst} <= island for island in islands)]
    names = [f"{link.src[-1]}-{link.dst[-1]}" for link in between if link.src < link.dst]
    (width,) = {link.bandwidth for link in between}
    yield f"only {', '.join(names[:-1])} and {names[-1]}, of {width} GB/s each way, {width * len(between)} GB/s in all"
    sends = 2 * (len(islands) - 1)
    yield f"Three islands must send {sends // 2} buffers to sum and {sends // 2} to give"
    assert width * len(between) / sends == limit.algbw
    yield f"{sends} over {width * len(between)} GB/s: {decimal(limit.algbw)} GB/s"
    yield f"stay at {decimal(cr.bound(left, 'all_gather').algbw / 2)} GB/s here"
    (weight,) = {cut.weight for cut in limit.cuts}
    inside = {device: sum(cut.weight for cut in limit.cuts if device in cut.nodes) for device in left.devices}
    assert min(inside.values()) == 1
    yield "inside cuts of weight 1 in all"
    yield "pays at least 1."
    yield "in cuts of weight 1 or more"
    assert len(between) == 6
    yield f"six directed links of {width} GB/s charge {ratio(weight)}"
    yield f"6 x {width} / {1 / weight} = {decimal(limit.algbw)}"


def others():
    """Yield the page's statements about switches, hosts and limits."""
    h100 = cr.Topology.machine("hgx-h100")
    (width,), n = {link.bandwidth for link in h100.links}, len(h100.devices)
    rate = cr.bound(h100, "all_reduce").algbw
    both = f"{2 * (n - 1)} / {n}"
    assert rate == width / Fraction(2 * (n - 1), n)
    yield f"Eight devices have {width} GB/s each way"
    yield f"{both} of the buffer enter each device, {width} / ({both}) = {ratio(rate)} GB/s"
    four = cr.Topology.machine("dgx-a100", hosts=4)
    into = [link for link in four.links if link.dst.startswith("host0/") and "/" not in link.src]
    width = sum(link.bandwidth for link in into)
    rate = cr.bound(four, "all_gather").algbw
    yield f"enter the fourth, host0, over its {len(into)} cards of {into[0].bandwidth} GB/s"
    yield f"24 / {len(four.devices)} of the buffer over {width} GB/s: {ratio(rate)} GB/s"
    assert rate == width / Fraction(24, len(four.devices))
    yield f"more than {fitting.MOST_TREES} trees per root"
    yield f"within {int(fitting.TOLERANCE * 100)} % of the bound. Beyond {schedules.FOREST_DEVICES} devices"
    yield f'Beyond {schedules._MOST_LISTED} devices `"auto"` estimates its time'
    yield f"all-reduces on topologies of up to {helped._MOST_JOINTS} devices have such trees"


def again():
    """Yield the page's statements about plans that are made again, from the stored results."""
    yield f"exceeds the least time, which the bound allows, by at most {plans.LOSS:.0%} more".replace("%", " %")
    rows = REPLANNED["planning"]
    (best,) = [row for row in rows if (row["machine"], row["hosts"], row["change"]) == ("hgx-h100", 4, "lost link")]
    slower = 100 * (best["again_predicted_s"] / best["cold_predicted_s"] - 1)
    yield f"{len(cr.Topology.machine('hgx-h100', 4).devices)} GPUs of four hosts"
    yield f"takes {best['again_cpu_s']:.2f} s of CPU time instead of {best['cold_cpu_s']:.1f} s"
    yield f"a plan that is {slower:.1f} % slower"
    kept = [row for row in rows if row["what"].startswith("kept")]
    yield f"Where the schedule is kept, it takes {max(row['again_cpu_s'] for row in kept) * 1e3:.0f} ms or less"
    every = [row["again_cpu_s"] / row["cold_cpu_s"] for row in rows if row["what"].startswith("planned again, ")]
    yield f"it takes up to {100 * (max(every) - 1):.0f} % longer than `cr.plan`"


def parts_table():
    """Return the page's table of parts (subsets of a machine's devices) and failed links, from the stored results."""
    lines = [
        "| machine | parts | at the bound | joint | TensorFlow | rings (none) | one device "
        "| links | connected | at the bound | joint | TensorFlow |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in KEPT["subsets"].items():
        broken = KEPT["failures"][name]
        cells = [name, f"{found['connected']} of {found['cases']}", found["at_bound"]]
        cells += [found["joint_beats_scatter_and_gather"], median(found, "tensorflow")]
        cells += [f"{median(found, 'rings')} ({found['without_ring']})", median(found, "one_device"), broken["cases"]]
        cells += [broken["connected"], broken["at_bound"], broken["joint_beats_scatter_and_gather"]]
        lines.append("| " + " | ".join(map(str, [*cells, median(broken, "tensorflow")])) + " |")
    return "\n".join(lines)


def median(found, what):
    """Return a median ratio in percent as text."""
    middle = found[what]["median"]
    return "-" if middle is None else f"{float(Fraction(middle) * 100):.0f}"


def machines_table():
    """Return the page's table of the machines of the library, from their files."""
    lines = ["| name | machine | aliases | networks |", "|---|---|---|---|"]
    for path in sorted(DATA.glob("*.json")):
        content = json.loads(path.read_text())
        if path.name != "links.json":
            names = (", ".join(f"`{name}`" for name in content.get(what, {})) for what in ("aliases", "networks"))
            cells = [f"`{content['name']}`", content["description"], *(cell or "-" for cell in names)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def times_table():
    """Return the page's table of times, from the stored results."""
    lines = ["| what | time | of which CPU |", "|---|---|---|"]
    for what, pattern in TIMES.items():
        found = [line for line in KEPT["times"] if re.fullmatch(pattern, line["what"])]
        slowest = max(found, key=lambda line: line["cpu_s"])
        lines.append(f"| {what} | {seconds(slowest['wall_s'])} | {seconds(slowest['cpu_s'])} |")
    return "\n".join(lines)


def seconds(value):
    """Return a time as text."""
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    raise AssertionError(value)


def traces():
    """Return the statements about forests of few steps and Chakra; test_chakra.py compares its times."""
    return [
        f"a GiB per second, so multiply the GB/s of a topology by {1e9 / 2**30:.4f}",
        f"at least {writer.PACKETS} per chunk",
        f"Traces have at most {writer.MOST_NODES} nodes",
        f"forests of few steps on up to {MOST_DEVICES} devices",
        f"differs by at most {WITHIN:.0%} from the prediction".replace("%", " %"),
    ]


def statements():
    """Return every statement of the page that has numbers, with numbers that the library computes."""
    return [
        *wiring(),
        *tensorflow(),
        *limits(),
        *trees(),
        *lost(),
        *again(),
        *others(),
        *groups(),
        *large(),
        *traces(),
        parts_table(),
        times_table(),
        machines_table(),
    ]


def test_page_numbers_are_computed_again():
    """Every number of the page's text is in a statement that is computed here."""
    flat, computed = " ".join(PAGE.split()), list(statements())
    for statement in computed:
        assert " ".join(statement.split()) in flat, statement
    text = " ".join(CODE.sub("", PAGE).split())
    for statement in sorted(computed, key=len, reverse=True):
        text = text.replace(" ".join(statement.split()), "")
    text = re.sub(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)|DGX-1V?|V100", "", text)
    assert re.findall(r".{20}\d.{20}", text) == []


def exact(value):
    """Return a result without its times, and without the shape of the trees, since several shapes are equally good."""
    if isinstance(value, dict):
        ignored = ("time", "slowest_plan", "k", "trees", "depth")
        return {what: exact(entry) for what, entry in value.items() if what not in ignored}
    return [exact(v) for v in value] if isinstance(value, list) else value


def test_stored_results_are_current(tmp_path):
    """A quick run of benchmarks/planning.py agrees with its reference values and with the stored full run."""
    path = tmp_path / "planning.json"
    script = ROOT / "benchmarks" / "planning.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", "--json", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    quick = json.loads(path.read_text())
    for found in (quick, KEPT):
        assert [line for line in found["reference"] if line["equal"] is not True] == []
    assert (quick["quick"], KEPT["quick"]) == (True, False)
    for table in ("reference", "machines", "meshes", "hosts"):
        for line in quick[table]:
            assert exact(line) in exact(KEPT[table]), line
    assert exact(quick["failures"]["dgx-1v"]) == exact(KEPT["failures"]["dgx-1v"])
    assert quick["subsets"]["dgx-1v"]["cases"] == 9
    for line in quick["subsets"]["dgx-1v"]["lines"]:
        assert exact(line) in exact(KEPT["subsets"]["dgx-1v"]["lines"])


def test_stored_results_are_complete():
    """The stored results have all machines, all 247 subsets of each machine of eight, and no plan above its bound."""
    machines = {name: cr.Topology.machine(name) for name, _ in cr.topology.machines.machine_names()}
    eights = {name for name, topology in machines.items() if len(topology.devices) == 8}
    assert {line["name"] for line in KEPT["machines"]} == machines.keys()
    assert KEPT["subsets"].keys() == eights
    assert {found["cases"] for found in KEPT["subsets"].values()} == {247}
    assert KEPT["failures"].keys() == machines.keys()
    lines = [line for table in ("machines", "meshes", "hosts") for line in KEPT[table]]
    lines += [line for kind in ("subsets", "failures") for found in KEPT[kind].values() for line in found["lines"]]
    for line in lines:
        bound = Fraction(line["bound"])
        for what in ("rate", "tensorflow", "tensorflow_in_stages", "rings", "one_device"):
            assert Fraction(line.get(what) or 0) <= bound, line
    for line in KEPT["auto"]:
        least = min(ratio for ratio in line["relative"].values() if ratio is not None)
        assert least >= 1
        assert least == 1 or line["algorithm"] == "hierarchical_copy"  # "auto" also tries this with one tree per device
        assert line["over_bound"] >= 1


@pytest.mark.parametrize(("form", "page"), [("msccl", "msccl-files.md"), ("mscclpp", "mscclpp-files.md")])
def test_rates_of_files(form, page):
    """The tables of the exported files' rates are the stored results: rows of machines, columns of collectives."""
    (head, _, *rows) = (DOCS / page).read_text().partition("| machine, hosts |")[2].partition("\n\n")[0].split("\n")
    collectives = head.replace("|", " ").split()
    shown = {}
    for row in rows:
        name, *ratios = row.strip("| ").split(" | ")
        machine, hosts = name.split(", ")
        shown[machine if hosts == "1" else f"{machine} x {hosts}"] = ratios
    kept = {}
    for line in KEPT["files"]:
        if line["format"] == form:
            kept.setdefault(line["name"], {})[line["collective"]] = f"{100 * line['ratio']:.1f}"
    assert shown == {name: [ratios[kind] for kind in collectives] for name, ratios in kept.items()}
    assert len(shown) == 28
