"""Output of the commands: files that are replaced atomically, rates in JSON, and the terminal.

A file is replaced by one ``rename``, so a reader never sees a part of it, even if the command is interrupted. Errors
about a file name the option ``option`` that gave its path.
"""

from __future__ import annotations

import io
import json
import math
import os
import pydoc
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ... import Bound
from ...errors import ArgumentError, BackendError, printable
from ...export.files import real_path, replacing
from ...planning.optimal.bounds.tight_cuts import heaviest_cuts, limited_by
from ...progress import watched

PROGRESS_FD: Final = "CROSSREDUCE_PROGRESS_FD"
"""An environment variable: the file descriptor of the terminal on which a child process draws its progress bars."""
LINE_S: Final = 15.0  # from one line of progress to the next one, without a terminal
INVOKED: Final[ContextVar[str]] = ContextVar("INVOKED", default="crossreduce")
"""The command line of the running command."""
_NUMBERED: Final = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})")  # any text, then a number without leading zeros


@contextmanager
def atomic_file(option: str, path: str | Path | None) -> Iterator[Path | None]:
    """Check that a file can be written, and yield an empty temporary file, a copy of which replaces it at the end.

    The temporary file has the same suffix. Other users cannot reach it. If the block fails, or writes nothing into it,
    the target is not changed. If ``path`` is ``None``, this yields ``None``.
    """
    if path is None:
        yield None
        return
    target = _real_path(option, path)
    if not target.parent.is_dir():
        raise ArgumentError(f"{option} {path} cannot be written: there is no folder {target.parent}.")
    # A rename would replace even a write-protected file, and would put a regular file in place of /dev/null or a pipe.
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        reason = "write-protected" if target.is_file() else "not a regular file"
        raise ArgumentError(f"{option} {path} cannot be written: it is {reason}.")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(replacing(target))
        except OSError as error:
            raise ArgumentError(f"{option} {path} cannot be written: {error.strerror}.") from error
        made = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossreduce-"))) / f"made{Path(path).suffix}"
        )
        made.touch()
        yield made
        with made.open("rb") as written:
            shutil.copyfileobj(written, file)


def _real_path(option: str, path: str | Path) -> Path:
    try:
        return real_path(path)
    except OSError as error:
        raise ArgumentError(f"{option} {path} cannot be written: {error.strerror}.") from error


def check_folder(option: str, path: Path) -> None:
    """Raise an ArgumentError if this folder is write-protected, or neither exists nor can be created."""
    if path.is_dir():
        problem = None if os.access(path, os.W_OK | os.X_OK) else "it is write-protected"
    elif path.exists():
        problem = "it is not a folder, and this format consists of several files"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    else:
        problem = None if os.access(path.parent, os.W_OK | os.X_OK) else f"{path.parent} is write-protected"
    if problem:
        raise ArgumentError(f"{option} {path} cannot be written: {problem}.")


def write_folder(option: str, path: Path, files: dict[str, bytes]) -> None:
    """Write files into a folder, which is created if necessary. Each atomically replaces a file of the same name."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        with atomic_file(option, path / name) as file:
            assert file is not None
            file.write_bytes(content)


@contextmanager
def json_report(path: str | Path | None, printed: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Check that the file of ``--output`` can be written, and yield a function that writes a report into it as JSON.

    Without a path no file is written. If ``printed``, as with ``--json``, standard output gets only the report.
    """
    texts: list[str] = []
    with ExitStack() as stack:
        file = stack.enter_context(atomic_file("--output", path))

        def write(report: dict[str, Any]) -> None:
            texts.append(json.dumps(report, indent=2) + "\n")
            if file is not None:
                file.write_text(texts[-1], "utf-8")

        if printed:
            stack.enter_context(redirect_stdout(io.StringIO()))
        yield write
    if printed:
        print(*texts, sep="", end="", flush=True)


def check_new_folder(option: str, path: Path) -> Path:
    """Return the real path of a folder. Raise an ArgumentError if it is not empty, or cannot be created or written."""
    target = _real_path(option, path)
    problem = None
    if not target.parent.is_dir():
        problem = f"there is no folder {target.parent}"
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "it exists and is not an empty folder"
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        problem = f"the folder {target.parent} is write-protected"
    elif target.exists() and not os.access(target, os.W_OK | os.X_OK):
        problem = "it is write-protected"
    if problem:
        raise ArgumentError(f"{option} {path} cannot be written: {problem}.")
    return target


def write_new_folder(option: str, path: Path, files: dict[str, str]) -> None:
    """Write texts, by relative path, into the files of a new or empty folder. After an error, none of them is left."""
    target = check_new_folder(option, path)
    moved: list[Path] = []
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            new_folder = Path(temporary) / "made"
            for name, text in files.items():
                (new_folder / name).parent.mkdir(parents=True, exist_ok=True)
                (new_folder / name).write_text(text, "utf-8")
            if not target.exists():
                new_folder.replace(target)
                return
            for entry in sorted(new_folder.iterdir()):  # an existing folder stays: a shell may have changed into it
                moved.append(target / entry.name)
                entry.replace(moved[-1])
    except (OSError, UnicodeEncodeError) as error:
        for entry in moved:  # folders, or files
            shutil.rmtree(entry, ignore_errors=True)
            entry.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else "a text has a character that UTF-8 cannot encode"
        raise ArgumentError(f"{option} {path} cannot be written: {reason}.") from error


def rate_json(value: Fraction | None) -> dict[str, Any] | None:
    """Return a rate for JSON: the exact fraction as text, and the nearest float.

    >>> rate_json(Fraction(64, 3))
    {'exact': '64/3', 'gb_per_s': 21.333333333333332}
    """
    return None if value is None else {"exact": str(value), "gb_per_s": float(value)}


def bound_json(limit: Bound) -> dict[str, Any]:
    """Return a bound as a dict for JSON."""
    nodes = next((cut.nodes for cut in heaviest_cuts(limit)), frozenset())
    return {
        "algbw": rate_json(limit.algbw),
        "limited_by": "nothing has to move" if limit.algbw is None else limited_by(limit),
        "tight_cut": [node for node in limit.topology.nodes if node in nodes],
    }


class Bar:
    """A progress bar on standard error, which is drawn only on a terminal. A call advances it by one step.

    With ``lines``, a step prints a line if there is no terminal, at most every ``LINE_S`` seconds.
    """

    def __init__(self, progress: Progress, description: str, total: int, *, lines: bool = False) -> None:
        self._progress = progress
        self._done, self._total = 0, total
        self._next_line = time.monotonic() + LINE_S if lines and progress.disable else math.inf
        self._task = progress.add_task(description, total=total)
        self._detail = progress.add_task("", total=1, visible=False)
        self._last_detail = ""

    def __call__(self, text: str) -> None:
        """Advance the bar by one step, and change its text."""
        self._progress.update(self._task, advance=1, description=text)
        self._progress.update(self._detail, visible=False)
        self._progress.refresh()
        self._done += 1
        if time.monotonic() >= self._next_line:
            print(f"crossreduce: {self._done} of {self._total}: {text}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + LINE_S

    def detail(self, text: str, done: int, total: int) -> None:
        """Show the progress within one step in a second line, until ``done`` reaches ``total``."""
        self._progress.update(self._detail, description=text, completed=done, total=total, visible=done < total)
        if text != self._last_detail and self._progress.live.auto_refresh:  # also shows work that ends at once
            self._progress.refresh()
        self._last_detail = text

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Remove the bar during the block, so that the block can print lines."""
        if self._progress.disable:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


@contextmanager
def progress(description: str, total: int, *, quiet: bool = False, lines: bool = False) -> Iterator[Bar]:
    """Show a progress bar on a terminal only, or with ``lines`` a line from time to time elsewhere, and yield it.

    Long computations of the package show their steps in a second line; see ``progress.py``. With ``quiet`` the bar is
    drawn only when it advances, and by no other thread, so that it does not disturb a measurement.
    """
    with ExitStack() as stack:
        console = Console(stderr=True)
        descriptor = os.environ.get(PROGRESS_FD)
        if descriptor is not None and re.fullmatch("[0-9]{1,9}", descriptor) and not console.is_terminal:
            with suppress(OSError, OverflowError, TypeError, ValueError):  # the descriptor is not open
                stream = stack.enter_context(os.fdopen(int(descriptor), "w", encoding="utf-8", closefd=False))
                console = Console(file=stream)
        shown = Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            auto_refresh=not quiet,
            redirect_stdout=False,  # rich would send the output to standard error
            redirect_stderr=False,
        )
        bar = Bar(shown, description, total, lines=lines)
        with shown:
            shown.refresh()
            if console.is_terminal:
                stack.enter_context(watched(bar.detail))
            yield bar


def print_lines(lines: Iterable[str]) -> None:
    """Print lines and flush, so that a reader of a pipe sees them at once."""
    print("\n".join(lines), flush=True)


def print_files(*paths: Path | None, use: str = "open it in a browser") -> None:
    """Print a line for each file that was written, with what to do with it."""
    for path in paths:
        if path is not None:
            print_lines([f"{printable(str(path))}: {use}"])


def terminal(**options: Any) -> Console:
    """Return a console for tables, as wide as the terminal or COLUMNS.

    On terminals without capabilities (TERM=dumb) rich ignores COLUMNS unless a height is given.
    """
    return Console(height=25, **options)


def text_width() -> int | None:
    """Return the width of the terminal, or COLUMNS; ``None`` if texts need not fit: they go to a file or a pipe."""
    if not os.environ.get("COLUMNS") and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def short_size(nbytes: int) -> str:
    """Return a number of bytes as text, rounded to about three digits. (``planning.explain.size`` does not round.)

    >>> short_size(32), short_size(5_600_008), short_size(1 << 20), short_size(1_047_000)
    ('32 bytes', '5.34 MiB', '1 MiB', '1022 KiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            value = nbytes / (1 << power)
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes} byte" if nbytes == 1 else f"{nbytes} bytes"


def print_paged(text: str) -> None:
    """Print text; on a terminal in the user's pager."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        pydoc.pager(text)
    else:
        print(text)


def draw(function: str, file: Path | None, *args: Any, **options: Any) -> None:
    """Draw a picture with the named function of ``export.pictures``. Without a file do nothing."""
    if file is None:
        return
    from ...export import pictures

    with drawing_bar():
        getattr(pictures, function)(*args, file, **options)


@contextmanager
def drawing_bar() -> Iterator[None]:
    """Show a progress bar; if matplotlib is missing, raise the error that names the extra."""
    try:
        with progress("drawing", 1):
            yield
    except BackendError as error:
        raise BackendError("pictures need matplotlib.  try: pip install matplotlib") from error


def group_names(names: Iterable[str]) -> str:
    """Return names as one text in which consecutive numbers are ranges.

    >>> group_names(["host0/cuda:0", "host0/cuda:1", "host0/cuda:2", "host0/cuda:5", "nvswitch"])
    'host0/cuda:0-2,5 nvswitch'
    """
    return " ".join(text + ",".join(runs) for text, runs in _groups(names))


def ranges(names: Iterable[str]) -> list[str]:
    """Return names in the form that ``--devices`` accepts: consecutive numbers are ranges, each with its prefix.

    >>> ranges(["cuda:0", "cuda:1", "cuda:2", "cuda:5", "nvswitch"])
    ['cuda:0-2', 'cuda:5', 'nvswitch']
    """
    return [text + run for text, runs in _groups(names) for run in runs or [""]]


def _groups(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return each prefix with its ranges of numbers as text. A name without a number is a prefix without ranges."""
    groups: list[tuple[str, list[list[int]]]] = []  # ranges: [first, last] or [number]
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            groups.append((name, []))
            continue
        text, number = match[1], int(match[2])
        if not groups or groups[-1][0] != text or not groups[-1][1]:
            groups.append((text, []))
        runs = groups[-1][1]
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]  # the new end of the range
        else:
            runs.append([number])
    return [(text, ["-".join(map(str, run)) for run in runs]) for text, runs in groups]
