"""Write the parts of the site that are made from the library and from kept results.

Output, in the given folder: ``command-line.md`` (typer's own description of the commands), files of the repository's
root for pages that include them, ``benchmarks.md`` with its charts, ``gallery.md`` with its pictures, and
``extra/gallery/`` with pages of the plan explorer. Run by ``docs/conf.py`` at every build.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import charts
import gallery

ROOT = Path(__file__).parents[2]
PAGES = {  # files of the repository's root, and the pages in docs/ that include them
    "ARCHITECTURE.md": Path("explanation/architecture.md"),
    "CHANGELOG.md": Path("reference/changes.md"),
    "CONTRIBUTING.md": Path("reference/contributing.md"),
}


def write(folder: Path) -> None:
    """Write all generated files into ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "command-line.md").write_text(commands())
    for name, page in PAGES.items():
        (folder / page.name).write_text(rooted(ROOT / name))
    charts.write(folder)
    gallery.write(folder, folder / "extra" / "gallery")


def commands() -> str:
    """Return the Markdown of the command line's reference: a section per command, without the part common to all."""
    command = [sys.executable, "-m", "typer", "crossreduce.cli.app", "utils", "docs", "--name", "crossreduce"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    _, first, rest = text.partition("\n## `")
    # typer escapes quotation marks for HTML, also inside of code
    return re.sub(r"&#x27;|&quot;", lambda found: html.unescape(found[0]), first.lstrip() + rest)


def rooted(path: Path) -> str:
    """Return a file of the root without its heading, with links to the site, for a page in a folder of docs/."""

    def moved(found: re.Match[str]) -> str:
        text, name, anchor = found[1], found[2], found[3] or ""
        if name in PAGES or name.startswith("docs/"):
            return f"[{text}](../{PAGES.get(name) or name.removeprefix('docs/')}{anchor})"
        return f"{text} (`{name}`)"  # is in the repository only

    text = path.read_text().partition("\n")[2]
    return re.sub(r"\[([^][]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", moved, text)
