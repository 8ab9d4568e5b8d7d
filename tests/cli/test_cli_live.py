"""``crossreduce train --live``: a view of the loss and the share of time in reductions, for every framework."""

import io
import json
import math
import re
import subprocess
import sys

import pytest
from command_line import in_terminal

from crossreduce.cli.train.trainers import TRAINERS
from crossreduce.cli.train.view import LAST, ROWS, TrainingStep, View, chart, highest, live_view, mean_loss, share

ON_TERMINAL = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
LOSS = re.compile(r"loss ([\d.]+)  \(from ([\d.]+); 0 at the bottom\)")
SHARE = re.compile(r"in reductions ([\d.]+) % of the time, ([\d.]+) % of that of the last")


@ON_TERMINAL
@pytest.mark.parametrize(
    "framework",
    ["numpy", *(pytest.param(each, marks=pytest.mark.slow) for each in sorted({*TRAINERS} - {"cupy", "numpy"}))],
)
def test_the_view_is_drawn_while_training(framework, tmp_path):
    """Each framework's training draws the view several times; the last one has the last loss and the complete bar."""
    pytest.importorskip(framework)
    path = tmp_path / "run.json"
    args = ("train", "--live", "--framework", framework, "--devices", "2", "--epochs", "4", "--json", str(path))
    out = in_terminal(*args, TERM="xterm-256color", COLUMNS="90")
    found = json.loads(path.read_text())
    shown = LOSS.findall(out)
    assert len(shown) >= 2
    assert shown[-1] == (f"{found['losses'][-1]:.4f}", f"{found['losses'][0]:.4f}")
    assert f"step {found['steps']} of {found['steps']}, epoch 4 of 4" in out
    assert f"{framework} {found['framework_version']}, 2 replicas, auto" in out
    total, last = map(float, SHARE.findall(out)[-1])
    assert 0 < total < 100
    assert 0 < last < 100
    assert total == pytest.approx(
        100 * found["reduction_s"] / found["total_s"], abs=3
    )  # total_s also reads the results
    assert "replicas" in out.rpartition("steps/s")[2]  # the table of results follows


def piped(*args):
    ran = subprocess.run(
        [sys.executable, "-m", "crossreduce", "train", *args], capture_output=True, text=True, check=True, timeout=200
    )
    assert ran.stderr == ""
    return ran.stdout


def test_without_a_terminal_lines_are_printed(tmp_path):
    """In a pipe ``--live`` prints a line per epoch, with the mean loss of its samples; without it no line is."""
    path = tmp_path / "run.json"
    out = piped("--live", "--epochs", "3", "--devices", "2", "--json", str(path))
    lines = [line for line in out.splitlines() if line.startswith("epoch ")]
    losses = json.loads(path.read_text())["epoch_losses"]
    assert len(lines) == 3
    for k, (line, loss) in enumerate(zip(lines, losses, strict=True)):
        assert re.fullmatch(rf"epoch {k + 1}/3  loss {loss:.4f}  in reductions [\d.]+ %  [\d.]+ steps/s", line)
    assert "\x1b" not in out
    assert "╭" not in out
    assert "epoch" not in piped("--epochs", "2", "--devices", "2")


def test_losses_are_those_without_the_view(tmp_path):
    """The view does not change the training."""
    for name, options in (("plain", ()), ("live", ("--live",))):
        piped("--epochs", "2", "--devices", "3", "--json", str(tmp_path / name), *options)
    plain, shown = (json.loads((tmp_path / name).read_text()) for name in ("plain", "live"))
    assert plain["losses"] == shown["losses"]


def run_of(losses):
    return [TrainingStep(0, 64, loss, 0.25, 1.0) for loss in losses]


def text_of(view, width=60):
    from rich.console import Console

    console = Console(width=width + 4, record=True, file=io.StringIO())
    console.print(view.panel(width))
    return console.export_text().splitlines()


def test_the_view_has_two_charts():
    """The chart of the loss falls with the loss; that of the share has the height of the share; both fit the width."""
    view = View("title", 100, 5)
    assert "the first step is running" in text_of(view)[1]
    view.seen = [TrainingStep(k // 20, 64, 4.0 - k / 25, 0.5, 1.0) for k in range(100)]
    lines = text_of(view)
    assert {len(line) for line in lines} == {64}
    loss = [line[2:62] for line in lines[2 : 2 + ROWS]]
    assert [row.count("█") for row in loss] == sorted(row.count("█") for row in loss)
    assert loss[-1].startswith("█" * 30)
    assert loss[0][:2].strip()
    assert not loss[0][10:].strip()
    lower = [line[2:62] for line in lines[2 + ROWS :]]
    assert [row for row in lower if "█" in row] == ["█" * 60] * (ROWS // 2)  # half of the time is in reductions
    assert f"50.0 % of that of the last {LAST} steps" in " ".join(" ".join(lower).split())


def test_charts_accept_any_values():
    """Values that are not finite have no block, and charts of zeros and of nothing are empty."""
    assert chart([math.nan, 1.0, math.inf], highest([math.nan, 1.0, math.inf]), rows=1) == [" █ "]
    assert chart([0.0, 0.0], highest([0.0, 0.0]), rows=2) == ["  ", "  "]
    assert chart([], highest([]), rows=1) == [""]
    assert chart([4.0, 2.0], 4.0, "    #####", rows=2) == ["# ", "##"]
    assert share(run_of([1.0, 2.0])) == 0.25
    assert mean_loss([TrainingStep(0, 1, 1.0, 0.1, 1.0), TrainingStep(0, 3, 5.0, 0.1, 1.0)]) == 4.0


def test_lines_are_printed_when_an_epoch_is_complete(capsys):
    """Without a terminal the line of an epoch is printed with its last step or the first step of the next one."""
    with live_view("title", 3, 2) as watch:
        watch(TrainingStep(0, 64, 2.0, 0.5, 1.0))
        watch(TrainingStep(0, 64, 1.0, 0.5, 1.0))
        assert capsys.readouterr().out == ""
        watch(TrainingStep(1, 64, 0.5, 0.25, 1.0))
        assert capsys.readouterr().out.splitlines() == [
            "epoch 1/2  loss 1.5000  in reductions 50.0 %  1.0 steps/s",
            "epoch 2/2  loss 0.5000  in reductions 25.0 %  1.0 steps/s",
        ]
