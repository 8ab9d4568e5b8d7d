"""``crossreduce train --live``: a view of the loss and the share of time in reductions."""

import io
import json
import re
import sys

import pytest
from command_line import forked_command
from rich.console import Console

from crossreduce.cli.train.view import LAST, ROWS, TrainingStep, View, live_view


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_the_view_is_drawn_while_training(tmp_path):
    """On a terminal ``train --live`` draws the view several times; the last view has the last loss and the complete
    bar. In a pipe it prints a line per epoch, with the mean loss of its samples. Without ``--live`` there is neither.
    The losses are the same in all three cases."""
    ran, reports = {}, {}
    for name, options in (("view", {"terminal": ("stdin", "stdout")}), ("lines", {}), ("plain", {})):
        line = ["train", "--epochs", 4, "--devices", 2, "--output", tmp_path / name, *(["--live"] * (name != "plain"))]
        ran[name] = forked_command(*line, COLUMNS="90", **options)
        assert (ran[name].code, ran[name].error) == (0, "")
        reports[name] = json.loads((tmp_path / name).read_text())
    found, view = reports["view"], ran["view"].shown
    assert reports["lines"]["losses"] == reports["plain"]["losses"] == found["losses"]
    shown = re.findall(r"loss ([\d.]+)  \(from ([\d.]+); 0 at the bottom\)", view)
    assert len(shown) >= 2
    assert shown[-1] == (f"{found['losses'][-1]:.4f}", f"{found['losses'][0]:.4f}")
    assert f"step {found['steps']} of {found['steps']}, epoch 4 of 4" in view
    assert f"numpy {found['framework_version']}, 2 replicas, auto" in view
    shares = re.findall(r"in reductions ([\d.]+) % of the time, ([\d.]+) % of that of the last", view)
    total, last = map(float, shares[-1])
    assert 0 < last < 100
    # Unlike the steps in the view, total_s includes the time to read the results.
    assert 0 < total == pytest.approx(100 * found["reduction_s"] / found["total_s"], abs=3)
    assert "replicas" in view.rpartition("steps/s")[2]  # the table of results follows
    epochs = [line for line in ran["lines"].out.splitlines() if line.startswith("epoch ")]
    for k, (line, loss) in enumerate(zip(epochs, found["epoch_losses"], strict=True)):
        assert re.fullmatch(rf"epoch {k + 1}/4  loss {loss:.4f}  in reductions [\d.]+ %  [\d.]+ steps/s", line)
    assert not {"\x1b", "╭"} & set(ran["lines"].out)
    assert "epoch" not in ran["plain"].out


def test_the_view_has_two_charts():
    """The columns of the first chart fall with the loss. Those of the second one have the height of the share."""
    view = View("title", 100, 5)
    view.seen = [TrainingStep(k // 20, 64, 4.0 - k / 25, 0.5, 1.0) for k in range(100)]
    console = Console(width=64, record=True, file=io.StringIO())
    console.print(view.panel(60))
    lines = [line[2:62] for line in console.export_text().splitlines()]
    loss, share = lines[2 : 2 + ROWS], lines[2 + ROWS :]
    assert [row.count("█") for row in loss] == sorted(row.count("█") for row in loss)
    assert loss[-1].startswith("█" * 30)
    assert not loss[0][10:].strip()
    assert [row for row in share if "█" in row] == ["█" * 60] * (ROWS // 2)  # half of the time is in reductions
    assert f"50.0 % of that of the last {LAST} steps" in " ".join(" ".join(share).split())


def test_lines_are_printed_when_an_epoch_is_complete(capsys):
    """Without a terminal, the mean loss of an epoch is printed at the first step of the next epoch, or at the end."""
    with live_view("title", 3, 2) as watch:
        watch(TrainingStep(0, 64, 2.0, 0.5, 1.0))
        watch(TrainingStep(0, 192, 1.0, 0.5, 1.0))
        assert capsys.readouterr().out == ""
        watch(TrainingStep(1, 64, 0.5, 0.25, 1.0))
        assert capsys.readouterr().out.splitlines() == [
            "epoch 1/2  loss 1.2500  in reductions 50.0 %  1.0 steps/s",
            "epoch 2/2  loss 0.5000  in reductions 25.0 %  1.0 steps/s",
        ]
