"""``crossreduce train --live``: a view of the loss and the share of time in reductions."""

import io
import json
import math
import re
import sys

import pytest
from command_line import forked_command

from crossreduce.cli.train.view import LAST, ROWS, TrainingStep, View, chart, highest, live_view, mean_loss, share

LOSS = re.compile(r"loss ([\d.]+)  \(from ([\d.]+); 0 at the bottom\)")
SHARE = re.compile(r"in reductions ([\d.]+) % of the time, ([\d.]+) % of that of the last")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_the_view_is_drawn_while_training(tmp_path):
    """On a terminal ``train --live`` draws the view several times; the last one has the last loss and the complete
    bar. In a pipe it prints a line per epoch, with the mean loss of its samples. The losses are the same in both, and
    without ``--live``, which prints none of these."""
    args = ("train", "--epochs", "4", "--devices", "2", "--json")
    view = forked_command(*args, tmp_path / "view", "--live", terminal=("stdin", "stdout"), COLUMNS="90")
    lines = forked_command(*args, tmp_path / "lines", "--live")
    plain = forked_command(*args, tmp_path / "plain")
    assert [ran.code for ran in (view, lines, plain)] == [0, 0, 0]
    assert [ran.error for ran in (view, lines, plain)] == ["", "", ""]
    found, *others = (json.loads((tmp_path / name).read_text()) for name in ("view", "lines", "plain"))
    assert [each["losses"] for each in others] == [found["losses"]] * 2

    shown = LOSS.findall(view.shown)
    assert len(shown) >= 2
    assert shown[-1] == (f"{found['losses'][-1]:.4f}", f"{found['losses'][0]:.4f}")
    assert f"step {found['steps']} of {found['steps']}, epoch 4 of 4" in view.shown
    assert f"numpy {found['framework_version']}, 2 replicas, auto" in view.shown
    total, last = map(float, SHARE.findall(view.shown)[-1])
    assert 0 < total < 100
    assert 0 < last < 100
    # total_s also reads the results
    assert total == pytest.approx(100 * found["reduction_s"] / found["total_s"], abs=3)
    assert "replicas" in view.shown.rpartition("steps/s")[2]  # the table of results follows

    epochs = [line for line in lines.out.splitlines() if line.startswith("epoch ")]
    for k, (line, loss) in enumerate(zip(epochs, found["epoch_losses"], strict=True)):
        assert re.fullmatch(rf"epoch {k + 1}/4  loss {loss:.4f}  in reductions [\d.]+ %  [\d.]+ steps/s", line)
    assert "\x1b" not in lines.out
    assert "╭" not in lines.out
    assert "epoch" not in plain.out


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
