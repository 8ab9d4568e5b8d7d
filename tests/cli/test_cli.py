"""The command line as a whole: errors, interruptions, missing modules, versions, and ``crossreduce info``."""

import importlib
import json
import os
import pydoc
import re
import signal
import sys
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
from command_line import expanded, forked, forked_command, run_python, run_without
from hypothesis import given
from hypothesis import strategies as st

import crossreduce as cr
from crossreduce.cli import main
from crossreduce.cli.app import MOVED, app
from crossreduce.cli.support.arguments import read_device_list, read_link, read_node, read_subset
from crossreduce.cli.support.output import group_names, ranges
from crossreduce.options import ALGORITHMS
from crossreduce.topology.discover import discover

ONE_OF_ALGORITHMS = f'--algorithm must be one of {", ".join(ALGORITHMS)}, not "best".'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --devices 0", "--devices must be 1 or more, not 0."),
        ("train --devices nowhere", '"nowhere": this device name cannot be parsed.'),
        ("train --devices cpu:0,CPU:0", "each device may be listed only once"),
        ("train --devices 1000000", "--devices must be at most 4096 devices, not 1000000."),
        ("train --devices cpu:999999999", "the number of a device must be below 4096, unlike that of cpu:999999999."),
        ("train --num-packs -1", "--num-packs must be 0 or more, not -1."),
        ("train --epochs 0", "--epochs must be 1 or more, not 0."),
        ("train --batch-size 0", "--batch-size must be 1 or more, not 0."),
        ("train --seed -1", "--seed must be 0 or more, not -1."),
        ("train --framework mxnet", '--framework must be one of numpy, torch, jax, tensorflow, cupy, not "mxnet".'),
        ("train --algorithm best", ONE_OF_ALGORITHMS),
        (
            "train --json /nonexistent/run.json",
            "--json /nonexistent/run.json cannot be written: there is no folder /nonexistent.",
        ),
        ("train --json /dev/null", "--json /dev/null cannot be written: it is not a regular file"),
        ("bench -b 8x", '--minbytes must be a number of bytes such as 8, 64K or 128M, not "8x".'),
        ("bench -b 0", "--minbytes must be 1 or more, not 0."),
        ("bench -b 8 -e 4", "--maxbytes must be at least --minbytes, but 4 is less than 8."),
        ("bench -f 0", "--stepfactor must be 1 or more, not 0."),
        ("bench -i 0", "--stepbytes must be 1 or more, not 0."),
        ("bench -n 0", "--iters must be 1 or more, not 0."),
        ("bench -o median", '--op must be one of sum, prod, min, max, avg, product, mean, not "median".'),
        ("bench -d quarter", "--datatype must be one of half, float, double"),
        ("bench -A ring,best", f'--algorithm must be one of {", ".join(ALGORITHMS)}, all, not "best".'),
        ("bench --collective gather", '--collective must be one of all_reduce, reduce, broadcast, not "gather".'),
        ("bench --collective reduce -r 8", '--root must be a rank from 0 to 7, or all, not "8".'),
        ("bench -a 4", '--average must be one of 0, 1, 2, 3, not "4".'),
    ],
)
def test_a_wrong_argument_is_one_line(crossreduce, monkeypatch, line, words):
    """A wrong argument exits with 2 and one line that names the option, before anything runs."""
    monkeypatch.setattr("crossreduce.cli.train.command.load", None)
    monkeypatch.setattr("crossreduce.cli.bench.devices.load", None)
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (2, "")
    assert words in error
    assert error.startswith("crossreduce: ")
    assert error.count("\n") == 1


def test_the_help_of_each_command_fits_a_screen(printed):
    """At 80 columns the help of each command has at most 50 lines, and ``plan`` has at most 14 options."""
    for command in app.registered_commands:
        lines = printed(command.callback.__name__, "--help").splitlines()
        assert len(lines) <= 50, command.callback.__name__
        assert max(map(len, lines)) <= 80
    options = set(re.findall(r"^ +(?:-\w, )?--([\w-]+)", printed("plan", "--help"), re.MULTILINE)) - {"help"}
    assert 10 < len(options) <= 14


def test_old_spellings_name_the_new_ones(crossreduce):
    """An option of an earlier version exits with 2, and names a command and option that exist."""
    commands = {command.callback.__name__ for command in app.registered_commands}
    for command, options in MOVED.items():
        helped = crossreduce(command, "--help")[1]
        for option, new in options.items():
            assert option not in helped.split()
            for line in ([command, "dgx-1v", option, "2x4"], [command, f"{option}=a.xml", "dgx-1v", "--json"]):
                code, out, error = crossreduce(*line)
                assert (code, out, error) == (2, "", f"crossreduce: {command} has no {option}.  try: {new}\n")
            (target,) = set(re.findall(r"crossreduce (\w+)", new))
            assert target in commands
            assert set(re.findall(r"--[\w-]+", new)) <= set(re.findall(r"--[\w-]+", crossreduce(target, "--help")[1]))


@pytest.mark.parametrize("line", ["plan", "verify", "plan dgx-1v --steep", "topology dgx-1v --hosts two"])
def test_a_malformed_command_line_shows_the_usage(crossreduce, line):
    """A missing argument, an unknown option and a malformed number exit with 2 and show the usage."""
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (2, "")
    assert "Usage: crossreduce" in error


@pytest.mark.parametrize(
    ("module", "line", "extra"),
    [
        ("typer", "info", "cli"),
        ("sklearn", "train", "cli"),
        ("torch", "train --framework torch", "torch"),
        pytest.param("jax", "bench --framework jax", "jax", marks=pytest.mark.slow),
    ],
)
def test_a_missing_module_is_named_with_its_extra(module, line, extra):
    """A missing module exits with 2 and names the extra to install, without a traceback."""
    ran = run_without(module, *line.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert module in ran.stderr
    assert f"pip install 'crossreduce[{extra}]'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("line", "place", "fault"),
    [
        ("train --json a.json", "train.command.load", KeyboardInterrupt()),
        ("bench --json a.json", "bench.devices.load", KeyboardInterrupt()),
        ("export dgx-1v a.svg", "export.Plan.explain", KeyboardInterrupt()),
        ("export dgx-1v a.json", "export.Plan.explain", MemoryError()),
        ("topology dgx-1v --export a.json --picture a.svg", "topology.Topology.to_json", OSError(28, "No space left")),
    ],
)
def test_a_failed_run_does_not_change_files(crossreduce, tmp_path, monkeypatch, line, place, fault):
    """A failure before the last file is complete changes no existing file, and leaves no other file in its folder."""

    def fail(*args, **options):
        raise fault

    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / word for word in line.split() if word.startswith("a.")]
    for path in paths:
        path.write_text("earlier")
    monkeypatch.setattr(f"crossreduce.cli.{place}", fail)
    code, out, error = crossreduce(*line.split())
    assert (code, out) == (130 if isinstance(fault, KeyboardInterrupt) else 2, "")
    assert code == 2 or error == "crossreduce: interrupted\n"
    assert sorted(tmp_path.iterdir()) == paths
    assert {path.read_text() for path in paths} == {"earlier"}


def test_an_interruption_while_a_file_is_created_leaves_none(crossreduce, tmp_path, monkeypatch):
    """Ctrl-C that arrives when the temporary file exists, but its creation has not returned yet, leaves no file."""
    create = os.open

    def interrupted(path, flags, *rest, **options):
        number = create(path, flags, *rest, **options)
        if flags & os.O_EXCL:
            os.close(number)
            raise KeyboardInterrupt
        return number

    monkeypatch.setattr(os, "open", interrupted)
    code, out, _ = crossreduce("topology", "dgx-1v", "--export", tmp_path / "a.json")
    assert (code, out, list(tmp_path.iterdir())) == (130, "", [])


def test_ctrl_c_during_imports():
    """Ctrl-C before a command starts exits with 130 and one line, without a traceback."""
    ran = run_python(
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from crossreduce.cli import main; main(['info'])"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "crossreduce: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_stops_a_command(tmp_path, name, code):
    """Ctrl-C or SIGTERM during training exits with the signal's code, without a traceback and without a file."""

    def begun(pid):
        end = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < end, "the command did not start"
            time.sleep(0.02)
        os.kill(pid, signal.Signals[name])

    ran = forked_command("train", "--epochs", "100000", "--json", tmp_path / "run.json", begun=begun)
    assert (ran.code, ran.out) == (code, "")
    assert ran.error == ("crossreduce: interrupted\n" if code == 130 else "")
    assert list(tmp_path.iterdir()) == []


class Node:
    """An object that can have weak references."""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(
    ("name", "code", "in_callback"),
    [("SIGTERM", 143, True), ("SIGHUP", 129, False), ("SIGINT", 130, True), ("SIGINT", 130, False)],
)
def test_an_interruption_is_never_lost(monkeypatch, name, code, in_callback):
    """A signal still ends the command if it arrives in the callback of a weak reference, whose exceptions Python
    drops, or in code that catches all exceptions."""

    def app(**_):
        def arrive(_):
            try:
                os.kill(os.getpid(), signal.Signals[name])
                [*range(9)]
            finally:
                print("raised")

        if in_callback:
            node = Node()
            reference = weakref.ref(node, arrive)
            del node
            assert reference() is None
        else:
            with suppress(BaseException):
                arrive(None)
        time.sleep(20)

    def run(args):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and its children ignore it
        main(args)

    monkeypatch.setattr("crossreduce.cli.app.app", app)
    ran = forked(run)
    assert (ran.code, ran.out) == (code, "raised\n")
    assert ran.error == ("crossreduce: interrupted\n" if code == 130 else "")


TERMINAL = ("stdin", "stdout")


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_tables_are_as_wide_as_columns(term):
    """On a terminal of any kind, tables have the width of COLUMNS."""
    shown = forked_command("topology", terminal=TERMINAL, COLUMNS="50", TERM=term).shown
    assert {len(line) for line in shown.splitlines() if line[:1] in "┏┃└"} == {50}


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_steps_are_paged_on_a_terminal():
    """On a terminal ``plan --steps`` starts the user's pager, and ``plan`` does not."""

    def run(args):
        importlib.reload(pydoc)  # keeps the pager that it has used
        main(args)

    def shown(*args):
        return forked(run, "plan", "ncv4", *args, terminal=TERMINAL, PAGER="sed s/^/paged:/").shown.strip().splitlines()

    plan = cr.plan("ncv4")
    assert shown("--steps") == [f"paged:{line}" for line in f"{plan.explain()}\n{plan.schedule}".splitlines()]
    assert shown() == plan.explain().splitlines()


def test_signal_handlers_are_restored(crossreduce):
    """A command that runs in a Python program leaves its handlers of signals and unraisable exceptions as they were."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers], sys.unraisablehook
    assert crossreduce("topology", "ncv4")[0] == 0
    assert ([signal.getsignal(number) for number in numbers], sys.unraisablehook) == before


@pytest.mark.slow
def test_info_lists_frameworks_devices_and_algorithms(crossreduce):
    """``info`` lists every framework with its version and devices, and every algorithm."""
    code, out, error = crossreduce("info", "--json")
    report = json.loads(out)
    assert (code, error) == (0, "")
    assert report["crossreduce"] == cr.__version__
    assert report["algorithms"] == list(ALGORITHMS)
    assert report["topology"] == list(discover().notes)
    assert bool(report["cuda"]["devices"]) is not bool(report["cuda"]["unusable"])
    assert re.search(r"^\d+\.\d+|cannot be opened", report["nccl"])
    assert list(report["frameworks"]) == ["numpy", "torch", "jax", "tensorflow", "cupy"]
    assert report["frameworks"]["numpy"]["version"] == np.__version__
    without_gpu = report["frameworks"].pop("cupy")
    assert (without_gpu["devices"] or without_gpu["error"]).startswith(("cuda:", "none", "not installed"))
    for found in report["frameworks"].values():
        assert (found["error"], bool(found["version"]), found["devices"][:4]) == (None, True, "cpu:")


def test_info_reports_a_broken_framework(tmp_path):
    """A framework that fails at import, or ends its process, is reported; the others are listed."""
    for name, code in {
        "torch": "raise RuntimeError('this [torch] is broken')",
        "jax": "import os; os._exit(7)",
        "tensorflow": "raise ImportError('libcuda.so: cannot open')",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = run_python("from crossreduce.cli import main; main(['info'])", PYTHONPATH=path, COLUMNS="80")
    assert (ran.returncode, ran.stderr) == (0, "")
    for text in ("RuntimeError: this [torch] is broken", "exit code 7", "libcuda.so: cannot open", "cpu:k, one for"):
        assert text in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_version():
    """``python -m crossreduce --version`` prints the version and imports no framework except NumPy."""
    code = (
        "import sys, runpy; sys.argv = ['crossreduce', '--version']\n"
        "try: runpy.run_module('crossreduce', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'jax', 'tensorflow', 'sklearn'} & set(sys.modules)))"
    )
    ran = run_python(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"crossreduce {cr.__version__}\n[]\n", "")


@given(st.lists(st.sampled_from(["cuda:", "host0/cuda:", "nic", ""]).flatmap(
    lambda prefix: st.integers(0, 99).map(lambda number: f"{prefix}{number}")) | st.sampled_from(["nvswitch", "ib"]),
    max_size=12))  # fmt: skip
def test_grouped_names_can_be_expanded(names):
    """The text that ``group_names`` returns contains all names, in their order."""
    assert expanded(group_names(names)) == names


@given(st.data())
def test_a_node_has_a_name_and_a_number(data):
    """Every node is found by its number and by its name, every link by numbers and names of both ends, and consecutive
    devices by a range of numbers or names."""
    topology = cr.Topology.machine(data.draw(st.sampled_from(["dgx-1v", "pcie-8", "mi100", "ncv4"])))
    link = data.draw(st.sampled_from(topology.links))

    def spelled(node):
        return data.draw(st.sampled_from([node, f" {node} ", str(topology.nodes.index(node))]))

    assert read_node("-x", spelled(link.src), topology) == link.src
    assert read_link("-x", f"{spelled(link.src)},{spelled(link.dst)}", topology) == (link.src, link.dst)
    a, b = (topology.nodes.index(node) for node in (link.src, link.dst))
    assert read_link("-x", f"{a}-{b}", topology) == (link.src, link.dst)
    devices = data.draw(st.permutations(topology.devices))
    assert read_subset("-x", ",".join(map(spelled, devices)), topology) == tuple(devices)
    assert read_subset("-x", ",".join(ranges(devices)), topology) == tuple(devices)
    assert read_device_list("-x", ",".join(ranges(devices))) == tuple(devices)
    a, b = sorted(map(topology.devices.index, data.draw(st.tuples(*[st.sampled_from(devices)] * 2))))
    for part in (f" {a}-{b} ", f"{topology.devices[a]}-{b}"):
        assert read_subset("-x", part, topology) == topology.devices[a : b + 1]
