"""Progress bars: on a terminal, on standard error, for everything that can take seconds; nothing in a pipe."""

import json
import re
import sys
from contextlib import suppress

import pytest
from command_line import STREAMS, forked_command

from crossreduce.cli.support import output
from crossreduce.planning.plans import plan_request
from crossreduce.planning.schedules import candidates, fastest_schedule
from crossreduce.progress import report, steps, watched

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")

BENCH = "bench -b 1K -e 4K -f 2 -n 2 -w 1"
COMMANDS = {
    "plan dgx-1v --json": ["planning 0/2", "planning forest", "comparing schedules"],
    "topology ncv4 --json": ["all_reduce 0/5", "all_gather"],
    "train --epochs 2": ["training 0/46", "epoch 2 loss", "46/46"],
    f"{BENCH} -g 2 -A ring,direct": ["measuring ring 0/3", "measuring ring 2/3", "measuring direct"],
    f"{BENCH} --launch 1": ["measuring crossreduce 0/3", "measuring crossreduce 2/3"],
    f"{BENCH} -g 2 --against numpy": ["measuring numpy 0/1"],
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
    "line", [pytest.param(line, marks=[pytest.mark.slow] * ("against" in line)) for line in COMMANDS]
)
def test_bars_are_shown_on_a_terminal_only(line):
    """Bars are shown if standard error is a terminal, and otherwise not. Standard output never has bars."""
    forget_plans()
    code, out, shown = with_bars(*line.split())
    assert code == 0, shown
    assert all(text in flat(shown) for text in COMMANDS[line])
    assert not {"━", "\x1b"} & set(out)
    if "--json" in line:
        json.loads(out)
    if "--launch" not in line:
        piped = forked_command(*line.split())
        assert (piped.code, piped.error, "━" in piped.out) == (0, "", False)
        assert len(piped.out.splitlines()) == len(out.splitlines())


def test_bundles_show_their_sizes_and_files(tmp_path):
    """The bar of ``bundle`` counts the planned sizes, and that of ``verify`` the proved files of a folder. The message
    about a wrong file is complete, and comes after the bar is removed."""
    forget_plans()
    code, _, shown = with_bars("bundle", "ncv4", tmp_path / "made", "--format", "msccl")
    assert code == 0, shown
    assert re.search(r"planned \S+ \S+ 1/21", flat(shown))
    count = len(json.loads((tmp_path / "made" / "ranks.json").read_text())["files"])
    code, out, shown = with_bars("verify", tmp_path / "made")
    assert code == 0, shown
    assert f"proving 0/{count}" in flat(shown)
    assert f"{count} files are right" in out
    names = [entry["file"] for entry in json.loads((tmp_path / "made" / "ranks.json").read_text())["files"]]
    last = tmp_path / "made" / names[-1]
    last.write_text(re.sub('minBytes="[0-9]+"', 'minBytes="64"', last.read_text()))
    code, out, shown = with_bars("verify", tmp_path / "made")
    assert (code, [line.partition(":")[0] for line in out.splitlines() if line[0] != " "]) == (1, names[:-1])
    assert shown.rstrip().endswith(f"{last} is wrong: its least_bytes is 64, unlike in ranks.json")


def test_long_work_prints_lines_without_a_terminal(monkeypatch, capsys):
    """If asked for, a step prints a line on standard error where no bar is drawn, at most every LINE_S seconds."""
    for wait, due in ((0.0, ["crossreduce: 1 of 2: second", "crossreduce: 2 of 2: end"]), (1e9, [])):
        monkeypatch.setattr(output, "LINE_S", wait)
        with output.progress("first", 2, lines=True) as advance:
            advance("second")
            advance("end")
        with output.progress("first", 2) as advance:
            advance("without lines")
        captured = capsys.readouterr()
        assert (captured.out, captured.err.splitlines()) == ("", due)


def test_a_table_on_the_same_terminal_is_complete():
    """If output and bars share a terminal, each row of the table has a line of its own."""
    shown = forked_command(*BENCH.split(), "-g", 2, terminal=STREAMS, COLUMNS="200").shown
    assert "measuring auto" in shown
    rows = re.findall(r"^ +(\d+) +\d+ +float +sum +-1 .*$", shown.replace("\r", "\n"), re.MULTILINE)
    assert rows == ["1024", "2048", "4096"]


def test_steps_are_reported_to_the_innermost_watcher():
    """Only the innermost watcher is called, until its block ends, even by an error. Without one, nothing happens."""
    report("nobody", 0, 1)
    outer, inner = [], []
    with watched(lambda *step: outer.append(step)):
        with suppress(ValueError), watched(lambda *step: inner.append(step)):
            for item in steps("ab", lambda item: f"item {item}"):
                if item == "b":
                    raise ValueError("stop")
        report("after", 1, 1)
    report("nobody", 1, 1)
    assert inner == [("item a", 0, 2), ("item b", 1, 2)]
    assert outer == [("after", 1, 1)]


@pytest.mark.parametrize("given", ["9" * 21, "999", "\N{SUPERSCRIPT TWO}"])
def test_descriptors_for_bars_that_are_not_open(given):
    """If CROSSREDUCE_PROGRESS_FD is not an open descriptor, a command shows no bar, and does its work."""
    ran = forked_command("topology", "ncv4", "--json", CROSSREDUCE_PROGRESS_FD=given)
    assert (json.loads(ran.out)["machine"], ran.error) == ("ncv4", "")
