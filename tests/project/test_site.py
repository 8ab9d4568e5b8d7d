"""The sources of the documentation's site are complete and agree with the library; ``scripts/docs`` builds it."""

import ast
import doctest
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from paths import ROOT

import crossreduce

DOCS = ROOT / "docs"
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
    parts = [(Path(page).parent / name).as_posix() for name in listed]
    return [re.sub(r"(^|/)[\w-]+/\.\./", r"\1", name) for name in parts]


def test_each_page_is_in_one_table_of_contents():
    """Every page except the first one is in exactly one table of contents, and these list only pages that exist; the
    section of tutorials lists four."""
    listed = [name for page in PAGES for name in documents(page)]
    assert sorted(listed) == sorted(set(PAGES) - {"index"})
    assert len(listed) > 40
    assert len(documents("tutorials/index")) == 4


def test_the_first_sentence_of_a_page_states_its_purpose():
    """A page begins with a heading and then a paragraph of text, whose first sentence is about the page."""
    for page, text in PAGES.items():
        lines = HEADER.sub("", text).split("\n\n")
        assert re.fullmatch(r"# \S.*", lines[0]), page
        first = re.match(r".*?[.:](?=\s|$)", " ".join(lines[1].split()))
        assert first, f"the first paragraph of {page} has no sentence"
        about = r"(This (page|section|site|tutorial)|These (pages|calls|modules|tutorials)) [a-z].{20,}"
        assert re.fullmatch(about, first[0]), first[0]


def public(module):
    """Return the names of a module's ``__all__``, without importing it."""
    path = Path(crossreduce.__file__).parent / module
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return ast.literal_eval(names)


def test_the_reference_has_the_public_interface():
    """The reference documents each public name once, and no other name; the page on errors shows the tree of the
    docstring of errors.py."""
    found = [name for text in PAGES.values() for name in re.findall(r"^\.\. auto\w+:: crossreduce\.(\S+)$", text, re.M)]
    expected = [*crossreduce.__all__, "torchft.ProcessGroupCrossreduce", "mpi.join", "mpi.MpiGroup"]
    expected += ["kernels.instruction_set", "kernels.threads"]
    for module in ("tensorflow", "jax", "torch", "trace", "processes"):
        expected += [f"{module}.{name}" for name in public(module)]
    assert sorted(found) == sorted(expected)
    tree = ast.get_docstring(ast.parse((Path(crossreduce.__file__).parent / "errors.py").read_text()))
    lines, shown = (
        [line.strip() for line in text.splitlines() if "──" in line] for text in (tree, PAGES["reference/errors"])
    )
    assert shown == lines
    assert len(lines) > 10


def test_the_reference_has_every_environment_variable():
    """The page on environment variables lists those that the code reads, and no other one of ours."""
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp")]
    sources += [ROOT / "setup.py", ROOT / "tests/conftest.py"]
    read = {name for path in sources for name in re.findall(r"\bCROSSREDUCE_[A-Z_]+\b", path.read_text())}
    listed = set(re.findall(r"^\| `(CROSSREDUCE_[A-Z_]+)`", PAGES["reference/environment"], re.M))
    assert listed == read
    assert len(listed) > 8


def test_tutorials_are_notebooks_that_check_their_results():
    """A tutorial has the header of a notebook for Python, cells that parse, and at least three assertions."""
    for page in documents("tutorials/index"):
        header = HEADER.match(PAGES[page])[1]
        assert {"    format_name: myst", "  language: python", "  name: python3"} <= set(header.splitlines())
        cells = re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```", PAGES[page], re.DOTALL | re.M)
        assert len(cells) == PAGES[page].count("{code-cell}")
        code = [re.sub(r"\A%%writefile .*\n", "", cell) for cell in cells]
        assert sum(isinstance(node, ast.Assert) for cell in code for node in ast.walk(ast.parse(cell))) >= 3


def sessions():
    """Return the sessions of pages that consist of commands which can be run here, and the names of their pages."""
    for page, text in PAGES.items():
        for number, shown in enumerate(SESSION.findall(text)):
            commands = re.findall(r"^\$ (.*)$", shown, re.M)
            if all(re.match(r"crossreduce (?!train)|cat ", command) for command in commands):
                yield pytest.param(shown, id=f"{page}-{number}")


@pytest.mark.parametrize("shown", list(sessions()))
def test_commands_print_what_pages_show(crossreduce, shown, tmp_path, monkeypatch):
    """A command prints the text below it, in which ``...`` stands for any text; a file that ``cat`` shows is made."""
    assert len(list(sessions())) >= 4
    monkeypatch.chdir(tmp_path)
    for step in re.split(r"^\$ ", shown, flags=re.M)[1:]:
        command, _, output = step.partition("\n")
        program, *words = shlex.split(command)
        if program == "cat":
            (tmp_path / words[0]).write_text(output)
            continue
        code, out, error = crossreduce(*words)
        assert code == 0, error
        assert doctest.OutputChecker().check_output(output, out, doctest.ELLIPSIS), out


def test_kept_results_have_their_date_and_machine(site):
    """Each kept result has the date, the machine and the versions that the site shows; each chart has its results."""
    charts = site("charts")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        kept = json.loads(path.read_text())
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", charts.date(kept)), path
        assert {"cpu", "cores", "python", "system", "versions"} <= set(kept["machine"]), path
        assert "crossreduce" in kept["machine"]["versions"] or path.stem in ("free_threading",), path
    assert all((ROOT / "benchmarks" / "results" / chart.results).exists() for chart in charts.CHARTS)
    text = charts.described(json.loads((ROOT / "benchmarks" / "results" / "processes.json").read_text()))
    assert "torch 2" in text
    assert "Open MPI" in text


def test_charts_are_drawn(site, tmp_path):
    """The charts of plans and of frameworks are drawn from the kept results, with a bar for each machine or job."""
    charts = site("charts")
    for name, texts in (("machines", ["dgx-1v", "hgx-h100", "TensorFlow"]), ("frameworks", ["JAX: 64 MiB", "eager"])):
        (chart,) = [chart for chart in charts.CHARTS if chart.name == name]
        with charts.mpl.rc_context({"svg.fonttype": "none"}):
            chart.draw(json.loads((ROOT / "benchmarks" / "results" / chart.results).read_text()), tmp_path / "it.svg")
        drawn = (tmp_path / "it.svg").read_text()
        assert all(text in drawn for text in texts)


FAULTS = {
    '<a href="missing.html">x</a>': "the link missing.html leads to no file",
    '<a href="other.html#nowhere">x</a>': "the link other.html#nowhere leads to no place of its page",
    '<a href="#nowhere">x</a>': "the link #nowhere leads to no place of its page",
    '<a href="ftp://example.org">x</a>': "the link ftp://example.org has no known protocol",
    '<script src="https://cdn.example.org/x.js"></script>': "loads https://cdn.example.org/x.js from a network",
    '<script src="//cdn.example.org/x.js"></script>': "loads //cdn.example.org/x.js from a network",
    '<link rel="stylesheet" href="http://example.org/x.css">': "loads http://example.org/x.css from a network",
    '<img srcset="https://example.org/x.png 2x">': "loads https://example.org/x.png from a network",
    '<img src="b.png">': "loads b.png, which does not exist",
    '<p style="background: url(https://example.org/y.png)">': "loads https://example.org/y.png from a network",
}


def test_the_check_of_links_finds_faults(site, tmp_path, capsys):
    """Links without a target, and whatever would be loaded from a network, are faults, also in style sheets; so are
    links of sources that are not complete addresses. Other links are listed."""
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
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["x.css", "x.css", "x.md", "x.md"]
    with pytest.raises(SystemExit, match="contains no built site"):
        links.main(tmp_path / "none", tmp_path)


def test_versions_are_listed_newest_first(site, tmp_path):
    """The list of versions has each built version with its pages; the first page leads to the newest release."""
    versions = site("versions")
    for version in ("0.9.1", "0.10.0", "main"):
        (tmp_path / version / "_static").mkdir(parents=True)
        for page in ("index.html", "a.html", "_static/no.html"):
            (tmp_path / version / page).touch()
    versions.main(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    names = [(each["name"], each["version"]) for each in listed]
    assert names == [("0.10.0 (newest)", "0.10.0"), ("0.9.1", "0.9.1"), ("main", "main")]
    assert all(each["pages"] == ["a.html", "index.html"] for each in listed)
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "versions.js").read_text().startswith("window.siteVersions = [")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="contains no built version"):
        versions.main(tmp_path / "empty")


def test_files_of_the_root_lead_to_pages(site, tmp_path):
    """A file of the root that a page includes has no heading, and its links lead to pages or become the file's name."""
    rooted = site("generate").rooted
    path = tmp_path / "x.md"
    path.write_text("# X\n\n[a](docs/host.md#b) [c](ARCHITECTURE.md#d) [e\nf](LICENSE) [g](https://h.org) [i](#j)\n")
    shown = "[a](../host.md#b) [c](../explanation/architecture.md#d) e\nf (`LICENSE`) [g](https://h.org) [i](#j)\n"
    assert rooted(path).strip() == shown.strip()


def test_examples_of_the_modules_are_right(site):
    """The examples in the docstrings of docs/site print the shown results."""
    for name in ("docstrings", "versions"):
        found = doctest.testmod(site(name))
        assert (found.attempted > 0, found.failed) == (True, 0)


def test_the_site_is_built_with_the_tested_versions():
    """The extra "docs" has the frameworks of the extra "test", in the same versions, and pins the tools."""
    frameworks = [each for each in EXTRAS["test"] if re.match(r"(torch|jax|tensorflow)", each)]
    assert set(frameworks) <= set(EXTRAS["docs"])
    assert all("==" in each or each.startswith("crossreduce[") for each in EXTRAS["docs"])


def test_the_list_of_words_is_sorted():
    """The words that the spelling check accepts are sorted, without a word twice."""
    words = (DOCS / "words.txt").read_text().split()
    assert words == sorted(set(words), key=lambda word: (word.lower(), word))
