"""Tables that fit the terminal. Long texts are wrapped or cut, and columns are left out; numbers are never changed.

Input: columns of texts. Output: a rich table with fixed widths, so that rich does not break words.
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
    fold: str = ""  # the separator at which a text may be wrapped: " " or ", "
    shortest: int = 0  # the least width to which a text may be cut, an ellipsis included; 0 if texts are never cut

    @property
    def widest(self) -> int:
        """The width at which no text is wrapped or cut."""
        return max(map(cell_len, (self.title, *self.cells)))

    @property
    def least(self) -> int:
        """The smallest width to which texts may be wrapped or cut."""
        cells = [part for cell in self.cells for part in (_unbreakable(cell, self.fold) if self.fold else [cell])]
        widths = [*map(cell_len, self.title.split(" ")), *map(cell_len, cells)]
        return min(max(widths), max(self.shortest, cell_len(self.title))) if self.shortest else max(widths)

    def lines(self, text: str, width: int, fold: str | None = None) -> str:
        """Return a cell or the title, cut to this width or wrapped into lines of it at ``fold``.

        >>> print(TableColumn("", ()).lines("rank 1 90 %, rank 0 10 %", 14, ", "))
        rank 1 90 %,
        rank 0 10 %
        >>> TableColumn("", (), shortest=16).lines("broadcast root 0 float32[100000]", 29)
        'broadcast root 0 float32[…'
        """
        if self.shortest and cell_len(text) > width:
            cut = set_cell_size(text, width - 1)  # a number is left out rather than cut
            return (cut.rstrip("0123456789") if text[len(cut)].isdigit() else cut) + "…"
        lines: list[str] = []
        fold = self.fold if fold is None else fold
        for part in _unbreakable(text, fold) if fold else [text]:
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
    """Leave out columns with the ``titles``, one by one, until the table fits into ``width``, and return the others.

    ``space`` is the number of spaces at each side of a cell.
    """
    kept = list(columns)
    for title in titles:
        if not can_fit(kept, width, space):
            kept = [column for column in kept if column.title != title]
    return kept


def fitted_table(columns: Sequence[TableColumn], width: int, styles: Mapping[int, str] | None = None) -> Table:
    """Return a table that is at most ``width`` wide, if its columns can be so narrow.

    Width beyond the least widths goes to the first columns. Cells have no spaces at their sides if the table does not
    fit with them. ``styles``: rich's styles of some rows, by the number of the row.
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
    """Return the total width of the vertical lines and of the spaces beside cells."""
    return columns * (2 * space + 1) + 1


def _unbreakable(text: str, fold: str) -> list[str]:
    """Split a text at ``fold`` into parts that must not be broken. A comma stays at the end of its part."""
    parts = text.split(fold)
    return [part + fold.rstrip() for part in parts[:-1]] + parts[-1:]
