"""Tables that fit the terminal: texts are folded between words or shortened, columns are left out, numbers stay whole.

Input: columns as texts. Output: a rich table with fixed widths, so that rich does not break words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

_SPACES: Final = (1, 0)  # the spaces at each side of a cell that are tried, in this order


class TableColumn(NamedTuple):
    """A column. Cells of columns without ``fold`` and ``shortest``, such as numbers and states, are never changed."""

    title: str
    cells: Sequence[str]  # without control characters
    left: bool = False  # whether cells are aligned left
    fold: str = ""  # the separator at which a text may be broken: " " or ", "
    shortest: int = 0  # the width to which a text may be cut, with an ellipsis at its end; 0: it is never cut

    @property
    def widest(self) -> int:
        """The width without any change."""
        return max(map(cell_len, (self.title, *self.cells)))

    @property
    def least(self) -> int:
        """The smallest width."""
        cells = [part for cell in self.cells for part in (_parts(cell, self.fold) if self.fold else [cell])]
        widths = [*map(cell_len, self.title.split(" ")), *map(cell_len, cells)]
        return min(max(widths), max(self.shortest, cell_len(self.title))) if self.shortest else max(widths)

    def lines(self, text: str, width: int, fold: str | None = None) -> str:
        """Return a cell or the title, broken or cut to lines of this width.

        >>> print(TableColumn("", ()).lines("rank 1 90 %, rank 0 10 %", 14, ", "))
        rank 1 90 %,
        rank 0 10 %
        >>> TableColumn("", (), shortest=16).lines("broadcast root 0 float32[100000]", 29)
        'broadcast root 0 float32[…'
        """
        if self.shortest and cell_len(text) > width:
            cut = set_cell_size(text, width - 1)
            return (cut.rstrip("0123456789") if text[len(cut)].isdigit() else cut) + "…"
        lines: list[str] = []
        fold = self.fold if fold is None else fold
        for part in _parts(text, fold) if fold else [text]:
            if lines and cell_len(f"{lines[-1]} {part}") <= width:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
        return "\n".join(lines)


def can_fit(columns: Sequence[TableColumn], width: int, space: int = 1) -> bool:
    """Return whether a table of these columns can be as narrow as ``width``."""
    return sum(column.least for column in columns) + _frame(len(columns), space) <= width


def columns_that_fit(
    columns: Sequence[TableColumn], titles: Sequence[str], width: int, space: int = 1
) -> list[TableColumn]:
    """Return columns that fit: those with the ``titles`` are left out, in this order, until the remaining ones fit.

    ``space`` is the number of spaces at each side of a cell.
    """
    kept = list(columns)
    for title in titles:
        if not can_fit(kept, width, space):
            kept = [column for column in kept if column.title != title]
    return kept


def fitted_table(columns: Sequence[TableColumn], width: int, styles: Mapping[int, str] | None = None) -> Table:
    """Return a table that is at most ``width`` wide, if its columns can be so narrow.

    The first columns get the remaining width. If the columns do not fit otherwise, cells have no spaces at their sides.
    ``styles`` has the styles of some rows, by number.
    """
    space = next((space for space in _SPACES if can_fit(columns, width, space)), _SPACES[-1])
    table = Table(padding=(0, space), expand=False)
    remaining = max(0, width - _frame(len(columns), space) - sum(column.least for column in columns))
    texts = []
    for column in columns:
        column_width = column.least + min(remaining, column.widest - column.least)
        remaining -= column_width - column.least
        title = column.lines(column.title, column_width, " ")
        table.add_column(Text(title), justify="left" if column.left else "right", width=column_width, no_wrap=True)
        texts.append([column.lines(cell, column_width) for cell in column.cells])
    for number, cells in enumerate(zip(*texts, strict=True)):
        table.add_row(*map(Text, cells), style=(styles or {}).get(number, ""))
    return table


def _frame(columns: int, space: int) -> int:
    """Return the width of all lines and spaces between cells."""
    return columns * (2 * space + 1) + 1


def _parts(text: str, fold: str) -> list[str]:
    """Return the parts of a text that must not be broken; a comma stays at the end of its part."""
    parts = text.split(fold)
    return [part + fold.rstrip() for part in parts[:-1]] + parts[-1:]
