"""The plan explorer's page has the numbers of the plan and requests nothing. A failure writes nothing."""

import hashlib
import importlib
import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_line import plan_shown
from nccl_reports import report
from paths import ROOT
from reports import Page, explained

import crossreduce as cr
from crossreduce import Link, Topology
from crossreduce.errors import ArgumentError
from crossreduce.export.explorer import Beside, report_html, stages
from crossreduce.export.explorer import model as models
from crossreduce.export.explorer import page as pages
from crossreduce.export.explorer.link_groups import CableOrCard, link_groups
from crossreduce.export.explorer.losses import Loss, faster_plan
from crossreduce.export.explorer.positions import places
from crossreduce.export.explorer.trees import groups
from crossreduce.planning.explain import duration, percent
from crossreduce.planning.optimal.bounds.tight_cuts import limited_by
from crossreduce.schedule import timeline

PART = Topology.machine("dgx-1v").subset([0, 1, 2, 4, 6])
TWO_HOSTS = Topology.machine("hgx-h100", 2)
PLANS = {
    "ring": lambda: cr.plan("dgx-1v", nbytes="64M"),
    "forest": lambda: cr.plan(PART, nbytes="256M"),
    "two hosts": lambda: cr.plan(TWO_HOSTS, nbytes="16M"),
    "broadcast": lambda: cr.plan("dgx-1v", "broadcast", "1M", root=2),
    "in network": lambda: cr.plan(Topology.machine("hgx-h100", in_network=True), nbytes="4M"),
    "helpers": lambda: cr.plan("dgx-1v", nbytes="256M", algorithm="forest", participants=range(6)),
    "torus": lambda: cr.plan(Topology.torus(3, 4, gb_per_s=25, latency_s=1e-6), "all_gather", "1M"),
}


@pytest.fixture(scope="module", autouse=True)
def few_sizes():
    """Compare algorithms at two sizes only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "SIZES", (1 << 10, 1 << 20))
        yield


@pytest.fixture(scope="module", params=PLANS)
def made(request):
    """Return each plan in turn, with the text of its page."""
    plan = PLANS[request.param]()
    return plan, report_html(plan)


@pytest.fixture(scope="module")
def page(made):
    return Page(made[1])


def test_the_numbers_are_those_of_explain(made, page):
    """The page has the heading, the facts, the trees and the comparison of ``explain``, and its whole text."""
    plan, _ = made
    shown = page.model
    head, facts, trees, others = explained(plan.explain())
    assert page.texts["explanation"].strip().partition("The plan as text")[2] == plan.explain() == shown["text"]
    assert shown["head"] == head
    labels = ["plan", "predicted", "bound", "limited by", *(["helpers"] if plan.helpers else []), "busiest"]
    assert shown["facts"] == [[label, facts[label]] for label in labels]
    first, *rest = (row for row in shown["plans"] if "lost" not in row)
    assert f"{first['duration']}, {plan.algbw:.2f} GB/s; {first['rate']}" == facts["predicted"]
    assert first["ratio"].partition(" of")[0] == facts["bound"].partition(", ")[2].partition(" of it")[0]
    rows = {
        row["name"]: (row["duration"], row["times"].removesuffix(" x"), row["rate"].split()[0], row["ratio"].split()[0])
        for row in rest
    }
    same = {other for other in others if plan.comparisons[other].schedule == plan.schedule}  # these have no row
    assert rows == {other: row for other, row in others.items() if other not in same}
    assert len(others) >= 2
    listed = Counter()
    for group in first["groups"]:
        for route in group["routes"]:
            listed[route["title"]] += Fraction(route["share"])
    if any("→" in title for title in listed):
        assert plan.algorithm == "ring"
    elif plan.algorithm != "one_shot":
        assert trees
        for (
            share,
            text,
        ) in trees:  # ``explain`` shortens the titles of large trees by " ...", and folds trees of one shape
            tree, _, folded = text.partition(" and ")
            cut, start = tree.endswith(" ..."), tree.removesuffix(" ...")
            match = [title for title in listed if (title.startswith(start) if cut else title == tree)]
            if not tree.startswith("on each"):
                assert (sum(listed[title] for title in match) == Fraction(share)) or (folded and match), tree


def test_the_use_of_links_adds_up(made, page):
    """Each link has the bytes, the busy share and the number of transfers of the simulation. Its curve, the percentage
    of its bandwidth in each part of the time, adds up to its bytes."""
    plan, _ = made
    shown = page.model
    compared = [plan, *(other for other in plan.comparisons.values() if other.schedule != plan.schedule)]
    numbers = {(link.src, link.dst): str(k) for k, link in enumerate(plan.topology.links)}
    for row, one in zip((row for row in shown["plans"] if "lost" not in row), compared, strict=True):
        assert row["seconds"] == one.seconds
        moves = timeline(one.schedule, one.topology, one.nbytes, costs=one.request.costs)
        count = Counter(pair for move in moves for pair in move.links)
        assert set(row["links"]) == {numbers[pair] for pair in one.simulation.bytes}
        for pair, moved in one.simulation.bytes.items():
            curve, nbytes, busy, transfers = row["links"][numbers[pair]]
            assert (nbytes, transfers) == (moved, count[pair])
            assert busy == pytest.approx(one.simulation.busy[pair] / one.seconds * 100, abs=0.0051)
            levels = row["curves"][curve]
            assert len(levels) == shown["parts"]
            assert 0 <= min(levels) <= max(levels) <= 100
            speed = float(one.topology.link(*pair).bandwidth) * 1e9
            drawn = sum(levels) / 100 * speed * one.seconds / shown["parts"]
            assert drawn == pytest.approx(moved, rel=0.02, abs=0.011 * speed * one.seconds)
        done = row["done"]
        assert (done[0], done[-1], len(done)) == (0, 100, shown["parts"] + 1)
        assert done == sorted(done)


def test_trees_and_cuts(made, page):
    """The shares of a plan's routes add up to 1, and the routes use the links that the simulation uses. The page shows
    the cuts with the greatest weight in the bound's proof, and the links that cross each of them."""
    plan, _ = made
    row = page.model["plans"][0]
    routes = [route for group in row["groups"] for route in group["routes"]]
    assert sum(Fraction(route["share"]) for route in routes) == 1
    assert sum(Fraction(group["share"]) for group in row["groups"]) == 1
    used = {link for route in routes for link in (*route["partial"], *route["final"])}
    assert used == {int(link) for link, (_, nbytes, *_) in row["links"].items() if nbytes}
    heaviest = max(cut.weight for cut in plan.bound.cuts)
    due = [cut for cut in plan.bound.cuts if cut.weight == heaviest]
    names, devices = [node[0] for node in page.model["nodes"]], set(plan.bound.devices)
    assert page.model["cuts"]
    for one in page.model["cuts"]:
        here = {names[k] for k in one["nodes"]} & devices
        mine = [cut for cut in due if here in (devices & cut.nodes, devices - cut.nodes)]
        crossing = {
            k for k, link in enumerate(plan.topology.links) for cut in mine
            if (link.src in cut.nodes) != (link.dst in cut.nodes) and (link.src in cut.nodes) == cut.outward
        }  # fmt: skip
        assert mine
        assert set(one["links"]) == crossing


def test_identical_rings_are_one_entry(monkeypatch):
    """The 48 chunks of a ring plan on a DGX-1V are six rings of all 8 devices, with 8 chunks each. If they have too
    many links, only the first rings are listed. If the schedule has too many steps, no rings are listed."""
    plan = cr.plan("dgx-1v", nbytes="64M", algorithm="ring")
    (group,) = groups(plan)
    assert (group.title, group.number, group.share) == ("6 rings of 8 devices", 6, 1)
    for route in group.routes:
        assert (route.chunks, route.share, route.roots) == (8, Fraction(1, 6), ())
        assert sorted(route.title.split(" → ")) == [f"cuda:{k}" for k in range(8)]
        assert len(route.partial) == len(route.final) == 8
    assert len({route.title for route in group.routes}) == 6
    monkeypatch.setattr("crossreduce.export.explorer.trees._MOST_LINKS", 40)
    (group,) = groups(plan)
    assert (group.number, len(group.routes)) == (6, 2)
    monkeypatch.setattr("crossreduce.export.explorer.trees.MOST_STEPS", plan.schedule.steps - 1)
    assert groups(plan) == ()


def test_trees_of_one_shape_are_folded_as_in_explain():
    """Trees that ``explain`` prints in one line are routes of one entry, whose text is that line."""
    plan = cr.plan(cr.Topology.machine("hgx-h100"), nbytes="64M", algorithm="direct")
    (group,) = groups(plan)
    assert [route.fold for route in group.routes] == ["1/8 on each device, from all others"] * 8
    assert "1/8 on each device, from all others" in plan.explain()
    assert {
        route.fold for group in groups(cr.plan("dgx-1v", algorithm="hierarchical_copy")) for route in group.routes
    } == {""}


def test_the_page_is_valid_and_asks_for_nothing(made, page):
    """Ids are unique, and controls have names. No attribute or style has an address. The policy forbids every request,
    and allows only the eleven scripts in the page. (``Page`` checks that elements are closed.)"""
    _, text = made
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    names = {attribute for _, attributes in page.tags for attribute in attributes}
    assert not names & {"src", "href", "srcset", "data", "action", "style"}
    assert {tag for tag, _ in page.tags} & {"link", "iframe", "img", "object", "form", "base"} == set()
    styles = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in styles
    assert "@import" not in styles
    for tag, attributes in page.tags:
        if attributes.get("tabindex") or (tag == "input" and attributes["type"] == "range"):
            assert attributes.get("aria-label"), attributes
    assert page.policy["default-src"] == page.policy["base-uri"] == page.policy["form-action"] == ["'none'"]
    assert page.policy["script-src"] == page.hashes
    assert set(page.policy) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert len(page.hashes) == 11


NICS = Topology.machine("dgx-1v", 2).subset([0, 2, 8, 10])  # each GPU has a card of its own


@pytest.mark.parametrize("plan", [lambda: cr.plan("dgx-1v", nbytes="4M"), lambda: cr.plan(NICS, "all_gather", "1M")])
def test_each_loss_is_planned(plan):
    """The page has, for each cable and network card, the time and rate of the plan without it, the slowest first. Parts
    in one row are alike: the bounds without each of them are equal. Three rows have their plans on the page."""
    plan = plan()
    topology, shown = plan.topology, Page(report_html(plan)).model
    rows, entries = shown["losses"]["rows"], [*shown["losses"]["links"], *shown["losses"]["cards"].values()]
    pairs = [(link.src, link.dst) for link in topology.links]
    times = []
    for k, row in enumerate(rows):
        bounds = set()
        parts = {name: links for at, name, links, _ in filter(None, entries) if at == k}
        assert row["name"] in parts
        assert len(parts) == row["alike"]
        for name, links in parts.items():
            if " - " in name:
                a, b = name.split(" - ")
                rest = topology.without_link(a, b)
                assert {pairs[link] for link in links} == {(a, b), (b, a)}
            else:
                rest = topology.without_node(name)
                assert {pairs[link] for link in links} == {pair for pair in pairs if name in pair}
            if name in (row["name"], list(parts)[-1]):
                bounds.add(cr.bound(rest, plan.collective).algbw)
            if name == row["name"]:
                made = plan.replanned(rest)
                times.append(made.seconds)
                assert row["duration"] == duration(made.seconds)
                assert row["rate"] == f"{float(made.rate):.2f}"
                assert row["ratio"] == percent(made.rate / plan.bound.algbw)
        assert len(bounds) == 1
    assert times == sorted(times, reverse=True)
    assert times[0] > plan.seconds
    assert sum(row["alike"] for row in rows) == (16 if topology is not NICS else 2 * (1 + 2 + 4))
    assert [row["plan"] for row in rows].count(None) == len(rows) - 3
    for row in rows[:3]:
        entry = shown["plans"][row["plan"]]
        assert (entry["lost"], entry["duration"]) == (row["links"], row["duration"])
        assert not set(map(str, row["links"])) & set(entry["links"])


def test_a_faster_plan_without_a_part_is_taken():
    """If the plan without a cable is faster, the page has this plan for the complete topology, and says so."""
    topology = Topology.ring(4, gb_per_s=25)
    fast = cr.plan(topology, nbytes="64M")
    slow = replace(fast, schedule=cr.plan(topology, nbytes="64M", algorithm="one_device").schedule, seconds=1.0)
    lost = (Loss((CableOrCard("cpu:0 - cpu:1", (0, 1), ("cpu:0", "cpu:1")),), is_half=False, plan=fast),)
    found = faster_plan(slow, lost)
    assert (found.schedule, found.seconds, found.request) == (fast.schedule, fast.seconds, slow.request)
    assert "changed   the plan that was made without cpu:0 - cpu:1 is faster" in found.explain()
    assert faster_plan(slow, (lost[0]._replace(is_half=True),)) is slow
    assert faster_plan(fast, (lost[0]._replace(plan=slow),)) is fast


def test_a_part_that_the_plan_needs_keeps_half_of_its_bandwidth():
    """If a device has one cable, the page has the plan for half of its bandwidth, and says so."""
    star = Topology.star(4, gb_per_s=25)
    plan = cr.plan(star, nbytes="64M")
    (row,) = Page(report_html(plan)).model["losses"]["rows"]
    assert (row["name"], row["alike"], row["half"]) == ("cpu:0 - switch", 4, True)
    slower = [link._replace(bandwidth=link.bandwidth / 2) if "cpu:0" in link[:2] else link for link in star.links]
    made = plan.replanned(Topology(star.devices, slower, star.switches))
    assert (row["rate"], row["duration"]) == (f"{float(made.rate):.2f}", duration(made.seconds))
    assert made.seconds > plan.seconds


@pytest.mark.parametrize("host", ["host0", "host1"])
def test_the_host_that_lost_a_card_is_marked(host):
    """The tight cut on the page has the nodes of the host that lost a card, and the links of its other cards."""
    rest = Topology.machine("dgx-a100", hosts=2).without_link(f"{host}/cuda:3", "rail3")
    shown = Page(report_html(cr.plan(rest, "reduce", "1M", "ring", root="host0/cuda:0"))).model
    (cut,), nodes = shown["cuts"], [node[0] for node in shown["nodes"]]
    assert cut["name"] == f"8 devices of {host}"
    assert {nodes[k].partition("/")[0] for k in cut["nodes"]} == {host}
    assert len(cut["links"]) == 7
    for src, dst, *_ in (shown["links"][k] for k in cut["links"]):
        assert sorted(name[:4] for name in (nodes[src], nodes[dst])) == ["host", "rail"]
        assert host in (nodes[src][:5], nodes[dst][:5])
    assert re.fullmatch(rf"the 7 NICs (into|out of) {host} \(175 GB/s\)", shown["limited"])


def test_rows_of_links(page, made):
    """Each link is in one group of rows. Links between hosts come first, in a group for each rail."""
    rows = page.model["rows"]
    assert sorted(link for *_, links in rows for link in links) == list(range(len(made[0].topology.links)))
    if made[0].topology == TWO_HOSTS:
        assert [title for title, *_ in rows[:8]] == [f"rail{k}: NICs" for k in range(8)]
        assert [between for _, between, _ in rows] == [True] * 8 + [False] * 2
        assert [len(links) for *_, links in rows] == [4] * 8 + [16] * 2
        assert [title for title, *_ in rows[8:]] == [f"host{k}: NVLinks, device - nvswitch" for k in range(2)]


def test_rows_of_links_inside_a_host():
    """The links of a host are in groups by the kinds of their ends; those of several bandwidths in one group each."""
    box, pcie = (Topology.machine(name) for name in ("dgx-1v", "pcie-8"))
    assert [(title, len(links)) for title, _, links in link_groups(box, places(box))] == [
        ("device - device, 25 GB/s", 16),
        ("device - device, 50 GB/s", 16),
    ]
    rows = link_groups(pcie, places(pcie))
    assert [row.title for row in rows] == ["device - plx", "cpu - plx", "cpu - cpu"]
    for title, _, links in rows:
        for src, dst in (pcie.links[link][:2] for link in links):
            kinds = {"device" if node in pcie.devices else node[:3] for node in (src, dst)}
            assert kinds == set(title.split(" - "))


def test_hosts_and_switches_with_unusual_names():
    """A host may be named as the network between hosts, and the name of a switch may be a number, or very long."""
    links = [(f"{host}/cuda:{k}", f"{host}/7", 25) for host in ("network", "b") for k in range(2)]
    links += [("network/cuda:0", "s" * 300 + "-1", 5), ("b/cuda:0", "s" * 300 + "-1", 5)]
    both = [ends for src, dst, speed in links for ends in ((src, dst, speed), (dst, src, speed))]
    devices = [f"{host}/cuda:{k}" for host in ("network", "b") for k in range(2)]
    topology = Topology(devices, both, ["network/7", "b/7", "s" * 300 + "-1"])
    assert [box.name for box in places(topology).boxes] == ["network", "b", "the network"]
    titles = [title for title, *_ in link_groups(topology, places(topology))]
    assert titles == ["s" * 300 + "-1: NICs", "network: device - switch", "b: device - switch"]


def test_two_topologies_and_measured_times(printed, tmp_path, monkeypatch):
    """A page shows the plan of another machine beside the plan, with its own wiring, and measured times beside planned
    ones. Times of other collectives or devices are left out."""
    monkeypatch.chdir(tmp_path)
    devices = [{"rank": k, "pid": k, "hostname": "a", "device": k} for k in range(8)]
    times = {1 << 20: 200.0, 1 << 26: 900.0, 3 << 20: 300.0}
    results = [{"size": size, "root": "-1", "out_of_place": {"time": time}} for size, time in times.items()]
    faster = [{"size": 1 << 20, "root": "-1", "out_of_place": {"time": 5.0}}]
    report = {"args": ["all_reduce_perf"], "config": {"nthreads": 1, "ngpus": 1, "devices": devices}}
    Path("other.json").write_text(json.dumps(report | {"args": ["all_gather_perf"], "results": faster}))
    Path("results.json").write_text(json.dumps(report | {"results": results}))
    given = ["--measured", "results.json", "--measured", "other.json"]
    printed("export", "dgx-1v", "plan.html", "--beside", "mi300x", *given)
    page = Page(Path("plan.html").read_text())
    shown, plan, other = page.model, cr.plan("dgx-1v"), cr.plan("mi300x")
    entry = shown["plans"][1]
    assert (entry["name"], entry["duration"], entry["other"]) == ("mi300x", duration(other.seconds), True)
    assert [node[0] for node in shown["other"]["nodes"]] == list(other.topology.nodes)
    assert shown["other"]["limited"] == limited_by(other.bound)
    assert {int(link) for link in entry["links"]} <= set(range(len(other.topology.links)))
    for row, size in zip(shown["measured"], sorted(times), strict=True):
        planned = cr.plan("dgx-1v", nbytes=size).seconds
        rate = size / times[size] / 1e3
        assert row[0] == size
        assert row[2:] == [
            *(pytest.approx(times[size] / 1e6), duration(times[size] / 1e6), planned, duration(planned)),
            *(f"{times[size] / 1e6 / planned:.2f}", f"{rate:.2f}", f"{rate * 1.75:.2f}"),
        ]
    printed("export", "dgx-1v", "plan.html", "--beside", "one-device")
    second = Page(Path("plan.html").read_text()).model
    assert (second["other"], second["plans"][1]["algorithm"]) == (None, "one_device")
    assert [row["algorithm"] for row in second["plans"]].count("one_device") == 1
    plan.report("python.html", beside=other)
    assert Page(Path("python.html").read_text()).model["other"] == shown["other"]
    with pytest.raises(ArgumentError, match=r"beside a plan, a report shows a Plan.\n  given: 'ring'"):
        plan.report("python.html", beside="ring")


def test_a_rack_of_72_gpus_fits():
    """The page of a GB200 NVL72 has less than 0.9 MB, with all trees, parts of the time, and the loss of a cable."""
    plan = cr.plan("gb200-nvl72", nbytes="64M")
    text = report_html(plan)
    shown = Page(text).model
    assert len(text.encode()) < 0.9 * pages.MOST_BYTES
    assert (shown["parts"], bool(shown["plans"][0]["groups"])) == (models.PARTS, True)
    assert [(row["alike"], row["half"]) for row in shown["losses"]["rows"]] == [(72, True)]
    assert sum(node[6] for node in shown["nodes"]) == 72


def test_no_data_moves():
    """A plan that moves nothing has a page with its explanation and nothing to play."""
    for plan in (cr.plan("dgx-1v", nbytes=0), cr.plan(Topology.full_mesh(1), nbytes=8)):
        page = Page(report_html(plan))
        assert page.texts["explanation"].endswith("no data has to move.")
        assert (page.model["plans"], page.model["sizes"], page.model["facts"]) == ([], None, [])
        assert page.model["losses"] is None


def test_the_stages_are_counted():
    """``stages`` returns the number of stages, and each stage has a name."""
    plan, told = PLANS["broadcast"](), []
    report_html(plan, told.append)
    assert len(told) == stages(plan)
    assert (told[0].partition(" ")[0], told[-1]) == ("without", "planning 1 MiB")


def test_detail_is_reduced_until_the_page_fits(monkeypatch):
    """A page that is too large gets fewer parts of the time, then no plans without links, then no trees. If this is not
    enough, it is an error."""
    plan = cr.plan(PART, nbytes="1M")
    limit = len(report_html(plan).encode())
    assert limit < 700_000
    details = []  # (parts of the time, plans without a part, whether there are trees), with ever lower limits
    for _ in range(5):
        monkeypatch.setattr(pages, "MOST_BYTES", limit)
        text = report_html(plan)
        shown = Page(text).model
        lost = sum("lost" in row for row in shown["plans"])
        details.append((shown["parts"], lost, bool(shown["plans"][0]["groups"])))
        assert len(text.encode()) <= limit
        limit = len(text.encode()) - 1
    assert details == [(240, 3, True), (120, 3, True), (60, 3, True), (60, 0, True), (60, 0, False)]
    monkeypatch.setattr(pages, "MOST_BYTES", 1000)
    with pytest.raises(ArgumentError, match=r"the report of this plan would have more than 1000 bytes"):
        report_html(plan)


def test_invalid_paths(tmp_path):
    """An invalid path raises an error, and nothing is written. Only plans have reports."""
    (tmp_path / "folder.html").mkdir()
    plan = cr.plan(PART, nbytes="1M")
    for path, error, match in (
        (tmp_path / "plan.pdf", ArgumentError, r"a report must be a \.html file\.\n  given: \"?.*plan\.pdf"),
        (7, ArgumentError, r"a report must be a \.html file\.\n  given: 7"),
        (tmp_path / "missing" / "plan.html", FileNotFoundError, "There is no such folder"),
        (tmp_path / "folder.html", IsADirectoryError, "This is a folder"),
    ):
        with pytest.raises(error, match=match):
            plan.report(path)
    with pytest.raises(ArgumentError, match="a report requires a Plan"):
        report_html("dgx-1v")
    assert [file.name for file in tmp_path.rglob("*")] == ["folder.html"]


def test_a_failure_keeps_the_old_file(tmp_path, monkeypatch):
    """If a page cannot be made or written, the old file stays, and no other is left. Equal plans have equal pages."""
    path = tmp_path / "plan.html"
    path.write_text("old")
    plan = cr.plan(PART, nbytes="1M")
    with monkeypatch.context() as patch:
        patch.setattr(pages, "MOST_BYTES", 1000)
        with pytest.raises(ArgumentError, match="more than 1000 bytes"):
            plan.report(path)
        patch.undo()
        patch.setattr("pathlib.Path.replace", Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            plan.report(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]
    plan.report(str(path))
    assert path.read_text("utf-8") == report_html(cr.plan(PART, nbytes="1M"))
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]


def test_the_command_writes_the_same_page(printed, crossreduce, tmp_path):
    """``crossreduce export FILE.html`` prints the explanation and writes the page, whose head has the machine, the
    command and the version. An invalid name is an error."""
    path = tmp_path / "plan.html"
    plan = cr.plan("dgx-1v", nbytes="4M")
    out = printed("export", "dgx-1v", path, "--nbytes", "4M")
    line = f"export dgx-1v {path} --nbytes 4M"
    assert out == f"{plan_shown(plan, line)}{path}: open it in a browser\n"
    page = Page(path.read_text("utf-8"))
    assert page.model == Page(report_html(plan)).model
    assert page.texts["about"] == f"dgx-1v · crossreduce {line} · crossreduce {cr.__version__}"
    report = json.loads(printed("export", "dgx-1v", path, "--nbytes", "4M", "--json"))
    assert report["algorithm"] == plan.algorithm
    for name, words in (
        ("plan.txt", "plan.txt must end in .xml, .json, .trace.json, .html, .svg, .png,"),
        ("missing/plan.html", "there is no folder"),
    ):
        code, out, error = crossreduce("export", "dgx-1v", tmp_path / name)
        assert (code, out, words in " ".join(error.split())) == (2, "", True)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]


def test_names_and_other_plans_that_cannot_be_shown(crossreduce, printed, tmp_path, monkeypatch):
    """Names of files that are no text, or control a terminal, are printed without these letters. A plan without data
    is not shown beside another one, and results of another collective are named as unused."""
    monkeypatch.chdir(tmp_path)
    ring = Topology.ring(3, gb_per_s=25)
    machine = Path("e\x1b[31mb.json")
    machine.write_text(ring.to_json())
    assert "\x1b" not in printed("plan", machine)
    page = Path(os.fsdecode(b"n\xff.html"))
    Path("r.json").write_bytes(report("all_gather_perf", [(1 << 20, 1e-3)], gpus=3))
    code, _, error = crossreduce("export", machine, page, "--measured", "r.json")
    assert (code, "--measured has no effect" in error) == (0, True)
    assert "\udcff" not in page.read_text("utf-8")
    plan = cr.plan(ring, nbytes="1M")
    beside = Page(report_html(plan, beside=Beside(cr.plan(ring, nbytes=0), "empty")))
    assert beside.model["plans"] == Page(report_html(plan)).model["plans"]


@pytest.mark.parametrize("hosts", [1, 2, 9, 32])
def test_positions(hosts):
    """No two nodes or boxes overlap, every node of a host is inside the host's box, and the picture of several hosts is
    at most about 2.2 times as wide as high."""
    topology = Topology.machine("hgx-h100", hosts)
    found = places(topology)
    assert [node.name for node in found.nodes] == list(topology.nodes)
    for a, b in combinations(found.nodes, 2):
        assert abs(a.x - b.x) + abs(a.y - b.y) > found.size * 0.9
    assert len(found.boxes) == (hosts + 1 if hosts > 1 else 0)
    for a, b in combinations(found.boxes, 2):
        assert abs(a.x - b.x) >= (a.width + b.width) / 2 or abs(a.y - b.y) >= (a.height + b.height) / 2
    for node in found.nodes if hosts > 1 else ():
        box = found.boxes[node.box]
        assert abs(node.x - box.x) < box.width / 2
        assert abs(node.y - box.y) < box.height / 2
        assert box.name == (node.name.partition("/")[0] if "/" in node.name else "the network")
    if found.boxes:
        across, down = [box.x for box in found.boxes], [box.y for box in found.boxes]
        assert max(across) - min(across) < 2.2 * (max(down) - min(down) + min(box.height for box in found.boxes))
    if hosts == 1:  # many devices around one switch are cells of a rack, above and below the switch
        for count in (72, 256):
            star = places(Topology.star(count, gb_per_s=450))
            assert (star.size, {node.is_cell for node in star.nodes}) == (64, {True, False})
            wide, high = (max(abs(node[axis]) for node in star.nodes) for axis in (2, 3))
            assert 0.6 < wide / high < 1.6
            assert min(math.dist(a[2:4], b[2:4]) for a, b in combinations(star.nodes, 2)) > star.size
        assert not any(node.is_cell for node in found.nodes)


def test_links_bend_around_nodes():
    """A link that would pass over another node is a curve, both directions the same one, and no node is on it."""
    hosts = [[f"host{h}/cuda:{k}" for k in range(6)] for h in range(2)]
    ends = [pair for gpus in hosts for pair in combinations(gpus, 2) if pair != (gpus[0], gpus[3])]
    ends += [(gpus[k], "net") for gpus in hosts for k in (0, 3)]
    links = [Link(*pair, 25) for a, b in ends for pair in ((a, b), (b, a))]
    found = places(Topology([gpu for gpus in hosts for gpu in gpus], links, ["net"]))
    at = {node.name: complex(node.x, node.y) for node in found.nodes}
    curves = 0
    for a, b in ends:
        bend = found.bends.get((a, b), 0)
        assert found.bends.get((b, a), 0) == -bend
        top = (at[a] + at[b]) / 2 - 1j * (at[b] - at[a]) / abs(at[b] - at[a]) * bend
        points = [(1 - t) ** 2 * at[a] + 2 * t * (1 - t) * top + t * t * at[b] for t in (k / 50 for k in range(51))]
        others = [place for node, place in at.items() if node not in (a, b)]
        assert min(abs(point - other) for point in points for other in others) > found.size / 2
        curves += bend != 0
    assert curves >= 2


def test_the_documentation(printed, tmp_path, monkeypatch, capsys):
    """The code and the command of docs/plan-explorer.md write the same page. Its numbers are those of the code."""
    text = (ROOT / "docs" / "plan-explorer.md").read_text()
    monkeypatch.chdir(tmp_path)
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown
    page = Path("plan.html").read_text()
    (command,) = re.findall(r"```\ncrossreduce (.*?)\n```", text)
    Path("plan.html").unlink()
    printed(*command.split())
    assert Page(Path("plan.html").read_text()).model == Page(page).model
    flat = " ".join(text.split())  # without line breaks
    assert [int(part) for part in re.findall(r"1/(\d+)", flat)] == list(dict.fromkeys(d.parts for d in pages._DETAILS))
    assert pages.MOST_BYTES == 1_000_000
    for library, version in re.findall(r"(Cytoscape.js|uPlot) (\d+\.\d+)", flat):
        name = {"Cytoscape.js": "cytoscape.min.js", "uPlot": "uPlot.iife.min.js"}[library]
        assert f"{version}." in pages._asset(name)
        assert f"{library} {version}." in (ROOT / "NOTICE").read_text()


def test_the_libraries_are_unchanged():
    """The shipped libraries are the files of the versions that NOTICE names, with their licenses."""
    due = {
        "cytoscape.min.js": "71fa9ebec21a7ca2c40cff6aacc30d1f6464e363662ad4b2c197e1adc770cd94",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assets = Path(models.__file__).parent / "assets"
    for name, digest in due.items():
        assert hashlib.sha256((assets / name).read_bytes()).hexdigest() == digest
        assert f"{name}" in (ROOT / "NOTICE").read_text()
    for name in ("cytoscape", "uPlot"):
        assert "Permission is hereby granted, free of charge" in (assets / f"{name}.LICENSE").read_text()


def test_the_gallery(tmp_path, monkeypatch):
    """The gallery of the documentation has ten plans with different names and titles. It writes a picture and a page of
    each plan, here of one of them."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    gallery = importlib.import_module("gallery")
    entries = gallery.GALLERY
    assert len({entry.name for entry in entries}) == len({entry.title for entry in entries}) == 10
    part = entries[1]
    monkeypatch.setattr(gallery, "GALLERY", (part,))
    gallery.write(tmp_path, tmp_path / "new" / "pages")
    text = (tmp_path / "gallery.md").read_text()
    assert f"## {part.title}" in text
    assert f'href="pages/{part.name}.html"' in text
    assert "<svg" in (tmp_path / f"{part.name}.svg").read_text()
    plan = PLANS["forest"]()
    assert f"{plan.algbw:.4g} GB/s. The bound is {float(plan.bound.algbw):.4g} GB/s" in text
    page = Page((tmp_path / "new" / "pages" / f"{part.name}.html").read_text("utf-8"))
    assert page.model == Page(report_html(plan)).model
    assert page.texts["about"].split(" · ")[1] in text
