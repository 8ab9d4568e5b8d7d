"""The live view of ``crossreduce train --live``: loss and the share of time in reductions, drawn while training.

Input: each step's epoch, loss and seconds. Output: on a terminal a view that is redrawn; otherwise a line per epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..support.output import print_lines, terminal

ROWS: Final = 6  # the height of a chart
LAST: Final = 20  # the view has the share of reductions in all steps, and in this number of last ones
DRAWS_PER_S: Final = 8.0  # the view is drawn between two steps, at most this often
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_LETTERS: Final = "    #####"  # for terminals without these characters


class TrainingStep(NamedTuple):
    """A completed step of the training."""

    epoch: int  # the first is 0
    samples: int
    loss: float  # the mean over these samples, before the update
    reduction_s: float
    total_s: float


Watch = Callable[[TrainingStep], None]


class View:
    """The completed steps, and texts about them."""

    def __init__(self, title: str, steps: int, epochs: int, blocks: str = _BLOCKS) -> None:
        self.title, self.steps, self.epochs, self.blocks = title, steps, epochs, blocks
        self.seen: list[TrainingStep] = []

    def panel(self, width: int) -> Panel:
        """Return the view, with charts of ``width`` columns."""
        if not self.seen:
            return Panel(Text("the first step is running"), title=self.title, title_align="left", width=width + 4)
        last = self.seen[-1]
        shares = [share(part) for part in _split_evenly(self.seen, width)]
        losses = [mean_loss(part) for part in _split_evenly(self.seen, width)]
        bar = Table.grid(padding=(0, 1))
        count = f"step {len(self.seen):,} of {self.steps:,}, epoch {last.epoch + 1} of {self.epochs}"
        bar.add_row(ProgressBar(self.steps, len(self.seen), width=24), count)
        rate = len(self.seen) / math.fsum(step.total_s for step in self.seen)
        return Panel(
            Group(
                Text(f"loss {last.loss:.4f}  (from {self.seen[0].loss:.4f}; 0 at the bottom)", style="bold"),
                *(Text(line, style="green") for line in chart(losses, highest(losses), self.blocks)),
                Text(
                    f"in reductions {100 * share(self.seen):.1f} % of the time, {100 * share(self.seen[-LAST:]):.1f} % "
                    f"of that of the last {LAST} steps  (0 to 100 %)",
                    style="bold",
                ),
                *(Text(line, style="cyan") for line in chart(shares, 1.0, self.blocks)),
                bar,
                Text(f"{rate:.1f} steps/s"),
            ),
            title=self.title,
            title_align="left",
            width=width + 4,
        )

    def line(self, epoch: int) -> str:
        """Return a line about a completed epoch."""
        steps = [step for step in self.seen if step.epoch == epoch]
        return (
            f"epoch {epoch + 1}/{self.epochs}  loss {mean_loss(steps):.4f}  in reductions {100 * share(steps):.1f} %  "
            f"{len(steps) / math.fsum(step.total_s for step in steps):.1f} steps/s"
        )


def mean_loss(steps: Sequence[TrainingStep]) -> float:
    """Return the mean loss of the samples of some steps.

    >>> mean_loss([TrainingStep(0, 3, 1.0, 0.25, 1.0), TrainingStep(0, 1, 5.0, 0.5, 2.0)])
    2.0
    """
    return math.fsum(step.samples * step.loss for step in steps) / sum(step.samples for step in steps)


def share(steps: Sequence[TrainingStep]) -> float:
    """Return the share of the time of some steps that was spent in reductions.

    >>> share([TrainingStep(0, 64, 2.0, 0.25, 1.0), TrainingStep(0, 64, 1.0, 0.5, 2.0)])
    0.25
    """
    return math.fsum(step.reduction_s for step in steps) / math.fsum(step.total_s for step in steps)


def highest(values: Sequence[float]) -> float:
    """Return the greatest finite value, or 1 if no value is finite and positive."""
    return max((value for value in values if math.isfinite(value) and value > 0), default=1.0)


def chart(values: Sequence[float], top: float, blocks: str = _BLOCKS, rows: int = ROWS) -> list[str]:
    """Return the lines of a chart: a column of blocks per value, empty if it is not finite; full height is ``top``.

    >>> chart([0.0, 1.0, 2.0, 4.0], 4.0, rows=2)
    ['   █', ' ▄██']
    """
    eighths = [min(1.0, max(0.0, value / top)) * rows * 8 if math.isfinite(value) else 0.0 for value in values]
    return [
        "".join(blocks[round(min(8.0, max(0.0, height - 8 * row)))] for height in eighths)
        for row in reversed(range(rows))
    ]


def _split_evenly(steps: Sequence[TrainingStep], count: int) -> list[Sequence[TrainingStep]]:
    """Divide the steps into at most ``count`` parts of about equal length."""
    count = min(count, len(steps))
    ends = [len(steps) * k // count for k in range(count + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]


@contextmanager
def live_view(title: str, steps: int, epochs: int) -> Iterator[Watch]:
    """Yield the function to call after each step. On a terminal it draws the view; otherwise it prints each epoch.

    The thread that trains draws the view between two steps, so that drawing does not disturb measured reductions. The
    view stays on the terminal at the end.
    """
    screen = terminal(highlight=False)
    view = View(title, steps, epochs, _BLOCKS if screen.encoding.startswith("utf") else _LETTERS)
    if not (screen.is_terminal and not screen.is_dumb_terminal):

        def print_step(step: TrainingStep) -> None:
            if view.seen and view.seen[-1].epoch != step.epoch:
                print_lines([view.line(view.seen[-1].epoch)])
            view.seen.append(step)
            if len(view.seen) == steps:
                print_lines([view.line(step.epoch)])

        yield print_step
        return
    width, drawn_at = max(20, min(100, screen.width - 4)), -math.inf
    options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
    with Live(view.panel(width), console=screen, **options) as shown:

        def draw_step(step: TrainingStep) -> None:
            nonlocal drawn_at
            view.seen.append(step)
            now = time.monotonic()
            if now - drawn_at >= 1 / DRAWS_PER_S or len(view.seen) == steps:
                shown.update(view.panel(width), refresh=True)
                drawn_at = now

        yield draw_step
