"""The table in a text of ``nvidia-smi topo -m``: its columns, and the connection code of every two of its members.

Input: the text, also as terminals, web pages and editors change it. Output: a ``Table``, or an error with the line.

A header begins with ``GPU0``; a prompt may stand before it. Escape codes of colours (also without the escape
character), the bars of a Markdown table, the marks of quoted mail, and names of hosts or times at the start of lines,
as in logs, are removed. If tabs were lost, names and codes are joined: ``NIC1NIC2``, ``NODENODE``. They are divided if
exactly one division has a code for each column and agrees with the other rows.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, NoReturn

from ...errors import ArgumentError, shown

LONGEST: Final = 1 << 18  # characters; a table of 72 GPUs and 72 NICs has 170,000
GPU: Final = re.compile(r"GPU[0-9]{1,4}")

# What is not part of a table: colours, whose escape character web pages drop or write as ^[ or \\033; characters
# without a width; and Markdown's marks of bold and of escapes.
_MARKS: Final = re.compile(
    r"(?:\x1b|\^\[|\u241b|\\(?:033|x1b|e))(?:\[[0-9;]*[A-Za-z]|\(B)|\[[0-9;]+m|[\u200b-\u200d\u2060\ufeff*`\\]"
)
_NAME: Final = re.compile(r"[A-Za-z][\w-]*[0-9][\w-]*")  # the name of a GPU or NIC: mlx5_0, NIC0, ibp12s0, roce-0
_JOINED: Final = re.compile(r"GPU[0-9]{1,4}|NIC[0-9]{1,4}|MIG[0-9]{1,4}|mlx[0-9]_(?:bond_)?[0-9]{1,3}")
# What follows the names in a header: CPU Affinity, NUMA Affinity, GPU NUMA ID.
_AFFINITY: Final = re.compile(r"CPU\s*Affinity|NUMA|GPU\s*NUMA")
_CODE: Final = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A")  # SOC is what SYS was called until 2017
_CODES: Final = re.compile(rf"(?:{_CODE.pattern})+")
_ROW: Final = re.compile(
    rf"((?:{_JOINED.pattern})(?=\s*(?:{_CODE.pattern}))|(?!NV[0-9]){_NAME.pattern}(?=\s+(?:{_CODE.pattern})))"
)
# What launchers and logs write at the start of a line of a table: "host1: ", "[1,0]<stdout>:", "[pod/a/b] ", a time,
# "host1 bash[123]: ", "worker-1  | ", or the number of the line.
_LOG: Final = re.compile(
    r"(?:\[[^][]{1,80}\](?:<std(?:out|err)>:?)?\s*|(?:[\w.-]{1,80} )?[\w.-]{1,80}(?:\[[0-9]{1,9}\])?: \s*"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.,+-]+Z?\s+|[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} |[0-9]{1,6}[:\s]\s*"
    r"|(?!GPU[0-9])[\w.-]{1,80}\s{3,}){1,4}"
    rf"(?=GPU[0-9]|[A-Za-z][\w-]*\s+(?:{_CODE.pattern})\b)"
)
_ONLY_PCIE: Final = re.compile(r"topo\s+(?:-mp|--matrix_pci)\b")
_PROMPT: Final = re.compile(r"nvidia-smi(?:\.exe)?\s+topo\s+(?:-m|--matrix)\s*$")
_ACCESS: Final = {"X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}  # the entries of nvidia-smi topo -p2p
_SHOW: Final = "the complete output of nvidia-smi topo -m, from the line with GPU0"

_Reading = tuple[tuple[str, ...], str]  # the codes of a row, and what follows them


class TableRow(NamedTuple):
    """A row of the table."""

    line: int  # in the text, for errors
    cells: dict[str, str]  # by column
    cores: str  # the CPU affinity, or ""


class Table(NamedTuple):
    """The names of the columns (GPUs and NICs), and the rows by name. Every GPU has a row."""

    names: list[str]
    rows: dict[str, TableRow]


def read_table(text: str) -> Table:
    """Return the table in a text.

    Raises:
      ArgumentError: the text has no table or several; a row has more or fewer codes than there are columns, or can be
        read in several ways; two rows contradict each other.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        given = shown(text) if not isinstance(text, str) else f"{len(text)} characters"
        raise ArgumentError.of(f"the table must be text of at most {LONGEST} characters.", given, _SHOW)
    lines = clean_lines(text)
    if not any(map(_header, lines)):
        lines = [without_log_prefix(line) for line in lines]
    headers = {k: names for k, line in enumerate(lines) if (names := _header(line))}
    starts = [k for k in headers if not _is_access(lines, k, headers)]
    if not starts:
        if headers:
            problem = "nvidia-smi topo -p2p states which GPUs can access each other, not how they are joined."
            raise ArgumentError.of(problem, f"line {min(headers) + 1}: {lines[min(headers)][:160]}", _SHOW)
        for k, line in enumerate(lines):
            if re.search(rf"(?<!\w)GPU ?0\W+(?:GPU ?1|{_CODE.pattern})(?!\w)", line):
                problem = "this line is not the header of a table: GPU0, the other GPUs, cards, and then CPU Affinity."
                _refuse(k, lines, problem)
        raise ArgumentError.of("this text does not contain a table of GPUs.", shown(text), _SHOW)
    if len(starts) > 1 and not {*headers[starts[0]]} & {*headers[starts[1]]}:
        _refuse(starts[1], lines, "the lines of the table are wrapped.")
    if len(starts) > 1:
        _refuse(starts[1], lines, "the text has a second table.", "one file for each machine")
    start = starts[0]
    for k in range(start):
        if _ONLY_PCIE.search(lines[k]):
            _refuse(k, lines, "nvidia-smi topo -mp shows only PCIe, and no NVLinks.", "nvidia-smi topo -m")
    names = headers[start]
    if len(set(names)) < len(names):
        _refuse(start, lines, "a column appears twice in the table.")
    end = min([k for k in headers if k > start], default=len(lines))
    rows = _rows(names, lines, start, end)
    for name in names:
        if GPU.fullmatch(name) and name not in rows:
            _refuse(start, lines, f"the table does not have a row of {name}.")
    _check(rows, lines)
    # Parts of GPUs have no links of their own, and Data Direct (DD) is a second PCIe function of a card.
    whole = [name for name in names if not re.match(r"MIG|DD[0-9]", name)]
    return Table(whole, {name: row for name, row in rows.items() if name in whole})


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text without colours, and without the marks of Markdown, mail, diffs and comments."""
    return [re.sub("[|│┃║]", " ", _MARKS.sub("", line)).strip(" \t>#+-•") for line in text.splitlines()]


def without_log_prefix(line: str) -> str:
    """Return a line of a table without what a log has before it.

    >>> without_log_prefix("host1: GPU0 X NV4"), without_log_prefix("NIC0: mlx5_0")
    ('GPU0 X NV4', 'NIC0: mlx5_0')
    """
    match = _LOG.match(line)
    return line[match.end() :] if match else line


def _header(line: str) -> list[str] | None:
    """Return the names of the columns if the line is a header, else ``None``."""
    start = re.search(r"(?<!\w)GPU[0-9]", line)
    if start is None or (line[: start.start()].strip() and not _PROMPT.search(line[: start.start()])):
        return None
    text = line[start.start() :]
    cut = _AFFINITY.search(text)
    names: list[str] = []
    for word in (text[: cut.start()] if cut else text).split():
        parts = _JOINED.findall(word)
        if len(parts) > 1 and "".join(parts) == word:
            names += parts
        elif len(parts) <= 1 and _NAME.fullmatch(word) and not _CODES.fullmatch(word):
            names.append(word)
        else:
            return None
    return names if names and GPU.fullmatch(names[0]) else None


def _is_access(lines: list[str], start: int, headers: dict[int, list[str]]) -> bool:
    """Return whether the first row below a header is one of ``nvidia-smi topo -p2p``."""
    for k in range(start + 1, len(lines)):
        if k in headers:
            return False
        words = lines[k].split()
        if words and words[0] in headers[start]:
            return len(words) > 2 and set(words[1:]) <= _ACCESS
    return False


def _rows(names: list[str], lines: list[str], start: int, end: int) -> dict[str, TableRow]:
    """Return the rows by name. A row that can be read in several ways is compared with the others."""
    first = re.compile("|".join(f"{re.escape(name)}(?![0-9])" for name in sorted(names, key=len, reverse=True)))
    numbers: dict[str, int] = {}
    read: dict[str, list[_Reading]] = {}
    for k in range(start + 1, end):
        if "Legend:" in lines[k]:
            break
        match = first.match(lines[k])
        if match is None:
            if (other := _ROW.match(lines[k])) is not None:
                _refuse(k, lines, f"the table does not have a column of {other[1]}: its lines are cut or wrapped.")
            continue
        name, rest = match[0], lines[k][match.end() :]
        if rest.startswith(":"):  # NIC0: mlx5_0, in the legend
            continue
        if name in read:
            _refuse(k, lines, f"the table has a second row of {name}.")
        found = _readings(rest, len(names))
        if not found:
            column = next(each for count, each in enumerate(names, 1) if not _readings(rest, count))
            problem = f"the row of {name} must have X, NV#, PIX, PXB, PHB, NODE or SYS for each of {len(names)} columns"
            _refuse(k, lines, f"{problem}, but has none for {column}.")
        if all(_CODES.match(tail) and not tail.startswith("N/A") for _, tail in found):
            _refuse(k, lines, f"the row of {name} has more entries than the {len(names)} columns of the table.")
        numbers[name], read[name] = k, found
    rows: dict[str, TableRow] = {}
    for name, found in read.items():
        agreeing = [each for each in found if len(found) == 1 or _agrees(name, each, names, read)]
        if len(agreeing) != 1:
            _refuse(
                numbers[name], lines, f"the row of {name} can be read in {len(found)} ways.", "the text with its tabs"
            )
        codes, tail = agreeing[0]
        cores = tail.split()[0] if re.match("[0-9]", tail) else ""
        rows[name] = TableRow(numbers[name], dict(zip(names, codes, strict=True)), cores)
    return rows


def _readings(text: str, count: int) -> list[_Reading]:
    """Return the ways to read ``count`` codes at the start of a text, each with the rest of the text.

    A code ends at a blank if it can: only joined codes are divided.
    """
    states: list[tuple[int, tuple[str, ...]]] = [(0, ())]
    for _ in range(count):
        longer: list[tuple[int, tuple[str, ...]]] = []
        for at, codes in states:
            begin = at + len(text[at:]) - len(text[at:].lstrip())
            ends = [end for end in range(begin + 1, min(begin + 6, len(text)) + 1) if _CODE.fullmatch(text, begin, end)]
            ends = [end for end in ends if not text[end : end + 1].strip()] or ends
            longer += [(end, (*codes, text[begin:end])) for end in ends]
        states = longer
    return [(codes, text[at:].strip()) for at, codes in states]


def _agrees(name: str, reading: _Reading, names: list[str], read: dict[str, list[_Reading]]) -> bool:
    """Return whether a reading has the codes that the rows with only one reading have for the same pairs."""
    position = names.index(name)
    others = [(k, read[other][0][0]) for k, other in enumerate(names) if len(read.get(other, ())) == 1]
    return all(reading[0][k] == codes[position] for k, codes in others)


def _check(rows: dict[str, TableRow], lines: list[str]) -> None:
    """Refuse rows that contradict each other, and two GPUs for which the table states no connection."""
    for a, row in rows.items():
        for b, cell in row.cells.items():
            other = rows[b].cells[a] if b in rows else cell  # network cards may have no rows
            if other != cell:
                problem = f"the entries of {a} and {b} differ: {cell} and, in the row of {b}, {other}."
                _refuse(row.line, lines, problem)
            if (cell == "X") != (a == b):
                _refuse(row.line, lines, f"the entry of {a} and {b} must {'be' if a == b else 'not be'} X.")
            if cell == "N/A" and GPU.fullmatch(a) and GPU.fullmatch(b):
                _refuse(row.line, lines, f"the table does not state how {a} and {b} are joined (N/A).")


def _refuse(line: int, lines: list[str], problem: str, remedy: str = _SHOW) -> NoReturn:
    raise ArgumentError.of(problem, f"line {line + 1}: {' '.join(lines[line].split())[:160]}", remedy)
