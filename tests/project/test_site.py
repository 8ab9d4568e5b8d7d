"""The sources of the documentation's site are complete and agree with the library; ``scripts/docs`` builds it."""

import ast
import doctest
import importlib
import io
import json
import posixpath
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from browser import chromium, require_browser, resize, wait
from paths import ROOT
from PIL import Image

import crossreduce

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if "_generated" not in path.parts
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HEADER = re.compile(r"\A---\n(.*?)\n---\n+", re.DOTALL)
SESSION = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def site(monkeypatch):
    """Return a function that imports a module of docs/site."""
    monkeypatch.syspath_prepend(DOCS / "site")
    return importlib.import_module


def documents(page):
    """Return the pages that a page's tables of contents list."""
    lines = "".join(re.findall(r"```\{toctree\}\n(?::.*\n)*\n(.*?)```", PAGES[page], re.DOTALL)).splitlines()
    listed = [re.sub(r"^.* <(.*)>$", r"\1", line) for line in lines]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) for name in listed]


def test_each_page_is_in_one_table_of_contents():
    """Every page except the first one is in exactly one table of contents. Tables list only pages that exist; that of
    the tutorials lists four."""
    listed = [name for page in PAGES for name in documents(page)]
    assert sorted(listed) == sorted(set(PAGES) - {"index"})
    assert len(listed) > 40
    assert len(documents("tutorials/index")) == 4


def test_the_first_sentence_of_a_page_states_its_purpose():
    """A page begins with a heading and then a paragraph of text, whose first sentence is about the page."""
    subject = r"(This (page|section|site|tutorial)|These (pages|calls|modules|tutorials))"
    about = rf"(?s)# [^\n]+\n\n{subject} [a-z].{{20,}}?[.:]\s"
    assert [page for page, text in PAGES.items() if not re.match(about, HEADER.sub("", text))] == []


def public(module):
    """Return the names of a module's ``__all__``, without importing it."""
    path = Path(crossreduce.__file__).parent / module
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return ast.literal_eval(names)


def test_the_reference_has_the_public_interface():
    """The reference documents each public name once, and no other name. The page on errors shows the tree of errors in
    the docstring of errors.py."""
    found = [name for text in PAGES.values() for name in re.findall(r"^\.\. auto\w+:: crossreduce\.(\S+)$", text, re.M)]
    expected = [*crossreduce.__all__, "torchft.ProcessGroupCrossreduce", "mpi.join", "mpi.MpiGroup"]
    expected += ["kernels.instruction_set", "kernels.threads"]
    for module in ("tensorflow", "jax", "torch", "trace", "processes"):
        expected += [f"{module}.{name}" for name in public(module)]
    assert sorted(found) == sorted(expected)
    tree = ast.get_docstring(ast.parse((Path(crossreduce.__file__).parent / "errors.py").read_text()))
    lines = [line.strip() for line in tree.splitlines() if "──" in line]
    assert [line.strip() for line in PAGES["reference/errors"].splitlines() if "──" in line] == lines
    assert len(lines) > 10


def test_the_reference_has_every_environment_variable():
    """The page on environment variables lists those that the code reads, and no other one of ours."""
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp")]
    sources += [ROOT / "setup.py", ROOT / "tests/conftest.py"]
    read = {name for path in sources for name in re.findall(r"\bCROSSREDUCE_[A-Z0-9_]+\b", path.read_text())}
    listed = set(re.findall(r"^\| `(CROSSREDUCE_[A-Z0-9_]+)`", PAGES["reference/environment"], re.M))
    assert listed == read
    assert len(listed) > 8


def sessions():
    """Yield, for each page, its console sessions of which all commands can be run here."""
    for page, text in PAGES.items():
        shown = [
            each for each in SESSION.findall(text) if not re.search(r"^\$ (?!crossreduce (?!train)|cat )", each, re.M)
        ]
        if shown:
            yield pytest.param(shown, id=page)


@pytest.mark.parametrize("shown", list(sessions()))
def test_commands_print_what_pages_show(crossreduce, shown, tmp_path, monkeypatch):
    """A command prints the text below it, in which ``...`` stands for any text. ``cat`` creates the shown file, which
    later sessions of the page can read."""
    monkeypatch.chdir(tmp_path)
    for step in re.split(r"^\$ ", "".join(shown), flags=re.M)[1:]:
        command, _, output = step.partition("\n")
        program, *words = shlex.split(command)
        if program == "cat":
            (tmp_path / words[0]).write_text(output)
        else:
            code, out, error = crossreduce(*words)
            assert code == 0, error
            out = re.sub(" +$", "", out, flags=re.M)
            assert doctest.OutputChecker().check_output(output, out, doctest.ELLIPSIS), out


def test_kept_results_have_their_date_and_machine(site):
    """Each kept result has the date, the machine and the versions that the site shows. The results of charts exist."""
    charts = site("charts")
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", charts.date(kept)), path
        assert {"cpu", "cores", "python", "system", "versions"} <= set(kept["machine"]), path
        assert "crossreduce" in kept["machine"]["versions"] or path.stem == "free_threading", path
    assert all((RESULTS / chart.results).exists() for chart in charts.CHARTS)
    text = charts.described(json.loads((RESULTS / "processes.json").read_text()))
    assert ("torch 2" in text, "Open MPI" in text) == (True, True)


FAULTS = {
    '<a href="missing.html">x</a>': "the link missing.html leads to no file",
    '<a href="other.html#nowhere">x</a>': "the link other.html#nowhere leads to no place of its page",
    '<a href="ftp://example.org">x</a>': "the link ftp://example.org has no known protocol",
    '<script src="//cdn.example.org/x.js"></script>': "loads //cdn.example.org/x.js from a network",
    '<link rel="stylesheet" href="http://example.org/x.css">': "loads http://example.org/x.css from a network",
    '<img srcset="https://example.org/x.png 2x">': "loads https://example.org/x.png from a network",
    '<img src="b.png">': "loads b.png, which does not exist",
    '<p style="background: url(https://example.org/y.png)">': "loads https://example.org/y.png from a network",
    r"<p><code>a\b</code>\ out</p>": r"shows a backslash: \ out",
}


def test_the_check_of_links_finds_faults(site, tmp_path, capsys):
    """In pages and style sheets, links without a target and files loaded from a network are faults. In sources, links
    that are not complete addresses are. Other links are listed."""
    links = site("links")
    good = '<a href="other.html#there">x</a><a href="https://example.org/x">y</a><img src="a.png"><p id="here"></p>'
    (tmp_path / "other.html").write_text('<p id="there"></p>')
    (tmp_path / "a.png").touch()
    for page, found in ((good, []), (good + "".join(FAULTS), [f"index.html: {fault}" for fault in FAULTS.values()])):
        (tmp_path / "index.html").write_text(page)
        others = links.defaultdict(set)
        assert sorted(links.faults_of(tmp_path, others)) == sorted(found)
        assert others == {"https://example.org/x": {"index.html"}}
    (tmp_path / "index.html").write_text("")
    (tmp_path / "x.css").write_text("@import 'https://example.org/a.css'; @font-face { src: url(//example.org/b) }")
    (tmp_path / "x.md").write_text("[a](https://example.org/ok) [b](http://example.org) [c](https:/example.org)")
    assert links.main(tmp_path, tmp_path) == 1
    assert re.findall(r"^(\S+): ", capsys.readouterr().out, re.M) == ["x.css", "x.css", "x.md", "x.md"]


FIRST = {
    "timeout": "how-to/debug-a-hang", "hang": "how-to/debug-a-hang", "ddp": "tutorials/torch-data-parallel",
    "nvlink": "planning", "deterministic": "explanation/exactness", "reproducible": "explanation/exactness",
    "kill rank": "how-to/when-a-rank-dies", "fault tolerance": "how-to/when-a-rank-dies", "slow rank": "watching",
    "mean of integers": "contract", "tensorflow mirroredstrategy": "tensorflow", "install": "start/index",
    "keras": "how-to/keras",
    "environment variables": "reference/environment", "faq": "explanation/faq", "rdma": "how-to/rdma",
    "troubleshooting": "how-to/troubleshooting", "gloo": "explanation/compared",
}  # fmt: skip


def test_the_search_finds_the_right_page_first(site):
    """Each of these words is a main entry of the index of one page, which the search therefore shows first."""
    keywords = site("keywords")
    entries = [
        (entry.removeprefix("! ").lower(), page)
        for page, text in PAGES.items()
        for line in re.findall(r"^```\{index\} (.*)$", keywords.with_entries(page, text), re.M)
        for entry in line.split(", ")
    ]
    assert len(dict(entries)) == len(entries)
    assert {word: page for word, page in entries if word in FIRST} == FIRST
    assert set(keywords.KEYWORDS) <= set(PAGES)


def test_versions_are_listed_newest_first(site, tmp_path):
    """The list of versions has each built version with its pages. The first page leads to the newest release."""
    versions = site("versions")
    with pytest.raises(SystemExit, match="contains no built version"):
        versions.main(tmp_path)
    for version in ("0.9.1", "0.10.0", "main"):
        (tmp_path / version / "_static").mkdir(parents=True)
        for page in ("index.html", "a.html", "_static/no.html"):
            (tmp_path / version / page).touch()
    versions.main(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [each["name"] for each in listed] == ["0.10.0 (newest)", "0.9.1", "main"]
    assert [each["version"] for each in listed] == ["0.10.0", "0.9.1", "main"]
    assert all(each["pages"] == ["a.html", "index.html"] for each in listed)
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "versions.js").read_text().startswith("window.siteVersions = [")


def test_examples_of_the_modules_are_right(site):
    """The examples in the docstrings of docs/site print the shown results."""
    for name in ("docstrings", "keywords", "versions"):
        found = doctest.testmod(site(name))
        assert (found.attempted > 0, found.failed) == (True, 0)


def test_the_site_is_built_with_the_tested_versions():
    """The extra "docs" has the frameworks of the extra "test", in the same versions, and pins the tools. The words that
    the spelling check accepts are sorted and unique."""
    tested = [*EXTRAS["dev"], *EXTRAS["test"]]
    frameworks = [each for each in tested if re.match(r"(torch|jax|tensorflow)", each)]
    assert set(frameworks) <= set(EXTRAS["docs"])
    assert all("==" in each or each.startswith("crossreduce[") for each in EXTRAS["docs"])
    words = (DOCS / "words.txt").read_text().split()
    assert words == sorted(set(words), key=lambda word: (word.lower(), word))


def test_the_reference_lists_the_entry_points():
    """The page on environment variables and entry points has each entry point of this package, and the groups in which
    it looks for those of others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    rows = re.findall(
        r"^\| `([\w.]+)` \| ([^|]+?) \| (this library|any other) \|", PAGES["reference/environment"], re.M
    )
    own = {(group, f"`{name}`", "this library") for group, names in groups.items() for name in names}
    source = "\n".join(path.read_text() for path in Path(crossreduce.__file__).parent.rglob("*.py"))
    read = set(re.findall(r'_ENTRY_POINTS: Final = "([\w.]+)"', source))
    assert len(read) == len(re.findall(r"entry_points\(group=", source)) == 1
    assert {row for row in rows if row[2] == "this library"} == own
    assert {group for group, _, by in rows if by == "any other"} == read


def test_pictures_are_dark_in_the_dark_theme(tmp_path):
    """In the site's dark theme, the browser shows each picture of docs/pictures in dark colours, and inverts bitmaps
    with a white background; in the light theme all are light, whatever the system's colours."""
    require_browser()
    bitmap = tmp_path / "white.png"
    Image.new("RGB", (600, 300), "white").save(bitmap)
    images = [bitmap, *sorted((DOCS / "pictures").glob("*.svg"))]
    shown = "".join(f'<img width="600" src="{image.as_uri()}">' for image in images)
    style = (DOCS / "_static" / "site.css").as_uri()
    with chromium(tmp_path / "profile", 600, 300) as driver:
        for theme, system in (("light", "dark"), ("dark", "light")):
            page = tmp_path / f"{theme}.html"
            page.write_text(
                f'<html data-theme="{theme}"><link rel="stylesheet" href="{style}"><p class="bd-content">{shown}</p>'
            )
            setting = {"features": [{"name": "prefers-color-scheme", "value": system}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", setting)
            driver.get(page.as_uri())
            for image, element in zip(images, driver.find_elements("css selector", "img"), strict=True):
                wait(lambda element=element: element.get_property("complete"))
                mean = np.array(Image.open(io.BytesIO(element.screenshot_as_png)).convert("L")).mean()
                assert (mean < 90) if theme == "dark" else (mean > 200), f"{image.name} in the {theme} theme: {mean}"


def test_pictures_can_be_read_on_a_telephone():
    """On a page of 368 pixels, the letters of the README's narrow pictures have at least ten pixels. The first page of
    the site has the narrow drawing, too; other pictures keep their size and scroll: see the next test."""
    narrow = re.findall(
        r'<source media="\(max-width: 600px\)" srcset="docs/pictures/(.*)">', (ROOT / "README.md").read_text()
    )
    assert narrow == ["overview-narrow.svg", "speed-narrow.svg"]
    for name in narrow:
        svg = (DOCS / "pictures" / name).read_text()
        (width,) = map(float, re.findall(r"<svg [^>]*viewBox=\"0 0 ([\d.]+) ", svg))  # in points of 4/3 pixels
        smallest = min(map(float, re.findall(r"<text[^>]*font-size: ([\d.]+)px", svg)))
        assert smallest * min(4 / 3, 368 / width) >= 10, name
    assert not [page for page, text in PAGES.items() if "{image}" in text and page != "index"]
    shown = re.findall(r"\{image\} pictures/(overview\S*)\n:alt: .*\n:class: (\S+)", PAGES["index"])
    assert shown == [("overview.svg", "on-wide-pages"), ("overview-narrow.svg", "on-narrow-pages")]


def test_narrow_pages_name_the_columns_of_stacked_tables_and_show_narrow_drawings(tmp_path):
    """Where a narrow page stacks the cells of a table of three or four columns, each has the head of its column. Of a
    drawing in two versions, a page shows the one for its width. A chart keeps its width, and its paragraph scrolls, as
    do tables that a command has printed. An empty cell has no head."""
    require_browser()
    static, page = (DOCS / "_static").as_uri(), tmp_path / "page.html"
    rows = "<thead><tr><th>you<th>use<th>get</tr></thead><tbody><tr><td>a<td>b<td>c</tr><tr><td>d<td><td></tr></tbody>"
    output = "".join(
        f'<div class="highlight-console"><pre>{text}</pre></div>' for text in ("plan", "┃ a ┃", "GPU0   X ")
    )
    links = f'<link rel="stylesheet" href="{static}/site.css"><script src="{static}/tables.js"></script>'
    both = "".join(f'<img class="{kind}" width="9" height="9">' for kind in ("on-wide-pages", "on-narrow-pages"))
    chart = (DOCS / "pictures" / "speed.svg").as_uri()
    theme = "<style>img { max-width: 100% }</style>"  # as in Sphinx's theme
    page.write_text(
        f'<!doctype html>{theme}{links}<article class="bd-article"><table>{rows}</table>{both}'
        f'<p><img id="chart" src="{chart}"></p>{output}</article>'
    )
    kind = "return [...document.querySelectorAll('img[class]')].filter((i) => i.offsetWidth).map((i) => i.className)"
    before = "return [...document.querySelectorAll('td')].map((cell) => getComputedStyle(cell, '::before').content)"
    with chromium(tmp_path / "profile") as driver:
        for width, heads, version in (
            (1400, ["none"] * 6, "on-wide-pages"),
            (400, ["none", '"use: "', '"get: "', *["none"] * 3], "on-narrow-pages"),
        ):
            resize(driver, width, 900)
            driver.get(page.as_uri())
            assert driver.execute_script(before) == heads
            assert driver.execute_script(kind) == [version]
            spaces = "return [...document.querySelectorAll('pre')].map((e) => getComputedStyle(e).whiteSpace)"
            assert driver.execute_script(spaces) == ["pre-wrap", "pre", "pre"]
            wait(lambda: driver.execute_script("return chart.complete"))
            assert driver.execute_script("return chart.offsetWidth") == 691
            scrolls = "return [chart.parentNode, document.documentElement].map((e) => e.scrollWidth > e.clientWidth)"
            assert driver.execute_script(scrolls) == [width < 691, False]


def test_code_fits_the_page():
    """Lines of code have at most 96 columns, as many as a page of 1,400 pixels shows, and so have tables that a command
    draws. The style sheet wraps longer lines of other output."""
    for page, text in PAGES.items():
        for language, body in re.findall(r"^ *```([^`\n]*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            is_code = re.match(r"(python|py|c|cpp|sh|bash|json|toml|yaml)$|\{code-cell\}", language)
            is_drawn = any(line.startswith(("┏", "┌")) for line in body.splitlines())
            wide = [line for line in body.splitlines() if len(line) > 96]
            assert not (wide and (is_code or is_drawn)), (page, wide)
    style = (DOCS / "_static" / "site.css").read_text()
    assert re.search(r":is\(\.highlight-default, .*\) pre \{\s*white-space: pre-wrap", style)
