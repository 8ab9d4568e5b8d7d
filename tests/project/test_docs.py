"""Documents agree with the code: their examples print the shown output, CI runs the README's commands."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from statistics import median

import pytest
from command_line import forked, run_python
from paths import ROOT

from crossreduce.export.pictures import style

README = (ROOT / "README.md").read_text()
PLANNING = (ROOT / "docs" / "planning.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
CLIENTS = ROOT / "examples" / "clients"
PICTURES = ROOT / "docs" / "pictures"
BLOCK = re.compile(r"```python\n(.*?)```\s*```\n(.*?)```", re.DOTALL)
MARK = "--- next block ---"
LAUNCH = re.compile(r"\$ torchrun (.*?(\w+\.py))\n")
DOCUMENTS = (
    *("README.md", "docs/algorithms.md", "docs/contract.md", "docs/host.md", "docs/numpy.md", "docs/pytorch.md"),
    *("docs/jax.md", "docs/tensorflow.md", "docs/processes.md", "docs/start/index.md", "docs/start/your-machine.md"),
    *("docs/explanation/lost-replica.md", "docs/explanation/bounds.md", "docs/explanation/exactness.md"),
    *("docs/reference/files.md", "docs/tracing.md", "docs/how-to/keras.md"),
)


def require(code):
    """Skip the test if the code imports a framework that is not installed."""
    for name in ("torch", "jax", "tensorflow", "keras"):
        if re.search(rf"^import (crossreduce\.)?{name}\b", code, re.MULTILINE) and find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def run_block(args):
    """Run code as the main module of a new process does."""
    exec(args[0], {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_prints_what_the_document_shows(document, tmp_path, monkeypatch):
    """Each Python block prints the block that follows it. The blocks of a document run one after another in a process.

    Blocks for torchrun are tested below.
    """
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") > 0
    blocks = [(code, shown) for code, shown in blocks if not LAUNCH.match(shown)]
    require("\n".join(code for code, _ in blocks))
    code = f"\nprint({MARK!r})\n".join(code for code, _ in blocks)
    if re.search(r"^import (torch|jax|tensorflow|crossreduce\.)", code, re.MULTILINE):
        ran = run_python(code)
        assert ran.returncode == 0, ran.stderr
        out = ran.stdout
    else:
        ran = forked(run_block, code)
        assert ran.code == 0, ran.error
        out = ran.out
    assert out.split(MARK + "\n") == [shown for _, shown in blocks]


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        *(pytest.param(f"docs/{name}.md", marks=pytest.mark.slow) for name in ("start/index", "how-to/keras")),
    ],
)
def test_torchrun_prints_what_the_document_shows(document, tmp_path):
    """The Python block before a torchrun command is its program, and prints the text that follows the command."""
    text = (ROOT / document).read_text()
    ((code, shown),) = [(code, shown) for code, shown in BLOCK.findall(text) if LAUNCH.match(shown)]
    require(code)
    command = LAUNCH.match(shown)
    (tmp_path / command[2]).write_text(code)
    around = os.environ | {"PET_STANDALONE": "1"}  # a free port instead of a fixed one
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command[1].split()]
    ran = subprocess.run(torchrun, capture_output=True, text=True, cwd=tmp_path, env=around, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown[command.end() :]


def test_command_lines_of_the_readme_run(crossreduce, tmp_path, monkeypatch):
    """Each ``crossreduce`` command of the README's plain blocks runs, in order, and writes the files that it names."""
    blocks = re.findall(r"```\n(crossreduce .*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 4
    monkeypatch.chdir(tmp_path)
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        assert (name, crossreduce(*words)[0]) == ("crossreduce", 0), line
    assert {file.suffix for file in tmp_path.iterdir()} == {".html", ".xml", ".json"}


def benchmark(args):
    """Run a program of benchmarks/, which is the first argument."""
    sys.argv = args
    sys.path.insert(0, str(ROOT / "benchmarks"))
    runpy.run_path(str(ROOT / "benchmarks" / args[0]), run_name="__main__")


def test_the_pictures_are_up_to_date_and_have_one_style(tmp_path):
    """benchmarks/pictures.py draws the pictures of the README, and all others except those that docs/planning.md draws,
    from stored results. Their texts are up to date. Pictures have only colours of the style."""
    assert forked(benchmark, "pictures.py", "--folder", tmp_path).code == 0
    drawn, planned = ({file.name for file in tmp_path.iterdir()}, set(re.findall(r"pictures/([\w-]+\.svg)", PLANNING)))
    assert {file.name for file in PICTURES.iterdir()} == drawn | planned
    assert set(re.findall(r'src="docs/pictures/([\w-]+\.svg)"', README)) == {"overview.svg", "speed.svg"} < drawn
    for name in drawn:
        old, new = (re.findall(r"<text[^>]*>(.*?)</text>", (at / name).read_text()) for at in (PICTURES, tmp_path))
        assert old == new, f"{name} is out of date: run python benchmarks/pictures.py"
        assert len(old) > 20
    for name in drawn | planned:
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", (PICTURES / name).read_text())) <= set(style.DARK)


@pytest.mark.parametrize(("name", "script"), [("speed.md", "speed.py"), ("explanation/exactness.md", "exact_sums.py")])
def test_tables_of_measurements_are_up_to_date(tmp_path, name, script):
    """A page has the tables that a script of benchmarks/ writes from the stored results."""
    page, copy = (ROOT / "docs" / name).read_text(), tmp_path / "copy.md"
    mark = "<!-- benchmarks/speed.py writes the rest of this page. -->\n"
    copy.write_text("".join(page.partition(mark)[:2]))
    assert forked(benchmark, script, "--page", copy).code == 0
    assert copy.read_text() == page, f"{name} is out of date: run python benchmarks/{script} --page"
    assert page.count("\n| ") > 20


def test_pages_state_the_ratios_of_the_stored_results():
    """The README and the pages that compare libraries state the medians and counts of the stored results."""
    one_host, hosts = (json.loads((RESULTS / f"{name}.json").read_text())["rows"] for name in ("processes", "hosts"))
    faster = {}  # by part, ranks and peer: how many times as fast crossreduce is
    for row in one_host:
        faster.setdefault((row["part"], row["place"], row["peer"]), []).append(1 / row["ratio"])
    gloo, mpi = (
        sorted(median(ratios) for (part, *_), ratios in faster.items() if part == kind) for kind in ("torch", "mpi")
    )
    assert min(min(ratios) for (part, *_), ratios in faster.items() if part == "torch") > 1  # "nowhere slower"
    small, large = (
        [row["ratios"] for row in hosts if row["bytes"] <= 1 << 14],
        [row["ratios"] for row in hosts if row["bytes"] >= 1 << 24],
    )
    beside = {peer: [row["ratios"][f"crossreduce / {peer}"] for row in hosts] for peer in ("gloo", "Open MPI")}
    ahead = {peer: sum(ratio > 1 for ratio in ratios) for peer, ratios in beside.items()}
    between = [1 / median(ratios["crossreduce / gloo"] for ratios in sizes) for sizes in (small, large)]
    most = max(beside["gloo"])
    compared = " ".join((ROOT / "docs" / "explanation" / "compared.md").read_text().split())
    speed = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    assert f"{gloo[0]:.0f} to {gloo[-1]:.0f} times its speed on one host" in README
    assert f"On one host {gloo[0]:.0f} to {gloo[-1]:.0f} times as fast in the median" in compared
    assert f"Most collectives on one host, {mpi[0]:.1f} to {mpi[-1]:.1f} times as fast in the median" in compared
    words = f"between hosts {between[0]:.0f} times up to 16 KiB, and {between[1]:.1f} times from 16 MiB on"
    assert words in compared
    assert f"at {ahead['gloo']} of {len(hosts)} points, up to {most:.1f} times" in compared
    open_mpi = median(ratios["crossreduce / Open MPI"] for ratios in small)
    assert f"Between hosts, up to 16 KiB: {open_mpi:.1f} times as fast as calls through torch" in compared
    words = f"gloo is faster at {ahead['gloo']} of {len(hosts)} points, and Open MPI at {ahead['Open MPI']}:"
    assert words in speed


def test_the_page_on_clients_shows_the_programs_that_ran():
    """Each block of docs/use-it-with.md is, up to the indentation, in the program that its section links to.
    Its table has a row for each client of scripts/clients, which agrees with the report. In the report, no client that
    runs with gloo fails with the variable, and the losses agree with gloo's."""
    unindented = {path.name: re.sub(r"^ +", "", path.read_text(), flags=re.M) for path in CLIENTS.glob("*.py")}
    text = (ROOT / "docs" / "use-it-with.md").read_text()
    linked = []
    for section in re.sub(r"^ +", "", text, flags=re.M).split("\n## ")[1:]:
        (name,) = re.findall(r"^\[\w+\.py\]\(../examples/clients/(\w+\.py)\)", section, re.M)
        assert all(block in unindented[name] for block in re.findall(r"```py\n(.*?)```", section, re.DOTALL)), name
        linked.append(name)
    clients = runpy.run_path(str(ROOT / "scripts" / "clients"))["CLIENTS"]
    assert set(re.findall(r"\w+\.py", " ".join(clients.values()))) == set(unindented) == set(linked)
    report = json.loads((RESULTS / "clients.json").read_text())["clients"]
    assert list(report) == list(clients)
    rows = {name: said for name, *said in re.findall(r"^\| ([^|]+?) \| (yes|no)\b[^|]*\| (yes|no)\b", text, re.M)}
    for name, result in report.items():
        assert result["agree"], name
        ran = result["runs"]
        works = "CROSSREDUCE_FOR_GLOO=1" in ran and "gloo_stays" not in ran["CROSSREDUCE_FOR_GLOO=1"]
        assert rows[name] == ["yes" if works else "no", "yes" if "crossreduce" in ran else "no"], name


def test_ci_runs_readmes_commands():
    """.ci/run has the README's bash blocks, in order. The README has at most 200 lines of at most 110 characters."""
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    script = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    places = [script.index(command) for command in commands]
    assert places == sorted(places)
    assert len(README.splitlines()) <= 200
    assert max(map(len, README.splitlines())) <= 110


def test_links_have_targets():
    """Every relative link and picture in the documents names a file. Every file of docs/pictures/ is used."""
    documents = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    documents = [each for each in documents if each.parent.name != "_generated"]  # what a build of the site has left
    assert ROOT / "CONTRIBUTING.md" in documents
    unused = set(PICTURES.iterdir())
    for document in documents:
        for target in re.findall(r'(?:\]\(|src="|srcset=")([^)"#:]+)[)"#]', document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
            unused.discard((document.parent / target).resolve())
    assert not unused


def test_pages_with_programs_tell_how_to_install():
    """A page with a Python program has an install command, or a link to one. No page ends processes by their names,
    since other programs of the user may have the same ones."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "_generated"]
    texts = {path.name: path.read_text() for path in pages}
    with_programs = {name: text for name, text in texts.items() if re.search(r"```(python|py|\{code-cell\})", text)}
    assert len(with_programs) > 25
    known = r"pip install|\]\([./]*start/index\.md#(install|ranks-of-pytorch)\)"
    assert [name for name, text in with_programs.items() if not re.search(known, text)] == []
    assert [name for name, text in texts.items() if re.search(r"\b(pkill|killall)\b", text)] == []


def test_architecture_is_short_and_lists_what_exists():
    """ARCHITECTURE.md has at most 2,000 words and 40 terms. It names each folder, and only paths that exist."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 2000
    assert text.partition("## Glossary")[2].count("\n| ") - 1 <= 40
    package = ROOT / "src" / "crossreduce"
    folders = [path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"]
    homes = [ROOT, ROOT / "src", ROOT / "tests", package, *folders]
    paths = [name for name in re.findall(r"`([\w./]+)`", text) if name.endswith((".py", "/", ".md", ".jsonl", ".cpp"))]
    assert [name for name in paths if not any((home / name).exists() for home in homes)] == []
    assert {f"{path.name}/" for path in folders} <= set(paths)
