"""Progress bars: on a terminal, on standard error, for everything that can take seconds; nothing in a pipe."""

import json
import re
import sys
from contextlib import nullcontext, suppress

import pytest
from command_line import forked_command

import crossreduce as cr
from crossreduce.planning.plans import plan_request
from crossreduce.planning.schedules import candidates, fastest_schedule
from crossreduce.progress import report, steps, watched

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")

BENCH = ("bench", "-b", "1K", "-e", "4K", "-f", "2", "-n", "2", "-w", "1")
COMMANDS = {
    "plan": (("plan", "dgx-1v", "--json"), ["planning 0/2", "planning forest", "comparing schedules"]),
    "topology": (("topology", "ncv4", "--json"), ["all_reduce 0/5", "all_gather"]),
    "train": (("train", "--epochs", "2"), ["training 0/46", "epoch 2 loss", "46/46"]),
    "bench": (
        (*BENCH, "--devices", "2", "--algorithm", "ring,direct"),
        ["measuring ring 0/3", "measuring ring 2/3", "measuring direct"],
    ),
    "ranks": ((*BENCH, "--launch", "1"), ["measuring crossreduce 0/3", "measuring crossreduce 2/3"]),
    "against": ((*BENCH, "--devices", "2", "--against", "numpy"), ["measuring numpy 0/1"]),
}


def flat(text):
    """Return a text of a terminal without the bars and line breaks."""
    return " ".join(re.sub("[━╸╺]", " ", text).split())


def with_bars(*args, **environment):
    """Run a command line with standard error on a terminal; return its exit code, its output, and the terminal."""
    ran = forked_command(*args, terminal=("stderr",), COLUMNS="100", **environment)
    return ran.code, ran.out, ran.shown


def forget_plans():
    for cache in (plan_request, fastest_schedule, candidates):
        cache.cache_clear()


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each == "against")) for each in COMMANDS]
)
def test_bars_are_shown_on_a_terminal_only(name):
    """With a terminal as standard error the steps are shown there; without one nothing is. The output has no bars."""
    args, expected = COMMANDS[name]
    forget_plans()
    code, out, shown = with_bars(*args)
    assert code == 0, shown
    for text in expected:
        assert text in flat(shown)
    assert "━" not in out
    assert "\x1b" not in out
    if "--json" in args:
        json.loads(out)
    if name != "ranks":
        piped = forked_command(*args)
        assert (piped.code, piped.error) == (0, "")
        assert "━" not in piped.out
        assert len(piped.out.splitlines()) == len(out.splitlines())


def test_bundles_show_their_sizes_and_files(tmp_path):
    """``bundle`` shows the sizes that are planned, and ``verify`` the files of a folder that are proved, or the parts
    of a file; the message about a wrong file is complete and follows the bar, which is removed."""
    forget_plans()
    code, _, shown = with_bars("bundle", "ncv4", tmp_path / "made", "--format", "msccl")
    assert code == 0, shown
    assert re.search(r"planned \S+ \S+ 1/21", flat(shown))
    count = len(json.loads((tmp_path / "made" / "ranks.json").read_text())["files"])
    code, out, shown = with_bars("verify", tmp_path / "made")
    assert code == 0, shown
    assert f"proving 0/{count}" in flat(shown)
    assert "━" not in out
    assert f"{count} files are right" in out
    file = sorted((tmp_path / "made" / "msccl").iterdir())[0]
    code, out, shown = with_bars("verify", file)
    assert code == 0
    assert "reading 0/2" in flat(shown)
    file.write_text(file.read_text().replace('minBytes="0"', 'minBytes="64"'))
    code, out, shown = with_bars("verify", tmp_path / "made")
    assert (code, out) == (1, "")
    assert shown.rstrip().endswith(f"{file} is wrong: its least_bytes is 64, unlike in ranks.json")


def test_a_table_on_the_same_terminal_is_complete():
    """If output and bars share a terminal, each row of the table has a line of its own."""
    shown = forked_command(*BENCH, "--devices", "2", terminal=("stdin", "stdout", "stderr"), COLUMNS="200").shown
    assert "measuring auto" in shown
    rows = re.findall(r"^ +(\d+) +\d+ +float +sum +-1 .*$", shown.replace("\r", "\n"), re.MULTILINE)
    assert rows == ["1024", "2048", "4096"]


def test_no_colours_if_the_user_wants_none():
    """With NO_COLOR the bar has no colours; without it, it has."""
    for variables, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        ran = forked_command("topology", "ncv4", "--json", terminal=("stderr",), **variables)
        assert json.loads(ran.out)["machine"] == "ncv4"
        assert "all_reduce" in ran.codes
        assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", ran.codes)) == coloured


def test_plans_report_their_steps():
    """A plan reports the algorithms that it tries, the trees that it packs, and the schedules that it compares; it is
    the same without a watcher."""
    seen, plans = [], []
    for watcher in (lambda *step: seen.append(step), None):
        forget_plans()
        with watched(watcher) if watcher else nullcontext():
            plans.append(cr.plan(cr.Topology.machine("dgx-1v", hosts=2), "all_reduce", nbytes="256M").schedule)
    assert plans[0] == plans[1]
    assert {text for text, *_ in seen} >= {"planning ring", "planning forest", "comparing schedules", "packing trees"}
    assert all(0 <= done <= total for _, done, total in seen)
    packed = [done for text, done, _ in seen if text == "packing trees"]
    assert len(packed) > 20
    assert packed[1:] != packed[:-1]


def test_steps_are_reported_to_the_innermost_watcher():
    """Without a watcher nothing happens; a watcher is called until its block ends, also by an error."""
    report("nobody", 0, 1)
    assert list(steps((1, 2), "nobody")) == [1, 2]
    outer, inner = [], []
    with watched(lambda *step: outer.append(step)):
        with suppress(ValueError), watched(lambda *step: inner.append(step)):
            for item in steps("ab", lambda item: f"item {item}"):
                if item == "b":
                    raise ValueError("stop")
        report("after", 1, 1)
        assert list(steps((), "none")) == []
    report("nobody", 1, 1)
    assert inner == [("item a", 0, 2), ("item b", 1, 2)]
    assert outer == [("after", 1, 1)]


@pytest.mark.parametrize("given", ["9" * 21, "999", "\N{SUPERSCRIPT TWO}"])
def test_descriptors_for_bars_that_are_not_open(given):
    """Without a usable descriptor of its parent's terminal, a command shows no bar, and does its work."""
    ran = forked_command("topology", "ncv4", "--json", CROSSREDUCE_PROGRESS_FD=given)
    assert json.loads(ran.out)["machine"] == "ncv4"
    assert ran.error == ""
