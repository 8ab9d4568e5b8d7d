"""Speeds of links that are fitted to measured times of collectives, and reports with such times."""

import json
import random
from fractions import Fraction

import pytest
from budget import examples
from command_line import plan_shown, run_python
from hypothesis import given
from hypothesis import strategies as st
from nccl_reports import pair_seconds, report, star_seconds

import crossreduce as cr
from crossreduce.errors import ArgumentError
from crossreduce.planning.calibration import calibrate
from crossreduce.topology import Link, Topology
from crossreduce.topology.measurements import LARGEST, Measurement, read_measurements

SIZES = [1 << power for power in range(10, 31, 2)]
STAR = Topology.star(8, 450, 7e-7)
# Two hosts of two devices: a link of 150 GB/s within each, and one of 25 GB/s between devices of the same number.
NVLINK, NIC = (150, 7e-7), (25, 3e-6)
PAIRS = [("host0/cuda:0", "host0/cuda:1", *NVLINK), ("host1/cuda:0", "host1/cuda:1", *NVLINK)]
PAIRS += [(f"host0/cuda:{k}", f"host1/cuda:{k}", *NIC) for k in (0, 1)]
HOSTS = Topology(
    [f"host{h}/cuda:{k}" for h in (0, 1) for k in (0, 1)],
    [Link(*ends, *speed) for a, b, *speed in PAIRS for ends in ((a, b), (b, a))],
)
WITHIN, BETWEEN = HOSTS.devices[:2], ("host0/cuda:0", "host1/cuda:0")


def star(rng, noise, *, overhead_s=12e-6, collectives=("all_reduce", "all_gather"), sizes=SIZES):
    """Return measurements on STAR as if its links had 380 GB/s and 2 us. ``noise`` is the relative error."""
    return [
        Measurement(collective, size, seconds * (1 + rng.gauss(0, noise)), STAR.devices)
        for collective in collectives
        for size in sizes
        for seconds in [overhead_s + star_seconds(collective, 8, size, 380, 2e-6)]
    ]


def pairs(rng, noise, devices, gb_per_s, latency_s, overhead_s=0.0):
    """Return measurements on two devices that have a link. ``noise`` is the relative error."""
    return [
        Measurement(collective, size, (overhead_s + seconds) * (1 + rng.gauss(0, noise)), devices)
        for collective in ("all_reduce", "all_gather")
        for size in SIZES
        for seconds in [pair_seconds(collective, size, gb_per_s, latency_s)]
    ]


def test_assumptions_remain_after_a_fit():
    """What was assumed about a topology, such as its wiring, is in the fitted one, its JSON, and a second fit."""
    given = Topology.from_json(STAR.to_json()[:-1] + ', "assumed": ["18 NVLinks of 25 GB/s each"]}')
    found = calibrate(given, star(random.Random(0), 0.0)).topology
    again = calibrate(Topology.from_json(found.to_json()), star(random.Random(1), 0.0)).topology
    assert found.assumed == again.assumed == ("before the fit: 18 NVLinks of 25 GB/s each",)
    assert calibrate(STAR, star(random.Random(0), 0.0)).topology.assumed == ()


@pytest.mark.parametrize("factor", [1, Fraction(1, 100)])
def test_exact_times_give_the_exact_speeds(factor):
    """Times without noise give exactly the bandwidth, latency and overhead from which they were computed."""
    measured = [one._replace(seconds=one.seconds * float(factor)) for one in star(random.Random(0), 0.0)]
    found = calibrate(STAR, measured)
    (one,) = found.classes
    fitted = one.bandwidth.value * factor, one.latency.value / factor, found.overhead.value / factor
    assert fitted == (380, Fraction(2, 10**6), Fraction(12, 10**6))
    assert (one.links.bandwidth, one.number) == (450, 16)
    assert found.rms < 1e-9
    assert found.assumed == ()
    assert {link.bandwidth for link in found.topology.links} == {380 / factor}
    assert found.topology.devices == STAR.devices


def test_what_results_do_not_identify():
    """A parameter that the results do not identify keeps its given value, has no standard error, and is named."""
    # Two results identify one parameter, the bandwidth, since its standard error needs one more result.
    two = star(random.Random(0), 0.01, sizes=[1 << 28, 1 << 30], collectives=["all_reduce"], overhead_s=0)
    found = calibrate(STAR, two)
    (one,) = found.classes
    assert (one.latency.error, found.overhead.error) == (None, None)
    assert float(one.bandwidth.value) == pytest.approx(380, rel=0.03)
    assert one.bandwidth.error > 0
    # Bandwidth causes 99 % of the times of large sizes, and latency 99 % of the times of small ones.
    found = calibrate(STAR, star(random.Random(0), 0.01, sizes=[1 << 32, 3 << 31, 1 << 33]))
    (one,) = found.classes
    assert (one.latency, found.overhead) == ((STAR.links[0].latency_s, None), (0, None))
    assert abs(float(one.bandwidth.value) - 380) < 4 * one.bandwidth.error
    assert found.assumed == ("latency of links of 450 GB/s within hosts",)
    (one,) = calibrate(STAR, star(random.Random(0), 0.01, sizes=[8, 64, 512])).classes
    assert one.bandwidth == (450, None)
    assert abs(float(one.latency.value) - 2e-6) < 4 * one.latency.error
    # One collective cannot separate the overhead from latencies. Then the constant time is attributed to latencies.
    found = calibrate(STAR, star(random.Random(0), 0.01, collectives=["all_reduce"]))
    assert found.overhead == (0, None)
    assert float(found.classes[0].latency.value) == pytest.approx(2e-6 + 12e-6 / 28, rel=0.02)


def test_links_within_and_between_hosts():
    """Results on one host and on two identify both classes of links. Links that no result uses are named."""
    rng = random.Random(0)
    measured = pairs(rng, 0.02, WITHIN, 120, 2e-6) + pairs(rng, 0.02, BETWEEN, 20, 9e-6)
    within, between = calibrate(HOSTS, measured).classes
    assert (str(within.links), str(between.links)) == ("150 GB/s within hosts", "25 GB/s between hosts")
    assert (within.number, between.number) == (4, 4)
    for one, truth in ((within, (120, 2e-6)), (between, (20, 9e-6))):
        for estimate, value in zip((one.bandwidth, one.latency), truth, strict=True):
            assert abs(float(estimate.value) - value) < 4 * estimate.error < 0.5 * value
    found = calibrate(HOSTS, pairs(rng, 0.01, WITHIN, 120, 2e-6))
    within, between = found.classes
    assert within.bandwidth.error is not None
    assert between[2:] == ((25, None), (Fraction(3, 10**6), None))  # the given values, without standard errors
    assert found.assumed == ("bandwidth and latency of links of 25 GB/s between hosts",)
    assert {link[2:] for link in found.topology.links if link.src[:5] != link.dst[:5]} == {(25, Fraction(3, 10**6))}


@examples(15)
@given(
    st.sampled_from(["ring", "mesh", "star"]),
    st.integers(2, 6),
    st.sampled_from(["ring", "direct", "one_device"]),
    st.fractions(Fraction(1, 4), Fraction(4)),
    st.fractions(Fraction(1, 4), Fraction(4)),
)
def test_simulated_times_give_the_speeds_of_the_simulation(shape, n, algorithm, faster, slower):
    """Times that are simulated with other speeds give these speeds, if all links are of one class."""
    make = {"ring": Topology.ring, "mesh": Topology.full_mesh, "star": Topology.star}[shape]
    given, truth = make(n, 25, 1e-6), make(n, 25 * faster, Fraction(slower, 10**6))
    measured = [
        Measurement(collective, size, cr.simulate(schedule, truth, size).seconds, given.devices, algorithm)
        for collective in ("all_reduce", "all_gather")
        for size in SIZES[::2]
        for schedule in [cr.plan(given, collective, size, algorithm, operation_s=0).schedule]
    ]
    found = calibrate(given, measured)
    (one,) = found.classes
    assert found.rms < 2e-3
    assert float(one.bandwidth.value) == pytest.approx(float(25 * faster), rel=1e-2)
    assert float(one.latency.value) == pytest.approx(float(slower) * 1e-6, rel=2e-2)


@pytest.mark.parametrize(
    ("measured", "assumed", "words"),
    [
        ([], "ring", r"needs at least two results, of different sizes\.\n  given: 0 results"),
        (star(random.Random(0), 0.0)[:1], "ring", "needs at least two results"),
        (star(random.Random(0), 0.0), "rings", r"there is no such algorithm\.\n  given: 'rings'"),
    ],
)
def test_calibrations_that_are_not_possible(measured, assumed, words):
    """Too few measurements and an unknown algorithm are errors."""
    with pytest.raises(ArgumentError, match=words):
        calibrate(STAR, measured, assumed)


ROWS = [(4096, 20.5), (1 << 20, 40.25)]


def test_a_report_of_nccl_tests():
    """From a report of eight GPUs, the out-of-place times (in microseconds) are read, without an algorithm."""
    h100 = Topology.machine("hgx-h100")
    found = read_measurements(report("./build/all_reduce_perf", ROWS), h100)
    assert found == tuple(Measurement("all_reduce", size, micros / 1e6, h100.devices) for size, micros in ROWS)


@pytest.mark.parametrize(("processes", "gpus"), [(2, 8), (4, 4), (16, 1)])
def test_ranks_on_two_hosts(processes, gpus):
    """The ranks of a process are consecutive devices of its host, and the hosts are the first ones of the topology."""
    two = Topology.machine("hgx-h100", hosts=2)
    for hosts in (1, 2):
        data = report("/opt/all_gather_perf", ROWS, processes=processes * hosts // 2, gpus=gpus, hosts=hosts)
        assert read_measurements(data, two)[0].devices == two.devices[: 8 * hosts]


def edited(**parts):
    """Return a report with replaced entries: in ``row`` of the first result, in ``config``, or at the top level."""
    content = json.loads(report("all_reduce_perf", ROWS, gpus=2))
    content["results"][0] |= parts.pop("row", {})
    content["config"] |= parts.pop("config", {})
    return json.dumps(content | parts).encode()


def test_what_else_reports_can_have():
    """In-place times replace missing out-of-place times, and results of 0 bytes are skipped.

    Names of experiments, roots, CPU times, algorithms and packs are read.
    """
    pair = Topology.ring(["cuda:0", "cuda:1"])
    first = read_measurements(edited(row={"out_of_place": None}), pair)[0]
    assert first.seconds == pytest.approx(61.5e-6)
    assert len(read_measurements(edited(row={"size": 0}), pair)) == 1
    first = read_measurements(edited(row={"experiment_name": "Broadcast", "root": "     1"}), pair)[0]
    assert (first.collective, first.root) == ("broadcast", "cuda:1")
    assert read_measurements(edited(row={"out_of_place": {"cpu_time": 7}}), pair)[0].seconds == pytest.approx(7e-6)
    first = read_measurements(edited(row={"algorithm": "forest"}, config={"num_packs": 3}), pair)[0]
    assert (first.algorithm, first.packs) == ("forest", 3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe", "this is not a report of nccl-tests"),
        (b"{}", "it lacks 'config'"),
        (b"[" * 100_000, "this is not a report of nccl-tests"),
        (b" " * (LARGEST + 1), f"at most {LARGEST} bytes"),
        (edited(results=[]), "the report has no results"),
        (edited(args=["./alltoall_perf"]), r"cannot be compared with a prediction\.\n  given: '\./alltoall_perf'"),
        (edited(row={"out_of_place": {"time": "nan", "nwrong": 0}}), "a time must be a number of microseconds above 0"),
        (edited(row={"out_of_place": {"time": 1.0, "nwrong": 5.0}}), "given: 5 wrong elements of 4096 bytes"),
        (edited(row={"size": "4096"}), '"4096" is not a whole number'),
        (edited(row={"size": 2**60 + 1}), "a size must be at most 1152921504606846976 bytes"),
        (edited(config={"ngpus": 9}), r"a device that the topology does not have\.\n  given: device 2 of host 'node0'"),
        (edited(config={"devices": [{"rank": 1, "hostname": "a", "device": 0, "pid": 1}]}), r"its ranks are \[1, 2\]"),
        (report("all_reduce_perf", ROWS, processes=2, gpus=1, hosts=2), "device 0 of host 'node1'"),
    ],
)
def test_bad_reports(data, words):
    """A file that is not a report, or a report without usable results, raises an ArgumentError with the reason."""
    with pytest.raises(ArgumentError, match=words):
        read_measurements(data, Topology.ring(["cuda:0", "cuda:1"]))


@pytest.fixture
def files(tmp_path):
    """Return the files of reports of an all-reduce and of an all-gather on eight GPUs."""
    rng, paths = random.Random(11), []
    for collective in ("all_reduce", "all_gather"):
        exact = [(size, 1e6 * (12e-6 + star_seconds(collective, 8, size, 380, 2e-6))) for size in SIZES]
        rows = [(size, micros * (1 + rng.gauss(0, 0.02))) for size, micros in exact]
        paths.append(tmp_path / f"{collective}.json")
        paths[-1].write_bytes(report(f"./build/{collective}_perf", rows))
    return paths


def test_topology_uses_the_fitted_speeds(printed, files, tmp_path):
    """``calibrate`` prints the fitted speeds and the residuals, and writes the fitted topology."""
    line = ["calibrate", "hgx-h100", *files]
    h100 = Topology.machine("hgx-h100")
    measured = [one for file in files for one in read_measurements(file.read_bytes(), h100)]
    found = calibrate(h100, measured)
    (one,) = found.classes
    out = printed(*line, "--export", tmp_path / "fitted.json")
    assert f"speeds fitted to 22 results, rms of the residuals {100 * found.rms:.2g} %; +-: standard errors" in out
    row = next(text.split() for text in out.splitlines() if "450 GB/s within hosts" in text)
    assert row[4:7] == ["16", "450", f"{float(one.bandwidth.value):.4g}"]
    assert f"overhead of a call: {float(found.overhead.value) * 1e6:.2f} us +- " in out
    assert "predicted as ring, since they name no algorithm of this library: 22 results" in out
    rows = [text.split() for text in out.splitlines() if text.startswith(("all_reduce  ", "all_gather  "))]
    assert [text[:3] for text in rows] == [[m.collective, "8", "ring"] for m in measured]
    assert [float(text[-2]) for text in rows] == [pytest.approx(100 * r, abs=0.051) for r in found.residuals]
    assert Topology.load(tmp_path / "fitted.json") == found.topology
    content = json.loads(printed(*line, "--json"))
    assert content["measured"]["rms"] == found.rms
    assert [entry["residual"] for entry in content["measured"]["results"]] == list(found.residuals)


def test_plan_says_how_sure_it_is(printed, files):
    """``calibrate`` plans with the fitted speeds. It prints an interval for the time, and parameters without a fit."""
    line = ["calibrate", "hgx-h100", *files, "--hosts", 2, "--nbytes", "256M", "--operation-us", 0]
    line += ["--algorithm", "ring"]
    two = Topology.machine("hgx-h100", hosts=2)
    found = calibrate(two, [one for file in files for one in read_measurements(file.read_bytes(), two)])
    plan = cr.plan(found.topology, "all_reduce", "256M", "ring", operation_s=0)
    low, high = found.interval(plan.seconds)
    total = plan.seconds + float(found.overhead.value)
    assert (low, high) == (pytest.approx(total * (1 - 2 * found.rms)), pytest.approx(total * (1 + 2 * found.rms)))
    out = printed(*line)
    assert plan_shown(plan, " ".join(map(str, line))) in out
    last = " ".join(out.split())
    overhead = f"{float(found.overhead.value) * 1e6:.2f} us per call"
    how = f"+- {200 * found.rms:.2g} %, twice the rms of 22 results"
    assert f" measured {low * 1e3:.2f} ms to {high * 1e3:.2f} ms with {overhead} ({how})" in last
    assumed = "bandwidth and latency of links of 50 GB/s between hosts: not identified by the results"
    assert last.endswith(f" assumed {assumed}")
    content = json.loads(printed(*line, "--json"))
    assert content["measured"]["seconds"] == [low, high]
    assert content["measured"]["not_identified"] == list(found.assumed)
    assert content["seconds"] == plan.seconds


def test_results_of_our_own_benchmark(printed, tmp_path):
    """Reports of ``crossreduce bench --output`` are read, with the algorithm of each result."""
    code = "import sys; from crossreduce.cli import main; main(sys.argv[1:])"
    file, ring = tmp_path / "ours.json", tmp_path / "ring.json"
    options = ["-b", "1K", "-e", "64K", "-f", "8", "-g", "4", "-n", "3", "-A", "ring,direct", "--output", file]
    done = run_python(code, "bench", *options)
    assert done.returncode == 0, done.stderr
    ring.write_text(Topology.full_mesh(4, 10, 1e-6).to_json())
    measured = read_measurements(file.read_bytes(), Topology.load(ring))
    rows = json.loads(file.read_text())["results"]
    assert [(one.algorithm, one.nbytes) for one in measured] == [(row["algorithm"], row["size"]) for row in rows]
    assert {one.algorithm for one in measured} == {"ring", "direct"}
    assert measured[0].seconds == pytest.approx(rows[0]["out_of_place"]["time"] / 1e6)
    out = printed("calibrate", ring, file)
    assert "speeds fitted to 6 results" in out
    assert "predicted as" not in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("calibrate hgx-h100 none.json", "none.json cannot be read: No such file or directory."),
        ("calibrate hgx-h100 x.json --assume tree", "--assume must be one of"),
        ("calibrate hgx-h100 x.json --export fit.xml", "--export must be a .json file, not fit.xml."),
        ("calibrate dgx-1v BAD", "BAD: this is not a report of nccl-tests (-J FILE) or of crossreduce bench"),
    ],
)
def test_wrong_command_lines(crossreduce, tmp_path, monkeypatch, line, words):
    """A missing or invalid file or option is an error that names it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BAD").write_text("<xml/>")
    code, out, error = crossreduce(*line.split())
    assert (code != 0, out) == (True, "")
    assert words in error
    assert "Traceback" not in error
