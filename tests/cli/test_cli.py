"""The command line as a whole: errors, interruptions, missing modules, versions, and ``crossreduce info``."""

import importlib
import json
import os
import pydoc
import re
import shlex
import signal
import sys
import time
import weakref
from contextlib import suppress

import pytest
from command_line import forked, forked_command, plan_shown, run_python, run_without
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

import crossreduce as cr
from crossreduce.cli import main
from crossreduce.cli.app import MOVED, app
from crossreduce.cli.support.arguments import read_device_list, read_link, read_node, read_subset
from crossreduce.cli.support.output import ranges
from crossreduce.options import ALGORITHMS

WRONG = f"""
train --devices 0: --devices must be 1 or more, not 0.
train --devices nowhere: "nowhere": this device name cannot be parsed.
train --devices cpu:0,CPU:0: each device may be listed only once
train --devices 1000000: --devices must be 4096 or less, not 1000000.
train --devices cpu:999999999: the number of a device must be below 4096, but cpu:999999999 is listed.
train --num-packs -1: --num-packs must be 0 or more, not -1.
train --epochs 0: --epochs must be 1 or more, not 0.
train --epochs 1000001: --epochs must be 1000000 or less, not 1000001.
train --batch-size 0: --batch-size must be 1 or more, not 0.
train --seed -1: --seed must be 0 or more, not -1.
train --framework mxnet: --framework must be one of numpy, torch, jax, tensorflow, cupy, not "mxnet".
train --algorithm best: --algorithm must be one of {", ".join(ALGORITHMS)}, not "best".
train --output /nonexistent/run.json: --output /nonexistent/run.json cannot be written: there is no folder /nonexistent.
train --output /dev/null: --output /dev/null cannot be written: it is not a regular file
bench -b 8x: --minbytes must be a number of bytes such as 8, 64K or 128M, at most 2**60, not "8x".
bench -b 0: --minbytes must be 1 or more, not 0.
bench -b 8 -e 4: --maxbytes must be at least --minbytes, but 4 is less than 8.
bench -f 0: --stepfactor must be 1 or more, not 0.
bench -i 0: --stepbytes must be 1 or more, not 0.
bench -b 1 -e 64M -i 1K: --stepbytes 1K results in 65536 sizes, more than 10000: add -f 2.
bench -n 0: --iters must be 1 or more, not 0.
bench -n 1000001: --iters must be 1000000 or less, not 1000001.
bench -o median: --op must be one of sum, prod, min, max, avg, product, mean, not "median".
bench -d quarter: --datatype must be one of half, float, double
bench -A ring,best: --algorithm must be one of {", ".join(ALGORITHMS)}, all, not "best".
bench --collective gather: --collective must be one of all_reduce, reduce, broadcast, not "gather".
bench --collective reduce -r 8: --root must be a rank from 0 to 7, or all, not "8".
bench -a 4: --average must be 3 or less, not 4.
bench -a -1: --average must be 0 or more, not -1.
"""


def test_a_wrong_argument_is_one_line(crossreduce, monkeypatch):
    """A wrong argument exits with 2 and one line that names the option, before anything runs."""
    monkeypatch.setattr("crossreduce.cli.train.command.load", None)
    monkeypatch.setattr("crossreduce.cli.bench.devices.load", None)
    for line, words in (each.split(": ", 1) for each in WRONG.strip().splitlines()):
        code, out, error = crossreduce(*line.split())
        assert (code, out) == (2, ""), line
        assert words in error
        assert error.startswith("crossreduce: ")
        assert error.count("\n") == 1


def test_the_help_of_each_command_shows_examples(printed, monkeypatch):
    """At 80 columns the help of a command has at most 80 lines, none of them longer, and three examples, which are
    accepted as command lines; ``plan`` has at most 14 options, and in a second panel those for tables of GPUs. Options
    show no types of Python. No text names a file of the repository, which an installed library lacks."""
    monkeypatch.setenv("COLUMNS", "80")
    commands, general = get_command(app).commands, printed("--help").splitlines()
    for name, command in commands.items():
        lines = printed(name, "--help").splitlines()
        assert len(lines) <= 80, name
        assert max(map(len, lines)) <= 80
        assert not [line for line in [*lines, *general] if re.search("<(str|int|bool|float|path|list)", line)], name
        assert "docs/" not in "".join(lines)
        examples = [line.strip("│ ") for line in lines if line.startswith("│ crossreduce ")]
        assert len(examples) == 3, name
        for line in examples:
            program, called, *words = shlex.split(line.partition(" > ")[0])  # the shell takes the rest
            assert (program, called) == ("crossreduce", name)
            assert command.make_context(name, words).params
    listed = [re.findall(r"^│ --([\w-]+)", panel, re.MULTILINE) for panel in printed("plan", "--help").split("╭─")]
    usual, rarer = filter(None, listed)
    assert 10 < len(usual) - 1 <= 14
    assert rarer == ["nics", "gpu", "pcie", "between-cpus"]


def test_old_spellings_name_the_new_ones(crossreduce):
    """An option of an earlier version exits with 2, and names a command and option that exist."""
    commands = {command.callback.__name__ for command in app.registered_commands}
    options = {command: re.findall(r"--[\w-]+", crossreduce(command, "--help")[1]) for command in commands}
    for command, moved in MOVED.items():
        for option, new in moved.items():
            assert option not in options[command]
            for line in ([command, "dgx-1v", option, "2x4"], [command, f"{option}=a.xml", "dgx-1v", "--json"]):
                assert crossreduce(*line) == (2, "", f"crossreduce: {command} has no {option}.  try: {new}\n")
            (target,) = set(re.findall(r"crossreduce (\w+)", new))
            assert set(re.findall(r"--[\w-]+", new)) <= set(options[target])


USAGE = """
plan: crossreduce plan needs MACHINE|FILE|this.|  try:   crossreduce plan dgx-1v
verify: crossreduce verify needs FILE|  try:   crossreduce verify plan.xml
plan dgx-1v --steep: crossreduce plan has no option --steep.|  try:   --steps
plan dgx-1v --size 1M: crossreduce plan has no option --size.|  try:   --nbytes
bench --size=1M: crossreduce bench has no option --size.|  try:   --minbytes or --maxbytes
plan dgx-1v --gpus 4: crossreduce plan has no option --gpus.|  try:   --devices
bench --nproc_per_node 4: crossreduce bench has no option --nproc_per_node.|  try:   --devices or --launch
plan dgx-1v --nodes 2: crossreduce plan has no option --nodes.|  try:   --hosts
plan --topo dgx-1v: crossreduce plan has no option --topo.|  try:   crossreduce plan MACHINE|FILE|this
bundle dgx-1v -o plans: crossreduce bundle has no option -o.|  try:   crossreduce bundle MACHINE|FILE|this DIR
bench --hosts 2: crossreduce bench has no option --hosts.|  try:   crossreduce bench --help
topology dgx-1v --hosts two: --hosts must be a whole number, not "two".
bench -np 4: --iters must be a whole number, not "p".
plan dgx-1v --operation-us=fast: --operation-us must be a number, not "fast".
trace . --run -1: --run must be 0 or more, not "-1".
plan dgx-1v --hosts: --hosts needs a value.|  given: plan dgx-1v --hosts
plan dgx-1v --in-network=3: --in-network takes no value.|  given: plan dgx-1v --in-network=3
plan dgx-1v mi300x: crossreduce plan takes fewer arguments.|  given: mi300x
plam dgx-1v: crossreduce has no command plam.|  try:   plan
--steep: crossreduce has no option --steep.|  try:   --help
train --json a.json: --json takes no file|  given: --json a.json|  try:   crossreduce train --output FILE
bench --json=a.json: --json takes no file|  try:   crossreduce bench --output FILE
"""


@pytest.mark.parametrize("case", USAGE.strip().splitlines())
def test_a_malformed_command_line_is_an_error_of_this_library(crossreduce, case):
    """A missing argument, an unknown option or command, and a malformed number exit with 2, and say what is wrong,
    what was given and what to try. No text of typer or pydantic is shown."""
    line, words = case.split(": ", 1)
    code, out, error = crossreduce(*shlex.split(line))
    assert (code, out) == (2, "")
    assert error.startswith("crossreduce: ")
    assert error.count("\n") <= 3
    for part in words.split("|  "):
        assert part in error, error
    assert not re.search("Usage|Error|Input should|Invalid value|pydantic|╭", error)


def test_no_command_shows_the_help(crossreduce):
    """Without a command, the help is printed, and the exit code is 2."""
    code, out, error = crossreduce()
    assert code == 2
    assert "compare" in out + error


@pytest.mark.parametrize(
    ("module", "line", "packages"),
    [
        ("typer", "info", "typer rich scikit-learn"),
        ("sklearn", "train", "typer rich scikit-learn"),
        ("torch", "train --framework torch", "torch"),
    ],
)
def test_a_missing_module_is_named_with_its_package(module, line, packages):
    """A missing module exits with 2 and names the packages to install, without a traceback."""
    ran = run_without(module, *line.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert module in ran.stderr
    assert f"pip install {packages}" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("line", "place", "fault"),
    [
        ("train --output a.json", "train.command.load", KeyboardInterrupt()),
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
    interrupted = isinstance(fault, KeyboardInterrupt)
    assert (code, out) == (130 if interrupted else 2, "")
    assert (error == "crossreduce: interrupted\n") == interrupted
    assert sorted(tmp_path.iterdir()) == paths
    assert {path.read_text() for path in paths} == {"earlier"}


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

    ran = forked_command("train", "--epochs", "100000", "--output", tmp_path / "run.json", begun=begun)
    assert (ran.code, ran.out) == (code, "")
    assert ran.error == ("crossreduce: interrupted\n" if code == 130 else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(
    ("name", "code", "in_callback"),
    [("SIGTERM", 143, True), ("SIGHUP", 129, False), ("SIGINT", 130, True), ("SIGINT", 130, False)],
)
def test_an_interruption_is_never_lost(monkeypatch, name, code, in_callback):
    """A signal ends the command even if the first exception that it raises is lost: in the callback of a weak
    reference, whose exceptions Python drops, or in code that catches all exceptions."""

    def command(**_):
        def arrive(_):
            try:
                os.kill(os.getpid(), signal.Signals[name])
                [*range(9)]  # code in which the handler of the signal can run
            finally:
                print("raised")

        if in_callback:
            node = set()
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

    monkeypatch.setattr("crossreduce.cli.app.app", command)
    ran = forked(run)
    assert (ran.code, ran.out) == (code, "raised\n")
    assert ran.error == ("crossreduce: interrupted\n" if code == 130 else "")


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_a_terminal_has_tables_of_its_width_and_the_pager():
    """On a terminal of any kind, tables have the width of COLUMNS. Only ``plan --steps`` starts the user's pager."""
    terminal = ("stdin", "stdout")
    for kind in ("xterm", "dumb"):
        table = forked_command("topology", terminal=terminal, COLUMNS="50", TERM=kind).shown
        assert {len(line) for line in table.splitlines() if line[:1] in "┏┃└"} == {50}

    def run(args):
        importlib.reload(pydoc)  # it remembers the pager of an earlier test
        main(args)

    def shown(*args):
        ran = forked(run, "plan", "ncv4", *args, terminal=terminal, PAGER="sed s/^/paged:/", COLUMNS="90")
        return ran.shown.strip().splitlines()

    plan = cr.plan("ncv4")
    text = f"{plan_shown(plan, 'plan ncv4 --steps', 90)}{plan.schedule}"
    assert shown("--steps") == [f"paged:{line}" for line in text.splitlines()]
    assert shown() == plan_shown(plan, "plan ncv4", 90).splitlines()


def test_signal_handlers_are_restored(crossreduce):
    """A command that runs in a Python program leaves its handlers of signals and unraisable exceptions as they were."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers], sys.unraisablehook
    assert crossreduce("topology", "ncv4")[0] == 0
    assert ([signal.getsignal(number) for number in numbers], sys.unraisablehook) == before


@pytest.mark.slow
def test_info_lists_frameworks_devices_and_algorithms(crossreduce):
    """``info`` lists every framework with its version and devices, and every algorithm."""
    report = json.loads(crossreduce("info", "--json")[1])
    assert (report["crossreduce"], report["algorithms"]) == (cr.__version__, list(ALGORITHMS))
    assert list(report["frameworks"]) == ["numpy", "torch", "jax", "tensorflow", "cupy"]
    del report["frameworks"]["cupy"]  # which needs a GPU
    assert {(found["error"], found["devices"][:4]) for found in report["frameworks"].values()} == {(None, "cpu:")}


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


def test_no_framework_is_imported_without_need(tmp_path):
    """``--version``, topology, export and verify import no framework except NumPy, and print no escape codes."""
    code = f"""
import sys, runpy
for line in ("topology dgx-1v", "export dgx-1v {tmp_path}/a.xml", "verify {tmp_path}/a.xml", "--version"):
    sys.argv[1:] = line.split()
    try:
        runpy.run_module("crossreduce", run_name="__main__")
    except SystemExit as stopped:
        assert not stopped.code, (line, stopped.code)
print(sorted({{"torch", "jax", "tensorflow", "sklearn", "matplotlib", "pynvml"}} & set(sys.modules)))
"""
    ran = run_python(code, TERM="xterm-256color", FORCE_COLOR="", TTY_COMPATIBLE="")
    assert (ran.returncode, ran.stderr) == (0, "")
    sizes = r"steps, Simple\n  sizes: messages whose number of elements is a multiple of [0-9]+\n"
    assert re.search(rf"{sizes}crossreduce {re.escape(cr.__version__)}\n\[\]\n\Z", ran.stdout)
    assert "\x1b" not in ran.stdout


@given(st.data())
def test_a_node_has_a_name_and_a_number(data):
    """Every node is found by its number and by its name, and every link by numbers or names of its ends. A range of
    numbers or names selects consecutive devices."""
    topology = cr.Topology.machine(data.draw(st.sampled_from(["dgx-1v", "pcie-8", "mi100", "ncv4"])))
    link, nodes = data.draw(st.sampled_from(topology.links)), topology.nodes

    def spelled(node):
        return data.draw(st.sampled_from([node, f" {node} ", str(nodes.index(node))]))

    assert read_node("-x", spelled(link.src), topology) == link.src
    for text in (f"{spelled(link.src)},{spelled(link.dst)}", f"{nodes.index(link.src)}-{nodes.index(link.dst)}"):
        assert read_link("-x", text, topology) == (link.src, link.dst)
    devices = data.draw(st.permutations(topology.devices))
    assert read_subset("-x", ",".join(map(spelled, devices)), topology) == tuple(devices)
    assert read_subset("-x", ",".join(ranges(devices)), topology) == tuple(devices)
    assert read_device_list("-x", ",".join(ranges(devices))) == tuple(devices)
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(devices) - 1)] * 2)))
    for part in (f" {a}-{b} ", f"{topology.devices[a]}-{b}"):
        assert read_subset("-x", part, topology) == topology.devices[a : b + 1]
