"""``crossreduce bench`` for the devices of one process: nccl-tests' table and JSON, sizes, roots, checked results."""

import functools
import itertools
import json
import os
import re

import numpy as np
import pytest
from command_line import ROW
from pairs import each

import crossreduce as cr
from crossreduce.cli.bench import exact
from crossreduce.cli.support.arguments import read_algorithms
from crossreduce.engines.host import HostExecutable
from crossreduce.options import ALGORITHMS


@pytest.fixture
def bench(crossreduce):
    """Return a function that runs ``crossreduce bench`` with a line of options."""
    return lambda line, *rest: crossreduce("bench", *line.split(), *rest)


# nccl-tests 2.19.6, src/util.cu, writeResultHeader.
COLUMNS = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"""


def test_bench_prints_the_table_of_nccl_tests(bench):
    """The output has nccl-tests' header and footer, and a line about the emulation. Rows have nccl-tests' columns, in
    which algbw is size / time, and busbw is 2 (n-1)/n algbw."""
    code, out, _ = bench("-b 64K -e 0.25m -f 2 -n 3 -g 4 -d float64")
    lines = out.splitlines()
    assert code == 0
    version = f"# crossreduce version {cr.__version__} framework=numpy-{np.__version__} transport=in-process"
    assert lines[0].startswith(version)
    assert lines[1:3] == [
        "# Collective test starting: all_reduce_perf",
        "# nThread 1 nGpus 4 minBytes 65536 maxBytes 262144 step: 2(factor) warmup iters: 1 iters: 3 agg iters: 1 "
        "validation: 1 graph: 0 unalign: 0",
    ]
    assert "IN-PROCESS EMULATION" in lines[4]
    assert "NOT GPU NUMBERS" in lines[4]
    rank = r"^#  Rank +(\d+) Group +0 Pid +(\d+) on +\S+ device +(\d+) \[([^]]+)\] \S.*$"
    assert re.findall(rank, out, re.M) == [(str(k), str(os.getpid()), str(k), f"cpu:{k}") for k in range(4)]
    start = lines.index("# Using devices") + 7  # after 4 devices and the name of the algorithm
    assert [line.rstrip() for line in lines[start : start + 4]] == COLUMNS.splitlines()
    footer = (
        r"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : [\d.e-]+ \n#\n# Collective test concluded: all_re"
    )
    assert re.match(footer, "\n".join(lines[-4:]))
    rows = [match.groupdict() for match in ROW.finditer(out)]
    assert [int(row["size"]) for row in rows] == [1 << 16, 1 << 17, 1 << 18]
    for row in rows:
        assert (row["type"], row["redop"], row["root"]) == ("double", "sum", "-1")
        assert int(row["count"]) * 8 == int(row["size"])
        for place in ("", "_in"):
            algbw = int(row["size"]) / float(row["time" + place]) / 1e3
            assert row["wrong" + place] == "0"
            # Times are printed to a hundredth or a tenth of a microsecond, so they give the rates only roughly.
            assert float(row["algbw" + place]) == pytest.approx(algbw, abs=0.006, rel=0.002)
            assert float(row["busbw" + place]) == pytest.approx(1.5 * algbw, abs=0.006, rel=0.002)
    assert not [line for line in lines if not line.startswith("#") and not ROW.match(line)]


@pytest.mark.parametrize(
    "options", ["--framework jax", "--framework tensorflow", "--collective broadcast", "-o avg -d int"]
)
def test_bench_has_no_in_place_form(bench, tmp_path, options, jax_, tensorflow_):
    """In place is N/A, and null in JSON, for immutable arrays, broadcasts, and results of another dtype."""
    path = tmp_path / "bench.json"
    code, out, _ = bench(f"-b 64 -e 64 -n 1 -g 8 {options} -J", path)
    assert code == 0
    assert [m["time_in"] for m in ROW.finditer(out)] == ["N/A"]
    assert [row["in_place"] for row in json.loads(path.read_text())["results"]] == [None]


def test_bench_steps_like_nccl_tests(bench):
    """Without -f, sizes grow by -i bytes, and are then rounded down to multiples of the element size. -I adds min, max,
    p99 and the coefficient of variation, in nccl-tests' order."""
    _, out, _ = bench("-b 10 -e 40 -i 10 -n 1 -g 2 -w 0 -c 0")
    assert [m["size"] for m in ROW.finditer(out)] == ["8", "20", "28", "40"]
    assert {m["wrong"] for m in ROW.finditer(out)} == {"N/A"}
    assert "step: 10(bytes)" in out
    _, out, _ = bench("-b 8 -e 8 -n 5 -g 2 -I 1")
    names = next(line.split() for line in out.splitlines() if " i_cv% " in line)
    columns = ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"]
    assert names == ["#", "size", "count", "type", "redop", "root", *columns, *columns]
    cells = next(line.split() for line in out.splitlines() if not line.startswith("#"))
    for place in (0, 8):  # the first columns out of place and in place
        mean, lowest, highest, p99 = (float(cells[k + place]) for k in (5, 9, 10, 11))
        assert lowest <= mean <= highest == p99


CONFIG = """nthreads ngpus minimum_bytes maximum_bytes step_factor warmup_iters iterations aggregated_iterations
validation"""
KEYS = """version start_time args env nccl_version config devices results out_of_bounds average_bus_bandwidth errors
end_time"""


def test_bench_json_has_the_keys_of_nccl_tests_and_no_environment(bench, tmp_path, monkeypatch):
    """The JSON has nccl-tests' keys; env is empty, and secrets in environment variables are not in the output."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "fake-5f1d0a-secret")
    monkeypatch.setenv("NCCL_FAKE_TOKEN", "fake-77c3e9-token")
    path = tmp_path / "bench.json"
    _, out, _ = bench("-b 8 -e 64 -f 8 -n 4 -g 3 -A ring,direct -J", path)
    report = json.loads(path.read_text())
    assert "fake-" not in path.read_text() + out
    assert report["env"] == {}
    assert report.keys() >= set(KEYS.split())
    assert report["config"].keys() >= set(CONFIG.split())
    assert [device["device_hex"] for device in report["devices"]] == ["cpu:0", "cpu:1", "cpu:2"]
    assert {"rank", "group", "pid", "hostname", "device", "device_hex", "device_info"} == report["devices"][0].keys()
    measured = [(row["algorithm"], row["size"]) for row in report["results"]]
    assert measured == [*itertools.product(["ring", "direct"], [8, 64])]
    forms = ("out_of_place", "in_place")
    for row, form in itertools.product(report["results"], forms):
        assert row[form].keys() == {"time", "alg_bw", "bus_bw", "nwrong"}
        stats = row[f"{form}_per_iter"]
        assert len(stats["times_us"]) == row["actual_iterations"] == 4
        assert stats["p50_us"] == pytest.approx(np.median(stats["times_us"]))
        assert stats["min_us"] <= stats["p50_us"] <= stats["p95_us"] <= stats["p99_us"] == stats["max_us"]
        assert (row[form]["time"], row[form]["nwrong"]) == (pytest.approx(np.mean(stats["times_us"])), 0)
        assert (row["count"], row["type"], row["redop"], row["root"]) == (row["size"] // 4, "float", "sum", "-1")
    assert report["out_of_bounds"] == {"count": 0, "okay": "true"}
    mean = np.mean([row[form]["bus_bw"] for row in report["results"] for form in forms])
    assert report["average_bus_bandwidth"]["bandwidth"] == pytest.approx(mean)


def test_bench_finds_a_wrong_element(bench, tmp_path, monkeypatch):
    """A wrong element is counted on every destination, also in place. The footer says FAILED; the exit code is 1."""
    right = HostExecutable.run

    def wrong(self, operands, out):
        results = right(self, operands, out)
        for x in results[0]:
            x[5] += 1
        return results

    monkeypatch.setattr(HostExecutable, "run", wrong)
    monkeypatch.setattr("crossreduce.reduction.cross_device_ops.new_calls", lambda: None)  # they bypass ``run``
    path = tmp_path / "bench.json"
    code, out, _ = bench("-b 64 -e 128 -f 2 -n 1 -g 4 -A one_device -J", path)
    report = json.loads(path.read_text())
    assert code == 1
    assert [(match["wrong"], match["wrong_in"]) for match in ROW.finditer(out)] == [("4", "4")] * 2
    assert "# Out of bounds values : 4 FAILED" in out
    assert report["out_of_bounds"] == {"count": 4, "okay": "false"}
    assert [row[place]["nwrong"] for row in report["results"] for place in ("out_of_place", "in_place")] == [4] * 4


TYPES = ["int8", "uint8", "int32", "int64", "half", "bfloat16", "float", "double"]


@pytest.mark.parametrize(("datatype", "op", "n"), each(TYPES, ["sum", "prod", "min", "max", "avg"], [2, 5]))
def test_bench_is_right_for_every_op_and_type(printed, datatype, op, n):
    """No result has a wrong element, for each op, type and algorithm, on odd and even numbers of devices."""
    out = printed(*f"bench -b 600 -e 600 -n 1 -w 0 -g {n} -o {op} -d {datatype} -A all".split())
    assert [match["wrong"] for match in ROW.finditer(out)] == ["0"] * len(read_algorithms("-A", "all"))


def test_bench_measures_exact_sums(bench, monkeypatch, tmp_path, framework):
    """With --exact the sums of every framework are exact, and the output and the JSON say so. The inputs cancel: most
    orders of rounded additions lose the 1, which is the exact sum."""
    given = [np.full(exact.PERIOD, x, "float32") for x in (1e30, 1, -1e30, 0, 0, 0, 0, 0)]
    monkeypatch.setattr(exact, "inputs", lambda *_: given)
    monkeypatch.setattr(exact, "result", lambda *_: np.ones(exact.PERIOD, "float32"))
    path = tmp_path / "bench.json"
    collective = "reduce" if framework.name in ("torch", "tensorflow") else "all_reduce"
    line = f"-b 64 -e 64 -n 1 -g 8 --collective {collective} -A ring,direct --framework {framework.name} -J"
    for is_exact in (True, False):
        code, out, _ = bench(line, path, *(["--exact"] * is_exact))
        report = json.loads(path.read_text())
        wrong = [row[form]["nwrong"] for row in report["results"] for form in ("out_of_place", "in_place") if row[form]]
        assert len(wrong) == (4 if framework.name in ("numpy", "torch") else 2)
        assert {count == 0 for count in wrong} == {is_exact}
        assert code == (not is_exact)
        assert ("\n# Sums of crossreduce are exact: rounded once.\n" in out) == is_exact
        assert report["crossreduce"]["exact"] == is_exact


def test_what_cannot_be_exact_is_rejected_before_anything_is_measured(bench):
    """With --exact, products, means of 64-bit integers, collectives without sums, and GPUs are errors."""
    on_gpus = "exact sums are computed only in host memory.\n  given: --exact on cuda:0, cuda:1"
    for line, words in {
        "-o prod": "a product cannot be exact",
        "-o avg -d int64": "the mean of 8 int64 values is not exact",
        "--collective broadcast": "--exact cannot be used with broadcast, which adds nothing: omit --exact.",
        "--framework torch -g cuda:0-1": on_gpus,
        "--against numpy -o prod": "a product cannot be exact",
        "--launch 2 -o prod -d half": "a product cannot be exact",
        "--launch 2 --collective all_gather": "--exact cannot be used with all_gather",
    }.items():
        code, out, error = bench(line, "--exact")
        assert (code, out) == (2, "")
        assert words in error


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
def test_bench_measures_every_root(bench, collective):
    """reduce and broadcast are measured from every requested root, and their busbw equals their algbw."""
    code, out, _ = bench("-b 1M -e 1M -n 1 -g 3 -r all -A auto,ring --collective", collective)
    rows = [match.groupdict() for match in ROW.finditer(out)]
    assert code == 0
    assert f"# Collective test starting: {collective}_perf" in out
    assert [row["root"] for row in rows] == ["0", "1", "2"] * 2
    assert {row["redop"] for row in rows} == {"none" if collective == "broadcast" else "sum"}
    assert all(row["algbw"] == row["busbw"] and row["wrong"] == "0" for row in rows)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "mean"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "bfloat16", "float64"])
def test_inputs_detect_each_loss(op, dtype):
    """The inputs reduce to exactly ``exact.result``, but not if one is left out, or is added or multiplied twice."""
    combine = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "mean": np.add}[op]
    kind = np.dtype("float32" if op == "mean" else dtype)
    for n in (1, 2, 7, 24):
        arrays = exact.inputs(op, dtype, n)
        whole = exact.result(op, arrays)
        assert {x.dtype for x in (*arrays, whole)} == {np.dtype(dtype)}

        def right(xs, n=n, whole=whole):
            total = functools.reduce(combine, [x.astype(kind) for x in xs])
            return ((total / n if op == "mean" else total) == whole).all()

        assert right(arrays)
        for k in range(n):
            if n > 1:
                assert not right(arrays[:k] + arrays[k + 1 :])
            if op not in ("min", "max"):
                assert not right([*arrays, arrays[k]])


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_bench_plans_on_a_topology(printed, tmp_path, collective):
    """Each algorithm runs on all devices of a machine's topology, without a wrong element. "all" selects each algorithm
    that plans; auto and nccl only select one of them."""
    every = [name for name in ALGORITHMS if name not in ("auto", "nccl")]
    assert read_algorithms("-A", "all") == read_algorithms("-A", "ring, all") == every
    path = tmp_path / "bench.json"
    line = f"bench --topology ncv4 -b 600 -e 600 -n 1 -w 0 -A all --collective {collective} -J"
    out = printed(*line.split(), path)
    report = json.loads(path.read_text())
    assert "\n# Planned on the topology: ncv4\n" in out
    assert (report["crossreduce"]["topology"], len(report["devices"])) == ("ncv4", 4)
    assert [row["algorithm"] for row in report["results"]] == every
    assert {row["out_of_place"]["nwrong"] for row in report["results"]} == {0}


def test_bench_takes_some_devices_of_a_topology(printed, crossreduce, tmp_path):
    """``-g 3`` uses the topology's first 3 devices. More devices than it has, or devices without a path, are rejected.
    If -g names devices, data may be forwarded through the others."""
    small, path = ["bench", "-b", 8, "-e", 8, "-n", 1, "--topology"], tmp_path / "topology.json"
    assert "device  2 [cpu:2]" in printed(*small, "dgx-1v", "-g", 3)
    error = "crossreduce: --devices: the topology has only 8 devices, not 9.\n"
    assert crossreduce(*small, "dgx-1v", "-g", 9) == (2, "", error)
    path.write_text(cr.Topology.machine("dgx-1v").subset(["cuda:0", "cuda:5"]).to_json())
    assert "needs a route from cpu:0 to cpu:1, but no link leads out of {cpu:0}." in crossreduce(*small, path)[2]
    path.write_text(cr.Topology(("cpu:0", "cpu:2", "cpu:1"), cr.Topology.mesh(1, 3).links).to_json())
    assert "# Out of bounds values : 0 OK" in printed(*small, path, "-g", "cpu:0,cpu:2")
