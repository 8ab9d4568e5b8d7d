"""The command line: what it prints, writes and exits with."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import crossreduce as cr
from crossreduce import pipeline
from crossreduce.cli import exact, main
from crossreduce.cli.train import batches
from crossreduce.options import ALGORITHMS

# Measured: 3e-7 between 1 and 100 devices over 460 steps; a lost replica makes it more than 1e-2.
TOLERANCE = 1e-5
BRIEF = ("--epochs", "3")
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10
# What scripts that read nccl-tests' output look for: a row of numbers, no "#" before it.
ROW = re.compile(
    r"^ *(?P<size>\d+) +(?P<count>\d+) +(?P<type>\w+) +(?P<redop>\w+) +(?P<root>-?\d+)"
    r" +(?P<time>[\d.e+]+) +(?P<algbw>[\d.]+) +(?P<busbw>[\d.]+) +(?P<wrong>\d+|N/A)"
    r" +(?P<time_in>[\d.e+]+|N/A) +(?P<algbw_in>[\d.]+|N/A) +(?P<busbw_in>[\d.]+|N/A) +(?P<wrong_in>\d+|N/A)$",
    re.MULTILINE,
)


@pytest.fixture
def crossreduce(capsys):
    """Run a command line in this process; give its exit code, stdout and stderr."""

    def run(*args):
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        return stopped.value.code, *capsys.readouterr()

    return run


def script(code, *args, **environment):
    """Run Python code in a process of its own, without conftest's settings of the frameworks."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=inherited | environment,
    )


def without(module, *args):
    """Run a command line where a module cannot be imported."""
    code = f"import sys; sys.modules[{module!r}] = None; from crossreduce.cli import main; main(sys.argv[1:])"
    return script(code, *args)


def losses(crossreduce, path, *args):
    code, _, error = crossreduce("train", "--json", path, *args)
    assert (code, error) == (0, "")
    return np.array(json.loads(path.read_text())["losses"])


def test_train_learns_with_its_defaults(crossreduce, tmp_path):
    """``crossreduce train`` alone reaches 95 % on digits it has not seen, and says what it did."""
    code, out, error = crossreduce("train", "--json", tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    assert (code, error) == (0, "")
    assert report["test_accuracy"] >= 0.95
    assert report["replicas_identical"] is True
    assert report["devices"] == [f"cpu:{k}" for k in range(8)]
    assert len(report["losses"]) == report["steps"] == 20 * 23
    assert len(report["epoch_losses"]) == 20
    assert report["final_loss"] == report["epoch_losses"][-1] < report["epoch_losses"][0]
    assert 0 < report["reduction_s"] < report["total_s"]
    assert f"{report['test_accuracy']:.4f}" in out
    assert "identical to the bit" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (3, ("--algorithm", "ring")),
        (5, ("--algorithm", "hierarchical_copy", "--num-packs", "3")),
        (8, ()),
        (100, ("--algorithm", "direct")),
    ],
)
def test_losses_do_not_depend_on_the_number_of_devices(crossreduce, tmp_path, devices, options):
    """n devices train as one does, odd n and empty shards (n beyond the batch) included."""
    one = losses(crossreduce, tmp_path / "one.json", *BRIEF, "--devices", 1)
    many = losses(crossreduce, tmp_path / "many.json", *BRIEF, "--devices", devices, *options)
    assert one.shape == many.shape
    assert np.abs(one - many).max() < TOLERANCE


def meddle(monkeypatch, before=lambda trees: trees, after=lambda trees: trees):
    """Change what the training's reduction is given, or what it gives back."""

    def all_reduce(trees, *rest, **options):
        if not isinstance(trees[0]["b2"], np.ndarray):  # the null backend's count
            return cr.all_reduce(trees, *rest, **options)
        return after(cr.all_reduce(before(trees), *rest, **options))

    monkeypatch.setattr("crossreduce.cli.train.all_reduce", all_reduce)


def test_the_tolerance_sees_a_lost_replica(crossreduce, tmp_path, monkeypatch):
    """The comparison of losses fails where one of eight replicas' gradients is lost."""
    one = losses(crossreduce, tmp_path / "one.json", *BRIEF, "--devices", 1)
    meddle(monkeypatch, before=lambda trees: [{k: 0 * x for k, x in trees[0].items()}, *trees[1:]])
    assert np.abs(one - losses(crossreduce, tmp_path / "lossy.json", *BRIEF)).max() > 1000 * TOLERANCE


def test_replicas_that_drift_apart_are_an_error(crossreduce, tmp_path, monkeypatch):
    """A difference in one replica's parameters at the end exits with 1 and is in the JSON."""

    def drift(trees):
        trees[2]["b2"][3] += 1e-3
        return trees

    meddle(monkeypatch, after=drift)
    code, out, error = crossreduce("train", *BRIEF, "--json", tmp_path / "run.json")
    assert code == 1
    assert "the replicas' parameters differ" in error
    assert "DIFFERENT" in out
    assert json.loads((tmp_path / "run.json").read_text())["replicas_identical"] is False


def test_bytes_moved_are_exact(crossreduce, tmp_path):
    """With one_device, each step moves all gradients to one device and back to the others."""
    crossreduce("train", "--epochs", 1, "--devices", 4, "--algorithm", "one_device", "--json", tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["bytes_moved"] == 23 * 2 * 3 * 4 * PARAMETERS
    assert report["gradients_reduced"] == 23 * 4


def test_a_seed_gives_one_run(crossreduce, tmp_path):
    """The same seed gives the same losses to the bit, another seed others."""
    first, again = (losses(crossreduce, tmp_path / "run.json", *BRIEF) for _ in range(2))
    other = losses(crossreduce, tmp_path / "run.json", *BRIEF, "--seed", 1)
    assert (first == again).all()
    assert (first != other).all()


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_every_framework_trains_and_benchmarks_alike(crossreduce, tmp_path, framework):
    """On five devices every framework has NumPy's losses on one, no wrong element, and nothing on stderr."""
    one = losses(crossreduce, tmp_path / "one.json", *BRIEF, "--devices", 1)
    small = ["bench", "--framework", framework, "-b", "1000", "-e", "1000", "-n", "1", "-g"]
    lines = [
        ["train", *BRIEF, "--devices", "5", "--framework", framework, "--json", str(tmp_path / "run.json")],
        [*small, "5", "-A", "all"],
        [*small, "3", "-d", "int64", "-o", "prod"],
        [*small, "3", "-d", "bfloat16", "-o", "avg"],
        [*small, "3", "-d", "half", "--collective", "broadcast", "-r", "all"],
    ]
    ran = script(
        "import json, sys\n"
        "from crossreduce.cli import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try: main(line)\n"
        "    except SystemExit as stopped: assert not stopped.code, (line, stopped.code)\n",
        json.dumps(lines),
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["replicas_identical"] is True
    assert np.abs(one - np.array(report["losses"])).max() < TOLERANCE
    rows = [match.groupdict() for match in ROW.finditer(ran.stdout)]
    assert [row["redop"] for row in rows] == ["sum"] * 6 + ["prod", "avg"] + ["none"] * 3
    assert {row["wrong"] for row in rows} == {"0"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --devices 0", "--devices must be 1 or more, not 0."),
        ("train --devices -3", "--devices must be 1 or more, not -3."),
        ("train --devices nowhere", '"nowhere": no device is spelled like this.'),
        ("train --devices cpu:0,CPU:0", "each device may stand only once"),
        ("train --devices 1000000", "--devices takes at most 4096 devices, not 1000000."),
        ("train --devices cpu:999999999", "--devices takes at most 4096 devices, not cpu:999999999."),
        ("train --num-packs -1", "--num-packs must be 0 or more, not -1."),
        ("train --epochs 0", "--epochs must be 1 or more, not 0."),
        ("train --batch-size 0", "--batch-size must be 1 or more, not 0."),
        ("train --seed -1", "--seed must be 0 or more, not -1."),
        ("train --framework mxnet", '--framework must be one of numpy, torch, jax, tensorflow, not "mxnet".'),
        ("train --algorithm best", f'--algorithm must be one of {", ".join(ALGORITHMS)}, not "best".'),
        ("train --json /nonexistent/run.json", "--json /nonexistent/run.json cannot be written: No such file"),
        ("train --json /dev/null", "--json /dev/null cannot be written: it is no regular file"),
        ("bench -b 8x", '--minbytes takes bytes such as 8, 64K or 128M, not "8x".'),
        ("bench -b 0", "--minbytes must be 1 or more, not 0."),
        ("bench -b 8 -e 4", "--maxbytes must be at least --minbytes, and 4 is less than 8."),
        ("bench -f 0", "--stepfactor must be 1 or more, not 0."),
        ("bench -i 0", "--stepbytes must be 1 or more, not 0."),
        ("bench -n 0", "--iters must be 1 or more, not 0."),
        ("bench -o median", '--op must be one of sum, prod, min, max, avg, not "median".'),
        ("bench -d quarter", "--datatype must be one of half, float, double"),
        ("bench -A ring,best", 'direct, forest, nccl, auto, all, not "best".'),
        ("bench --collective gather", '--collective must be one of all_reduce, reduce, broadcast, not "gather".'),
        ("bench --collective reduce -r 8", '--root must be a rank from 0 to 7, or all, not "8".'),
        ("bench -a 4", '--average must be one of 0, 1, 2, 3, not "4".'),
    ],
)
def test_a_wrong_argument_is_one_line(crossreduce, monkeypatch, line, words):
    """A wrong argument exits with 2 and one line that names the option, before anything runs."""
    monkeypatch.setattr("crossreduce.cli.train.load", None)
    monkeypatch.setattr("crossreduce.cli.bench.load", None)
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (2, "")
    assert words in error
    assert error.startswith("crossreduce: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "line", "remedy"),
    [
        ("typer", "info", "pip install 'crossreduce[cli]'"),
        ("rich", "info", "pip install 'crossreduce[cli]'"),
        ("sklearn", "train", "pip install 'crossreduce[cli]'"),
        ("torch", "train --framework torch", "pip install 'crossreduce[torch]'"),
        ("jax", "bench --framework jax", "pip install 'crossreduce[jax]'"),
        ("tensorflow", "bench --framework tensorflow", "pip install 'crossreduce[tensorflow]'"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(module, line, remedy):
    """A missing module exits with 2 and says what to install, without a traceback."""
    ran = without(module, *line.split())
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert module in ran.stderr
    assert remedy in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_failed_run_leaves_files_as_they_were(crossreduce, tmp_path, monkeypatch, command):
    """A run that does not end leaves an earlier JSON file untouched, and nothing beside it."""

    def fail(*args):
        raise KeyboardInterrupt

    path = tmp_path / "run.json"
    path.write_text("earlier")
    monkeypatch.setattr(f"crossreduce.cli.{command}.load", fail)
    assert crossreduce(command, "--json", path)[0] == 130
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_json_file_is_replaced_whole(crossreduce, tmp_path):
    """A reader that holds the earlier file goes on reading that one, to its end."""
    path = tmp_path / "run.json"
    path.write_text("earlier")
    with path.open() as reader:
        assert crossreduce("train", "--epochs", 1, "--json", path)[0] == 0
        assert reader.read() == "earlier"
    assert json.loads(path.read_text())["epochs"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_during_imports_stops_quietly():
    """Ctrl-C before a command has begun exits with 130, without a traceback."""
    ran = script(
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from crossreduce.cli import main; main(['info'])"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


# What a shell started in the background ignores Ctrl-C, and so does whatever that starts; at a terminal nothing does.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("crossreduce", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process")
def test_ctrl_c_stops_quietly(tmp_path):
    """Ctrl-C while training exits with 130, without a traceback and without a file."""
    line = ["train", "--epochs", "100000", "--json", str(tmp_path / "run.json")]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        began = time.monotonic()
        while not list(tmp_path.iterdir()) and time.monotonic() < began + 60:
            time.sleep(0.05)
        assert list(tmp_path.iterdir()), "it never began"
        process.send_signal(signal.SIGINT)
        try:
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


# A command during which a signal arrives where Python cannot raise: within the callback of a weak reference.
LOSING = """
import os, signal, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, and so does whatever it starts
import crossreduce.cli.app
from crossreduce.cli import main

class Node:
    pass

def app(**_):
    node = Node()
    reference = weakref.ref(node, lambda _: [os.kill(os.getpid(), signal.{}), *range(9)])
    del node
    print("lost")
    time.sleep(60)

crossreduce.cli.app.app = app
main([])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_an_interruption_is_never_lost(name, code):
    """A signal that arrives where an exception is dropped, as in an import, ends the command all the same."""
    began = time.monotonic()
    ran = script(LOSING.format(name))
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "lost\n", "")
    assert time.monotonic() - began < 50


def test_bench_prints_the_header_of_nccl_tests(crossreduce):
    """Parsers that key on nccl-tests' header and footer lines find them, and the emulation is named."""
    code, out, _ = crossreduce("bench", "-b", "8", "-e", "32", "-f", "2", "-n", "2", "-g", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith(
        f"# crossreduce version {cr.__version__} engine=numpy-{np.__version__} transport=in-process"
    )
    assert lines[1] == "# Collective test starting: all_reduce_perf"
    assert lines[2] == (
        "# nThread 1 nGpus 2 minBytes 8 maxBytes 32 step: 2(factor) warmup iters: 1 iters: 2 agg iters: 1 "
        "validation: 1 graph: 0 unalign: 0"
    )
    assert "IN-PROCESS EMULATION" in lines[4]
    assert "NOT GPU NUMBERS" in lines[4]
    ranks = re.findall(
        r"^#  Rank +(\d+) Group +0 Pid +(\d+) on +\S+ device +(\d+) \[([^]]+)\] \S.*$", out, re.MULTILINE
    )
    assert ranks == [("0", str(os.getpid()), "0", "cpu:0"), ("1", str(os.getpid()), "1", "cpu:1")]
    start = lines.index("# Using devices") + 6
    # nccl-tests 2.19.6, src/util.cu, writeResultHeader.
    expected = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"""
    assert [line.rstrip() for line in lines[start - 1 : start + 3]] == expected.splitlines()
    assert re.fullmatch(
        r"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : [\d.e-]+ \n#\n"
        r"# Collective test concluded: all_reduce_perf",
        "\n".join(lines[-4:]),
    )


def test_bench_rows_parse_and_their_numbers_agree(crossreduce):
    """Each row has nccl-tests' columns; algbw is size by time and busbw 2 (n-1)/n of it."""
    code, out, _ = crossreduce("bench", "-b", "64K", "-e", "0.25m", "-f", "2", "-n", "3", "-g", "4", "-d", "float64")
    rows = [match.groupdict() for match in ROW.finditer(out)]
    assert code == 0
    assert [int(row["size"]) for row in rows] == [1 << 16, 1 << 17, 1 << 18]
    for row in rows:
        assert (row["type"], row["redop"], row["root"], row["wrong"]) == ("double", "sum", "-1", "0")
        assert int(row["count"]) * 8 == int(row["size"])
        assert row["wrong_in"] == "0"
        for place in ("", "_in"):
            algbw = int(row["size"]) / float(row["time" + place]) / 1e3
            # Time is printed to a hundredth or a tenth of a microsecond.
            assert float(row["algbw" + place]) == pytest.approx(algbw, abs=0.006, rel=0.002)
            assert float(row["busbw" + place]) == pytest.approx(1.5 * algbw, abs=0.006, rel=0.002)
    assert not [line for line in out.splitlines() if not line.startswith("#") and not ROW.match(line)]


@pytest.mark.parametrize(
    "options",
    [("--framework", "jax"), ("--framework", "tensorflow"), ("--collective", "broadcast"), ("-o", "avg", "-d", "int")],
    ids=" ".join,
)
def test_bench_says_where_there_is_no_in_place_form(crossreduce, tmp_path, options, jax_, tensorflow_):
    """In place is N/A, and null in JSON, for arrays that cannot be written, broadcasts, results of another dtype."""
    path = tmp_path / "bench.json"
    code, out, _ = crossreduce("bench", "-b", "64", "-e", "64", "-n", "1", "-g", "2", "-J", path, *options)
    assert code == 0
    assert [m["time_in"] for m in ROW.finditer(out)] == ["N/A"]
    assert [row["in_place"] for row in json.loads(path.read_text())["results"]] == [None]


def test_bench_steps_like_nccl_tests(crossreduce):
    """Without -f sizes grow by -i; a size that is no whole number of elements is rounded down."""
    _, out, _ = crossreduce("bench", "-b", "10", "-e", "40", "-i", "10", "-n", "1", "-g", "2", "-w", "0", "-c", "0")
    assert [(m["size"], m["count"], m["wrong"]) for m in ROW.finditer(out)] == [
        ("8", "2", "N/A"), ("20", "5", "N/A"), ("28", "7", "N/A"), ("40", "10", "N/A"),
    ]  # fmt: skip
    assert "step: 10(bytes)" in out


def test_bench_per_iteration_columns(crossreduce):
    """-I adds min, max, p99 and the coefficient of variation, in nccl-tests' order."""
    _, out, _ = crossreduce("bench", "-b", "8", "-e", "8", "-n", "5", "-g", "2", "-I", "1")
    names = next(line.split() for line in out.splitlines() if " i_cv% " in line)
    measured = ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"]
    assert names == ["#", "size", "count", "type", "redop", "root", *measured, *measured]
    cells = next(line.split() for line in out.splitlines() if not line.startswith("#"))
    for place in (0, 8):
        mean, lowest, highest, p99 = (float(cells[k + place]) for k in (5, 9, 10, 11))
        assert lowest <= mean <= highest == p99


def test_bench_json_has_the_keys_of_nccl_tests_and_no_environment(crossreduce, tmp_path, monkeypatch):
    """The JSON has nccl-tests' keys; env is empty, and no variable's value is anywhere in it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "fake-5f1d0a-secret")
    monkeypatch.setenv("NCCL_FAKE_TOKEN", "fake-77c3e9-token")
    path = tmp_path / "bench.json"
    code, out, _ = crossreduce(
        "bench", "-b", "8", "-e", "64", "-f", "8", "-n", "4", "-g", "3", "-A", "ring,direct", "-J", path
    )
    text = path.read_text()
    report = json.loads(text)
    assert code == 0
    assert "fake-" not in text + out
    assert report["env"] == {}
    assert {
        "version", "start_time", "args", "env", "nccl_version", "config", "devices", "results", "out_of_bounds",
        "average_bus_bandwidth", "errors", "end_time",
    } <= report.keys()  # fmt: skip
    assert {
        "nthreads", "ngpus", "minimum_bytes", "maximum_bytes", "step_factor", "warmup_iters", "iterations",
        "aggregated_iterations", "validation",
    } <= report["config"].keys()  # fmt: skip
    assert [device["device_hex"] for device in report["devices"]] == ["cpu:0", "cpu:1", "cpu:2"]
    assert {"rank", "group", "pid", "hostname", "device", "device_hex", "device_info"} == report["devices"][0].keys()
    assert [(r["algorithm"], r["size"]) for r in report["results"]] == list(
        itertools.product(["ring", "direct"], [8, 64])
    )
    for row in report["results"]:
        assert row["in_place"].keys() == row["out_of_place"].keys()
        assert row["in_place"]["nwrong"] == 0
        assert len(row["in_place_per_iter"]["times_us"]) == 4
        assert row["out_of_place"].keys() == {"time", "alg_bw", "bus_bw", "nwrong"}
        assert row["out_of_place"]["nwrong"] == 0
        assert (row["count"], row["type"], row["redop"], row["root"]) == (row["size"] // 4, "float", "sum", "-1")
        stats = row["out_of_place_per_iter"]
        assert len(stats["times_us"]) == row["actual_iterations"] == 4
        assert stats["p50_us"] == pytest.approx(np.median(stats["times_us"]))
        assert stats["min_us"] <= stats["p50_us"] <= stats["p95_us"] <= stats["p99_us"] == stats["max_us"]
        assert row["out_of_place"]["time"] == pytest.approx(np.mean(stats["times_us"]))
    assert report["out_of_bounds"] == {"count": 0, "okay": "true"}
    places = ("out_of_place", "in_place")
    mean = np.mean([row[place]["bus_bw"] for row in report["results"] for place in places])
    assert report["average_bus_bandwidth"]["bandwidth"] == pytest.approx(mean)


def test_bench_finds_a_wrong_element(crossreduce, tmp_path, monkeypatch):
    """One wrong element is counted on every destination, in place too; the footer says FAILED, the exit code is 1."""
    right = pipeline.run_on_host

    def off(plan, sources, results, *args, **more):
        found = right(plan, sources, results, *args, **more)
        for x in results[0]:
            x[5] += 1
        return found

    monkeypatch.setattr(pipeline, "run_on_host", off)
    path = tmp_path / "bench.json"
    code, out, _ = crossreduce(
        "bench", "-b", "64", "-e", "128", "-f", "2", "-n", "1", "-g", "4", "-A", "one_device", "-J", path
    )
    report = json.loads(path.read_text())
    assert code == 1
    assert [(match["wrong"], match["wrong_in"]) for match in ROW.finditer(out)] == [("4", "4")] * 2
    assert "# Out of bounds values : 4 FAILED" in out
    assert report["out_of_bounds"] == {"count": 4, "okay": "false"}
    assert [row[place]["nwrong"] for row in report["results"] for place in ("out_of_place", "in_place")] == [4] * 4


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("datatype", ["int8", "uint8", "int32", "int64", "half", "bfloat16", "float", "double"])
def test_bench_is_right_for_every_op_and_type(crossreduce, op, datatype):
    """Every op on every type, along every algorithm, with odd and even numbers of devices: no wrong element."""
    for n in (2, 5):
        code, out, error = crossreduce(
            "bench", "-b", "600", "-e", "600", "-n", "1", "-w", "0", "-g", n, "-o", op, "-d", datatype, "-A", "all"
        )
        assert (code, error) == (0, "")
        assert [match["wrong"] for match in ROW.finditer(out)] == ["0"] * 6


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
def test_bench_knows_roots(crossreduce, collective):
    """reduce and broadcast run from every root that is asked for, and their busbw is their algbw."""
    code, out, _ = crossreduce(
        "bench",
        "-b",
        "1M",
        "-e",
        "1M",
        "-n",
        "1",
        "-g",
        "3",
        "--collective",
        collective,
        "-r",
        "all",
        "-A",
        "auto,ring",
    )
    rows = [match.groupdict() for match in ROW.finditer(out)]
    assert code == 0
    assert f"# Collective test starting: {collective}_perf" in out
    assert [row["root"] for row in rows] == ["0", "1", "2"] * 2
    assert {row["redop"] for row in rows} == {"none" if collective == "broadcast" else "sum"}
    assert all(row["algbw"] == row["busbw"] and row["wrong"] == "0" for row in rows)


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "mean"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 7, 24])
def test_inputs_are_exact_in_every_order_and_show_each_loss(op, dtype, n):
    """Reduced in their dtype in any order, inputs give ``result``; with one of them lost or doubled, they do not."""
    arrays = exact.inputs(op, dtype, n)
    whole = exact.result(op, arrays)
    combine = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "mean": np.add}[op]
    kind = exact.dtype_named("float32" if op == "mean" else dtype)

    def reduced(xs):
        total = xs[0].astype(kind)
        for x in xs[1:]:
            total = combine(total, x.astype(kind))
        return total / len(arrays) if op == "mean" else total

    assert {x.dtype for x in arrays} == {whole.dtype} == {exact.dtype_named(dtype)}
    assert {x.shape for x in arrays} == {(exact.PERIOD,)}
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(n)
        assert (reduced([arrays[k] for k in order]) == whole).all()
    for k in range(n):
        if n > 1:
            assert (reduced(arrays[:k] + arrays[k + 1 :]) != whole).any()
        if op in ("sum", "product", "mean"):
            assert (reduced([*arrays, arrays[k]]) != whole).any()


def test_info_lists_frameworks_devices_and_algorithms(crossreduce):
    """info names every framework with its version and devices, and every algorithm."""
    code, out, error = crossreduce("info", "--json")
    report = json.loads(out)
    assert (code, error) == (0, "")
    assert report["crossreduce"] == cr.__version__
    assert report["algorithms"] == list(ALGORITHMS)
    assert list(report["frameworks"]) == ["numpy", "torch", "jax", "tensorflow"]
    assert report["frameworks"]["numpy"]["version"] == np.__version__
    for found in report["frameworks"].values():
        assert found["version"]
        assert found["devices"].startswith("cpu:")
        assert found["error"] is None


def test_info_reports_a_broken_framework(tmp_path):
    """A framework that fails on import, or ends the process, is reported beside the others."""
    for name, code in {
        "torch": "raise RuntimeError('this [torch] is broken')",
        "jax": "import os; os._exit(7)",
        "tensorflow": "raise ImportError('libcuda.so: cannot open')",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    line = "from crossreduce.cli import main; main(['info'])"
    ran = script(line, PYTHONPATH=str(tmp_path), COLUMNS="80")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "RuntimeError: this [torch] is broken" in ran.stdout
    assert "exit code 7" in ran.stdout
    assert "libcuda.so: cannot open" in ran.stdout
    assert "cpu:k, as many as there are replicas" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_version():
    """``python -m crossreduce --version`` is the command's, and imports no framework but NumPy."""
    code = (
        "import sys, runpy; sys.argv = ['crossreduce', '--version']\n"
        "try: runpy.run_module('crossreduce', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'jax', 'tensorflow', 'sklearn'} & set(sys.modules)))"
    )
    ran = script(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"crossreduce {cr.__version__}\n[]\n", "")


def test_batches_cover_an_epoch():
    """Each epoch holds every sample once, in an order of its own."""
    epochs = [[], []]
    for epoch, batch in batches(100, 7, 2, seed=3):
        assert len(batch) <= 7
        epochs[epoch].extend(batch)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]
