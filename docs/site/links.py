"""Check the links of the built site, that its pages load nothing from a network, and that no mark-up is left in them.

Input: a folder of HTML, and the folder of its sources. Output: the links to other sites, and an exit code of 1 if

- a link inside the site has no target, neither the file nor the place in it;
- a page, a style sheet or an icon would be loaded from another site;
- a link to another site is not a complete ``https`` address;
- a page shows a backslash outside of code, which marked something in a docstring.

Links to other sites are not opened: ``sphinx -b linkcheck`` does that, where there is a network.
Run: python docs/site/links.py HTML SOURCES
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser load a file; an ``href`` does so only in a <link> that is not just information.
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("source", "src"),
    ("source", "srcset"),
    ("use", "href"),
}
LOADED |= {
    ("iframe", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("object", "data"),
    ("embed", "src"),
    ("input", "src"),
}
CODE = {"code", "pre", "script", "style", "kbd", "svg", "math"}
INFORMATION = {"canonical", "search", "index", "next", "prev", "license", "author", "help"}
COMPLETE = re.compile(r"https://[\w.-]+\.\w{2,}(:\d+)?(/\S*)?|mailto:\S+@\S+")
STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")


class Page(HTMLParser):
    """Collects the places of a page that links can lead to, its links, and the files that it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.places: set[str] = {"", "top"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.stray: list[str] = []
        self._in_code: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        if "\\" in data and not self._in_code:
            self.stray.append(" ".join(data.split()))

    def handle_endtag(self, tag: str) -> None:
        if self._in_code and tag == self._in_code[-1]:
            self._in_code.pop()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in CODE:
            self._in_code.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        for name, value in values.items():
            if name == "style":
                self.loaded += STYLE.findall(value)
            elif (tag, name) in LOADED:
                self.loaded += [part.split()[0] for part in value.split(",")] if name == "srcset" else [value]
            elif tag == "link" and name == "href" and values.get("rel") not in INFORMATION:
                self.loaded.append(value)
            elif name == "href":
                self.links.append(value)


def faults_of(folder: Path, others: dict[str, set[str]]) -> list[str]:
    """Return the faults of all files below ``folder``; add links to other sites to ``others``, with their pages."""
    files = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]  # there: templates
    pages = {path: Page(path.read_text()) for path in files}
    faults = []
    for path, page in pages.items():
        where = path.relative_to(folder).as_posix()
        for link in page.links:
            if urlsplit(link).scheme in ("http", "https"):
                others[link].add(where)
            elif fault := inner_fault(path, link, pages):
                faults.append(f"{where}: {fault}")
        faults += [f"{where}: {fault}" for link in page.loaded if (fault := loading_fault(path, link))]
        faults += [f"{where}: shows a backslash: {text}" for text in page.stray]
    for path in sorted(folder.rglob("*.css")):
        for link in STYLE.findall(path.read_text()):
            if fault := loading_fault(path, link):
                faults.append(f"{path.relative_to(folder).as_posix()}: {fault}")
    return faults


def inner_fault(page: Path, link: str, pages: dict[Path, Page]) -> str:
    """Return the fault of a link inside the site, or an empty text."""
    parts = urlsplit(link)
    if parts.scheme in ("mailto", "data") or (parts.scheme, parts.netloc) == ("javascript", ""):
        return ""
    if parts.scheme or parts.netloc:
        return f"the link {link} has no known protocol"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file():
        return f"the link {link} leads to no file"
    if target in pages and unquote(parts.fragment) not in pages[target].places:
        return f"the link {link} leads to no place of its page"
    return ""


def loading_fault(path: Path, link: str) -> str:
    """Return the fault of a file that a page or style sheet loads, or an empty text."""
    parts = urlsplit(link)
    if parts.scheme == "data" or link.startswith("#"):
        return ""
    if parts.scheme or parts.netloc:
        return f"loads {link} from a network"
    return "" if (path.parent / unquote(parts.path)).is_file() else f"loads {link}, which does not exist"


def sources_faults(folder: Path) -> list[str]:
    """Return the links of Markdown sources that begin like an address but are none."""
    faults = []
    for path in sorted(folder.rglob("*.md")):
        links = re.findall(r"\]\((\w+:[^)\s]*)\)", path.read_text())
        wrong = [link for link in links if not COMPLETE.fullmatch(link)]
        where = path.relative_to(folder).as_posix()
        faults += [f"{where}: {link} is not a complete https address" for link in wrong]
    return faults


def main(built: Path, sources: Path) -> int:
    if not (built / "index.html").exists():
        sys.exit(f"{built} contains no built site; try: scripts/docs")
    others: dict[str, set[str]] = defaultdict(set)
    faults = faults_of(built.resolve(), others) + sources_faults(sources)
    for link, pages in sorted(others.items()):
        print(f"  {link}  ({len(pages)} {'page' if len(pages) == 1 else 'pages'}, such as {min(pages)})")
    print("\n".join(faults) or f"links: no fault; {len(others)} lead to other sites and were not opened")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
