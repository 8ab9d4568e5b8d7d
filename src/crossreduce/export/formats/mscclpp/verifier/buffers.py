"""The input and output of a collective in the memory of a symbolic run: input values, and faults of the output."""

from __future__ import annotations

from .....errors import ScheduleError
from ...proof import BUFFERS, Contributions, difference, quoted_name, right_result
from ..format import MscclppPlan
from ..layout import Area, PlanLayout
from .data_moves import Move
from .memory import Cell, Cells


class Buffers:
    """The cells of all GPUs. Only inputs of the ranks ``sources`` may be read. ``moves`` are all moves of the plan."""

    def __init__(self, plan: MscclppPlan, layout: PlanLayout, sources: range, moves: list[Move]) -> None:
        self.plan, self.layout, self.sources = plan, layout, sources
        self.name = f"plan {quoted_name(plan.name)}"
        self.kind, self.ranks = plan.collective, len(plan.gpus)
        part = min(layout.input, layout.output)
        self.part = part // self.ranks if self.kind == "alltoall" else part
        self.call = 0  # the number of the current call, from 1 on
        areas: dict[Area, tuple[int, ...]] = {}
        for rank in range(self.ranks):
            for name in (*self.user_areas, "s"):
                size = layout.size((rank, name))
                areas[rank, name] = (0, size) if name == "s" else tuple(range(0, size + 1, self.part))
        self.memory = Cells(self.name, moves, areas)

    @property
    def user_areas(self) -> tuple[str, ...]:
        """The names of the areas that belong to the user."""
        return ("io",) if self.plan.inplace else ("i", "o")

    def input_value(self, cell: Cell) -> Contributions | None:
        """Return the value of a cell of the user's areas when a call begins, or ``None`` if it must not be read.

        The value is the rank's own contribution at the cell's position in the full buffer of the collective.
        """
        rank, name = cell.area
        once = 1 << rank
        if rank not in self.sources or name == "o":
            return None
        if self.kind != "allgather":
            return Contributions(cell.start, once)
        if not self.plan.inplace:  # the input is the rank's part of the full buffer
            return Contributions(rank * self.part + cell.start, once)
        # In place the area is the full buffer, of which only the rank's part has input.
        return Contributions(cell.start, once) if cell.start // self.part == rank else None

    def output(self, rank: int) -> list[Cell]:
        """Return the cells of a rank's output."""
        start = rank * self.part if self.plan.inplace and self.kind == "reducescatter" else 0
        return self.memory.cells_between((rank, self.user_areas[-1]), start, start + self.layout.output)

    def output_fault(self, cell: Cell) -> str | None:
        """Return the fault of a cell of an output at the end of a call, in words, or ``None`` if it is right."""
        rank = cell.area[0]
        offset = cell.start - (rank * self.part if self.plan.inplace and self.kind == "reducescatter" else 0)
        due = right_result(self.kind, rank, offset, self.part, self.ranks, self.sources[0])
        fault = "contains packets" if cell.packets and cell.value is not None else difference(cell.value, due, "byte")
        if fault is None:
            return None
        by = f"{cell.writer.text}: " if cell.writer is not None and cell.writer.block >= 0 else f"gpu {rank}: "
        return f"{self.name}, {by}at the end {self.describe(cell)} {fault}."

    def describe(self, cell: Cell) -> str:
        """Return the place of a cell in words."""
        rank, name = cell.area
        larger = "output" if self.kind == "allgather" else "input"
        buffer = f"{larger} buffer (in place)" if name == "io" else f"{BUFFERS[name]} buffer"
        where = f"bytes {cell.start} to {cell.start + cell.size - 1} of the {buffer} of gpu {rank}"
        return f"{where} (call {self.call}, messages of {self.layout.nbytes} bytes)"

    def late_access(self, text: str, does: str, cell: Cell) -> ScheduleError:
        """Return an error about an access that may happen after its call has ended."""
        rank = cell.area[0]
        problem = f"{does} {self.describe(cell)}, and nothing ensures that it does so before gpu {rank} ends the call"
        return ScheduleError(f"{self.name}, {text}: a race. It {problem}.")
