"""Tables that fit the terminal: texts are folded between words or shortened, columns left out; numbers stay whole.

Input: columns as texts. Output: a table of rich whose widths are fixed, so that rich breaks no word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

_SPACES: Final = (1, 0)  # at each side of a cell, the wide ones first


class TableColumn(NamedTuple):
    """A column: its title, and its cells without control characters.

    ``fold``: where a text may be broken: at " " or ", ". ``shortest``: a text may be cut to this width, and then ends
    with an ellipsis; 0: never. Columns with neither are numbers or states, and are never changed.
    """

    title: str
    cells: Sequence[str]
    left: bool = False
    fold: str = ""
    shortest: int = 0

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
        """Return a cell, or the title, in lines of this width.

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
    """Return columns that fit: those with these titles are left out, in this order, until the others do.

    ``space``: at each side of a cell.
    """
    kept = list(columns)
    for title in titles:
        if not can_fit(kept, width, space):
            kept = [column for column in kept if column.title != title]
    return kept


def fitted_table(columns: Sequence[TableColumn], width: int, styles: Mapping[int, str] | None = None) -> Table:
    """Return a table that is at most ``width`` wide if its columns can be so narrow. ``styles``: of some rows.

    The first columns get the space that is left. If it is not enough otherwise, cells have no space at their sides.
    """
    space = next((space for space in _SPACES if can_fit(columns, width, space)), _SPACES[-1])
    table = Table(padding=(0, space), expand=False)
    spare = max(0, width - _frame(len(columns), space) - sum(column.least for column in columns))
    texts = []
    for column in columns:
        own = column.least + min(spare, column.widest - column.least)
        spare -= own - column.least
        title = column.lines(column.title, own, " ")
        table.add_column(Text(title), justify="left" if column.left else "right", width=own, no_wrap=True)
        texts.append([column.lines(cell, own) for cell in column.cells])
    for number, cells in enumerate(zip(*texts, strict=True)):
        table.add_row(*map(Text, cells), style=(styles or {}).get(number, ""))
    return table


def _frame(columns: int, space: int) -> int:
    return columns * (2 * space + 1) + 1


def _parts(text: str, fold: str) -> list[str]:
    """Return the parts of a text that stay whole, with the comma that ends them."""
    parts = text.split(fold)
    return [part + fold.rstrip() for part in parts[:-1]] + parts[-1:]
