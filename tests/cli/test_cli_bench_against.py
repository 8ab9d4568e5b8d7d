"""``crossreduce bench --against``: its options, table, JSON and chart, from stored times and from a tiny run."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from crossreduce import kernels
from crossreduce.cli.bench import against, chart, contest, exact, ranks
from crossreduce.cli.bench.request import BenchRequest
from crossreduce.export.pictures import style


def request_for(peers, **changed):
    request = BenchRequest(
        framework="numpy", collective="all_reduce", algorithms=("auto",), num_packs=1, devices=("cpu:0", "cpu:1"),
        minimum_bytes=1024, maximum_bytes=1 << 20, step_bytes=1, step_factor=1024, warmup_iters=1, iterations=3,
        validation=1, per_iter_timing=False, op="sum", redop="sum", dtype="float32", nccl_type="float", roots=(-1,),
        backends=tuple(peer for peer in peers if peer in ranks.PEERS),
    )  # fmt: skip
    return replace(request, **changed)


def contenders_of(ours, **ways):
    """Return the contenders that ``contest`` writes for one size: crossreduce, with the times ``ours``, and ways of a
    peer, each given as (its times divided by ours, whether devices share one result, wrong elements)."""
    contenders = {"crossreduce": {"times_s": ours, "one_result": False, "nwrong": 0}}
    for name, (factor, one_result, wrong) in ways.items():
        contenders[name] = {"times_s": [factor * t for t in ours], "one_result": one_result, "nwrong": wrong}
    return contenders


def fake(peer, memory, wrong=0):
    """Return the rows of ``contest`` for a peer, with round numbers."""
    small, large = {
        "jax": ({"psum": (8, False, 0)}, {"psum": (2 if memory == against.KEPT else 6, False, 0)}),
        "torch": (
            {"slow": (3, True, 0), "quick": (0.25, True, 0)},
            {"slow": (1.5, True, 0), "quick": (4, True, wrong)},
        ),
        "tensorflow": ({}, {}),
        "gloo": ({"gloo": (5, False, 0)}, {"gloo": (40, False, 0)}),
    }[peer]
    times = [2e-3, 4e-3, 3e-3] if peer == "gloo" else [1e-5, 3e-5, 2e-5]
    return [
        {"size": 1024, "contenders": contenders_of(times, **small)},
        {"size": 1 << 20, "contenders": contenders_of([1000 * t for t in times], **large)},
    ]


def fake_report(wrong=0):
    peers = ["gloo", "jax", "tensorflow", "torch"]
    turns = [(peer, memory) for memory in (against.DEFAULT, against.KEPT) for peer in peers]
    measured = [(*turn, fake(*turn, wrong)) for turn in turns if turn != ("gloo", against.KEPT)]
    return against.report_of(request_for(peers), measured, "now")


def test_the_table_has_the_fastest_way_of_each_peer(capsys, monkeypatch):
    """Each peer has a column with the ratio of its fastest way, and each size a second row for kept memory. Peers with
    ranks have a column of their own for crossreduce. Notes name ways that are faster, share a result or are missing."""
    monkeypatch.setenv("COLUMNS", "80")
    against.show(fake_report())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = [re.split(r"  +", line.strip()) for line in lines]
    assert ["size", "1 process", "jax", "tensorflow", "torch", "2 ranks", "gloo"] in cells
    assert ["1 KiB", "20.00 us", "8.0x", "-", "0.25x*", "3.00 ms", "5.0x"] in cells
    assert ["kept", "20.00 us", "8.0x", "-", "0.25x*"] in cells
    assert ["1 MiB", "20.00 ms", "6.0x", "-", "1.5x*", "3.00 s", "40x"] in cells
    assert ["kept", "20.00 ms", "2.0x", "-", "1.5x*"] in cells
    text = " ".join(" ".join(lines).split())
    assert "* All devices share one result" in text
    assert "- This library has no all-reduce for sum of float32." in text
    assert "Fastest ways: jax: psum; torch: quick, slow" in text
    assert "Faster than crossreduce: torch (1 KiB: 0.25x), torch (1 KiB, kept: 0.25x) Wrong elements: 0" in text


def test_one_process_computes_exact_sums(monkeypatch):
    """With ``exact`` the sums of crossreduce are exact. The inputs cancel, so that the sums of a loop are wrong."""
    monkeypatch.setattr(exact, "inputs", lambda *_: [np.full(64, x, "float32") for x in (1e30, 1, -1e30)])
    monkeypatch.setattr(exact, "result", lambda *_: np.ones(64, "float32"))
    request = request_for([], devices=("cpu:0", "cpu:1", "cpu:2"), maximum_bytes=1024, iterations=1)
    for is_exact, wrong in ((True, 0), (False, 3 * 256)):
        (row,) = contest.in_process(replace(request, exact=is_exact), "numpy")
        assert [way["nwrong"] for way in row["contenders"].values()] == [wrong, 3 * 256]


def test_the_ratio_is_the_median_of_the_rounds():
    """A ratio is the median of the ratios in each round, and not the ratio of the median times; their quartiles are
    kept. The report has the sum of the wrong elements of all ways."""
    rows = [{"size": 4, "contenders": contenders_of([1.0, 2.0, 8.0], way=(1, False, 0))}]
    rows[0]["contenders"]["way"]["times_s"] = [3.0, 4.0, 40.0]
    (row,) = against.report_of(request_for(["jax"]), [("jax", "default", rows)], "now")["rows"]
    assert row["peers"]["jax"]["ways"]["way"]["ratio"] == 3.0
    assert row["peers"]["jax"]["ways"]["way"]["quartiles"] == [2.5, 4.0]
    assert row["ours"] == {"one_process": {"median_s": 2.0, "min_s": 1.0, "max_s": 8.0}}
    assert (fake_report(wrong=3)["wrong"], fake_report()["wrong"]) == (6, 0)


def test_the_chart_shows_every_peer_and_size(tmp_path):
    """The chart has a line per peer and setting of the memory, in the peer's colour, a label per size, and the level of
    crossreduce. A report on one size is drawn, too."""
    report = fake_report()
    labels = {"JAX", "torch", "gloo, 2 ranks", "keep_memory()", "crossreduce = 1", "1 KiB", "1 MiB", "0.5x"}
    labels.add("torch: all devices share one result, so fewer bytes are written.")
    path = tmp_path / "chart.svg"
    chart.draw_ratios(report, path)
    texts = {text.text for text in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert labels <= texts
    assert not any("TensorFlow" in text for text in texts)
    torch = style.look("torch").colour
    assert len(re.findall(rf"stroke: {torch}; stroke-width: 1.4", path.read_text())) >= 2  # both settings
    more = report | {"config": report["config"] | {"devices": 8}}
    chart.draw_ratios(report, path, more)
    texts = {text.text for text in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert {*labels, "gloo, 8 ranks", "8 ranks share 2 cores, which is rarely useful."} <= texts
    chart.draw_ratios(report | {"rows": report["rows"][:1]}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def measured(monkeypatch):
    """Replace the processes by stored times, and return the list of measured cases."""
    turns = []

    def contested(request, peer, memory):
        sizes = request.minimum_bytes, request.maximum_bytes, request.step_factor
        turns.append((peer, memory, *sizes, request.backends))
        return fake(peer, memory)

    monkeypatch.setattr(against, "contest", contested)
    for name in ranks.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return turns


@pytest.mark.parametrize("options", [["--exact"], []])
def test_one_command_writes_the_table_the_json_and_the_chart(printed, measured, tmp_path, options):
    """By default, --against measures 1 KiB to 64 MiB. --keep-memory measures frameworks twice, and ranks once. With
    --exact the table, the JSON and the chart say that the sums of crossreduce are exact."""
    paths = ["-J", tmp_path / "a.json", "--picture", tmp_path / "a.svg"]
    out = printed("bench", "--against", "jax,gloo,jax", "--keep-memory", *paths, *options)
    grid = (1 << 10, 1 << 26, 4, ("gloo",))
    assert measured == [("jax", "default", *grid), ("gloo", "default", *grid), ("jax", "kept", *grid)]
    report, picture = json.loads((tmp_path / "a.json").read_text()), (tmp_path / "a.svg").read_text()
    for size in (1024, 1 << 20):
        rows = {row["memory"]: list(row["peers"]) for row in report["rows"] if row["size"] == size}
        assert rows == {"default": ["jax", "gloo"], "kept": ["jax"]}
    assert "Faster than crossreduce: none" in out
    assert out.endswith(f"{tmp_path / 'a.svg'}: open it in a browser\n")
    assert "crossreduce = 1" in picture
    assert report["crossreduce"]["exact"] == bool(options)
    assert ("The times of crossreduce with exact sums, and" in " ".join(out.split())) == bool(options)
    assert ("crossreduce's time with exact sums" in picture) == bool(options)


REJECTED = """
--against jax,nccl: one of jax, tensorflow, torch, numpy, gloo, mpi, impi, not "nccl"
--against jax --launch 2: --launch cannot be used with --against
--against jax --peers gloo --topology dgx-1v: --peers, --topology cannot be used with --against
--against jax --collective reduce -A ring,direct: --collective, --algorithm cannot be used with --against
--against jax --picture a.pdf: --picture must be a .svg or .png file, not a.pdf.
--against numpy -g cuda:0-1: --against measures arrays in host memory: list cpu devices only
--against numpy -o avg -d int: --against does not support means of integers
--against mpi -d half: MPI does not support float16.
--picture a.svg --keep-memory: --picture, --keep-memory can only be used with peers: add --against jax,tensorflow,torch,
"""


def test_wrong_arguments_are_rejected_before_anything_runs(crossreduce, measured, monkeypatch):
    """Options that exclude each other, and ops and devices that a peer does not support, are errors."""
    monkeypatch.setattr(ranks, "launcher", lambda _: ("mpiexec", {}))
    monkeypatch.setattr(ranks, "find_spec", lambda name: True)
    for line, words in (each.split(": ", 1) for each in REJECTED.strip().splitlines()):
        code, out, error = crossreduce("bench", *line.split())
        assert (code, out, measured) == (2, "", []), line
        assert words in error


def test_what_is_missing_is_named_before_anything_runs(crossreduce, measured, monkeypatch):
    """If a framework is not installed, or the C library is not glibc, the error names it and a remedy."""
    monkeypatch.setattr(against, "find_spec", lambda name: None if name == "jax" else True)
    code, out, error = crossreduce("bench", "--against", "numpy,jax")
    assert (code, out, measured) == (2, "", [])
    assert "--against cannot measure jax: it is not installed." in error
    assert "pip install jax, or omit jax" in error
    monkeypatch.setattr(kernels, "glibc", lambda: None)
    assert "--keep-memory is not possible" in crossreduce("bench", "--against", "numpy", "--keep-memory")[2]


def test_a_tiny_run(printed, tmp_path):
    """A framework is measured in one process, and gloo in a rank per device. The report has their ratios."""
    path, line = tmp_path / "a.json", "-b 8 -e 4K -f 512 -n 2 -w 1 -g 2 -d half -J"
    out = printed("bench", "--against", "numpy,gloo", *line.split(), path)
    report = json.loads(path.read_text())
    assert report["wrong"] == 0
    assert [row["size"] for row in report["rows"]] == [8, 4096]
    for row in report["rows"]:
        ratios = {(peer, way): each["ratio"] for peer, of in row["peers"].items() for way, each in of["ways"].items()}
        assert set(ratios) == {("numpy", "loop and copies"), ("gloo", "gloo")}
        assert min(ratios.values()) > 0
    assert "2 ranks" in out


def test_a_process_that_fails_is_an_error(crossreduce, monkeypatch):
    """If a process of the measurement fails, its output is shown and the command ends with an error."""
    monkeypatch.setattr(against, "__package__", "no_such_package")
    code, out, error = crossreduce("bench", "--against", "numpy", "-b", 8, "-e", 8)
    assert (code, out) == (2, "")
    assert "no_such_package" in error
    assert "crossreduce: the measurement of numpy ended with exit code 1." in error


def test_every_framework_has_ways_whose_results_are_right(framework):
    """The own ways of each framework give the right results, for every op that the framework has, and two dtypes."""
    supported = dict.fromkeys(["float16", "int32"], 0)  # by dtype: the number of ops that the framework has
    for dtype, op in itertools.product(supported, ["sum", "product", "min", "max", "mean"]):
        if (dtype, op) != ("int32", "mean"):
            request = request_for([], op=op, dtype=dtype, maximum_bytes=1024, iterations=1, warmup_iters=1)
            (row,) = contest.in_process(request, framework.name)
            assert {way["nwrong"] for way in row["contenders"].values()} == {0}
            supported[dtype] += len(row["contenders"]) > 1
    count = {"numpy": 5, "torch": 5, "jax": 4, "tensorflow": 2}[framework.name]
    assert supported == {"float16": count, "int32": count - 1}  # without the mean of int32
