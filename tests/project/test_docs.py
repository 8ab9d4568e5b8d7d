"""Documents agree with the code: their examples print the shown output, CI runs the README's commands."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from command_line import forked
from paths import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"

PICTURES = ROOT / "docs" / "pictures"
BLOCK = re.compile(r"```python\n(.*?)```\s*```\n(.*?)```", re.DOTALL)
MARK = "--- next block ---"
LAUNCH = re.compile(r"\$ torchrun (.*?(\w+\.py))\n")
DOCUMENTS = (
    *("README.md", "docs/algorithms.md", "docs/contract.md", "docs/host.md", "docs/numpy.md", "docs/pytorch.md"),
    *("docs/jax.md", "docs/tensorflow.md", "docs/processes.md", "docs/start/index.md", "docs/start/your-machine.md"),
    *("docs/explanation/lost-replica.md", "docs/explanation/bounds.md", "docs/explanation/exactness.md"),
    *("docs/reference/files.md", "docs/tracing.md"),
)


def run_block(args):
    """Run code as the main module of a new process does."""
    exec(args[0], {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_prints_what_the_document_shows(document, tmp_path, monkeypatch):
    """Each Python block prints the block that follows it; the blocks of a document run in one process of their own.

    Blocks for torchrun are tested below.
    """
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") > 0
    blocks = [(code, shown) for code, shown in blocks if not LAUNCH.match(shown)]
    code = f"\nprint({MARK!r})\n".join(code for code, _ in blocks)
    if re.search(r"^import (torch|jax|tensorflow|crossreduce\.)", code, re.MULTILINE):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_", "XLA_"))}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=inherited, check=False)
        assert ran.returncode == 0, ran.stderr
        out = ran.stdout
    else:
        ran = forked(run_block, code)
        assert ran.code == 0, ran.error
        out = ran.out
    assert out.split(MARK + "\n") == [shown for _, shown in blocks]
    for trace in tmp_path.glob("*.trace.json"):
        assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize("document", ["README.md", pytest.param("docs/start/index.md", marks=pytest.mark.slow)])
def test_torchrun_prints_what_the_document_shows(document, tmp_path):
    """Run by a document's torchrun command, the Python block before this command prints the text after it."""
    text = (ROOT / document).read_text()
    ((code, shown),) = [(code, shown) for code, shown in BLOCK.findall(text) if LAUNCH.match(shown)]
    command = LAUNCH.match(shown)
    (tmp_path / command[2]).write_text(code)
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1].split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PET_STANDALONE": "1"},  # a free port instead of a fixed one
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown[command.end() :]


def test_command_lines_of_the_readme_run(crossreduce, tmp_path, monkeypatch):
    """Each ``crossreduce`` command of the README's plain blocks runs, in order, and writes the files that it names."""
    lines = [
        line for block in re.findall(r"```\n(crossreduce .*?)```", README, re.DOTALL) for line in block.splitlines()
    ]
    assert len(lines) == 4
    monkeypatch.chdir(tmp_path)
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        assert (name, crossreduce(*words)[0]) == ("crossreduce", 0), line
    assert {file.suffix for file in tmp_path.iterdir()} == {".html", ".xml", ".json"}


def test_the_readme_is_short():
    """The README has at most 200 lines of at most 110 characters."""
    lines = README.splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 110


def benchmark(args):
    """Run a program of benchmarks/, which is the first argument."""
    sys.argv = args
    sys.path.insert(0, str(ROOT / "benchmarks"))
    runpy.run_path(str(ROOT / "benchmarks" / args[0]), run_name="__main__")


def test_the_pictures_of_the_readme_are_up_to_date(tmp_path):
    """The README shows the pictures of benchmarks/pictures.py; their texts are those of newly drawn ones."""
    assert forked(benchmark, "pictures.py", "--folder", tmp_path).code == 0
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == sorted(re.findall(r'(?:src|srcset)="docs/pictures/([\w-]+\.svg)"', README))
    for name in drawn:
        old, new = (re.findall(r"<text[^>]*>(.*?)</text>", (at / name).read_text()) for at in (PICTURES, tmp_path))
        assert old == new, f"{name} is out of date: run python benchmarks/pictures.py"
        assert len(old) > 20


@pytest.mark.parametrize(("name", "script"), [("speed.md", "speed.py"), ("explanation/exactness.md", "exact_sums.py")])
def test_tables_of_measurements_are_up_to_date(tmp_path, name, script):
    """A page has the tables that a script of benchmarks/ writes from the stored results."""
    page, copy = (ROOT / "docs" / name).read_text(), tmp_path / "copy.md"
    mark = "<!-- benchmarks/speed.py writes the rest of this page. -->\n"
    copy.write_text("".join(page.partition(mark)[:2]))
    assert forked(benchmark, script, "--page", copy).code == 0
    assert copy.read_text() == page, f"{name} is out of date: run python benchmarks/{script} --page"
    assert page.count("\n| ") > 20


def test_the_numbers_on_exactness_are_up_to_date():
    """The numbers of trainings in docs/explanation/exactness.md are those of the kept results."""
    page = (ROOT / "docs" / "explanation" / "exactness.md").read_text()
    kept = json.loads((RESULTS / "exact_training.json").read_text())
    default, exact = (set(kept["orders"][kind].values()) for kind in ("default", "exact"))
    assert f"give\n{len(default)} different sets of weights after {kept['steps']} steps by default" in page
    parts = {row["weights"] for row in kept["curves"]["exact, 8 parts"].values()}
    assert len(exact) == len(parts) == 1
    assert len({row["weights"] for row in kept["curves"]["exact"].values()}) > 1


@pytest.mark.slow
def test_the_grid_of_ranks_covers_every_collective(tmp_path):
    """A quick run of the grid of ranks keeps and draws all cases."""
    results, picture = tmp_path / "grid.json", tmp_path / "grid.svg"
    words = ["--quick", "--only", "torch, 2 ranks", "--json", results, "--picture", picture]
    ran = subprocess.run([sys.executable, ROOT / "benchmarks" / "processes.py", *words], check=False, timeout=300)
    assert ran.returncode == 0
    rows = json.loads(results.read_text())["rows"]
    names = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "send_recv")
    due = {(name, size, "float32") for name in names for size in (1 << 10, 1 << 20)}
    assert {(r["collective"], r["bytes"], r["dtype"]) for r in rows} == due | {("all_reduce", 1 << 20, "bfloat16")}
    assert all(0 < r["least_ratio"] <= r["ratio"] <= r["greatest_ratio"] for r in rows)
    assert all(0 < row[key] < 10 for row in rows for key in ("ours_s", "peer_s"))
    assert {"one host, 2 ranks", "gloo, torch", "1 MiB"} <= set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_the_grid_of_ranks_judges_its_points(monkeypatch):
    """Points at which a peer is faster are listed and break requirements; the least times between hosts are exact."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import processes

    rows = json.loads((RESULTS / "processes.json").read_text())["rows"]
    row = next(r for r in rows if (r["collective"], r["bytes"]) == ("send_recv", 1 << 10))
    for ratio, faster, met in ((0.19, False, True), (0.21, False, False), (1.01, True, False)):
        judged = [row | {"ratio": ratio}]
        assert (processes.ahead(judged), [r["met"] for r in processes.required(judged)]) == (judged * faster, [met])
    # 32 MiB cross a link of 125 MB/s in 0.268 s. A host with 3 ranks needs the parts of 5, and each of 3 sends 5 parts.
    shares = {"all_reduce": 1, "all_gather": 5 / 8, "reduce_scatter": 5 / 8, "all_to_all": 15 / 8}
    for collective, share in shares.items():
        assert processes.floor_s(collective, [3, 5], 1 << 25) == pytest.approx(share * (1 << 25) / 125e6)
    assert processes.floor_s("all_reduce", [2, 2, 2], 1 << 25) == pytest.approx((1 << 25) / 0.1375e9)


def test_command_lines_on_the_frameworks_pages_write_traces(crossreduce, tmp_path, monkeypatch):
    """Each ``crossreduce export`` command on the pages of PyTorch, JAX and TensorFlow writes a trace."""
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("pytorch", "jax", "tensorflow"))
    commands = re.findall(r"`crossreduce (export \S+ (\S+?)(?: .*?)?)`", pages)
    assert len(commands) == 3
    monkeypatch.chdir(tmp_path)
    for command, file in commands:
        assert crossreduce(*command.split())[0] == 0
        assert json.loads((tmp_path / file).read_text())["traceEvents"]


def test_the_page_on_jax_has_the_thresholds_and_versions_of_the_code(jax_):
    """docs/jax.md has the code's size below which leaves share a buffer, and the oldest JAX of pyproject.toml."""
    from crossreduce.jax import SMALL_BYTES

    page = (ROOT / "docs" / "jax.md").read_text()
    assert f"below {SMALL_BYTES >> 10} KiB each" in page
    (oldest,) = re.findall(r'^jax = \["jax>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"It needs JAX {oldest} or later" in page


def test_the_page_on_clients_shows_the_programs_that_ran():
    """Each block of docs/use-it-with.md is in the program that its section links to, up to the indentation;
    scripts/clients ran each program, and in its report the losses of all clients agree with gloo's."""

    def read(path):
        return re.sub(r"^ +", "", path.read_text(), flags=re.MULTILINE)

    programs = {path.name: read(path) for path in (ROOT / "examples" / "clients").glob("*.py")}
    page = read(ROOT / "docs" / "use-it-with.md")
    linked = []
    for section in page.split("\n## ")[1:]:
        (name,) = re.findall(r"^\[\w+\.py\]\(../examples/clients/(\w+\.py)\)", section, re.MULTILINE)
        assert all(block in programs[name] for block in re.findall(r"```py\n(.*?)```", section, re.DOTALL)), name
        linked.append(name)
    commands = re.findall(
        r'^    "(.*)": "(?:python|torchrun) (\w+\.py)', (ROOT / "scripts" / "clients").read_text(), re.M
    )
    assert sorted(linked) == sorted(programs) == sorted({program for _, program in commands})
    report = json.loads((RESULTS / "clients.json").read_text())["clients"]
    assert list(report) == [client for client, _ in commands]
    assert [client for client, result in report.items() if not result["agree"]] == []


def test_the_report_of_foreign_suites():
    """In the report of scripts/suites, each test that only the baseline passes is expected, and has a reason."""
    suites = json.loads((RESULTS / "suites.json").read_text())["suites"]
    assert [name for name, result in suites.items() if result["wrong"] or not result["baseline_passes"]] == []
    assert all(reason for result in suites.values() for reason in result["only_baseline"].values())


def test_ci_runs_readmes_commands():
    """.ci/run contains each bash block of the README unchanged, in the README's order."""
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    script = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    places = [script.index(command) for command in commands]
    assert places == sorted(places)


def test_links_have_targets():
    """Every relative link and picture in the documents names a file; every file of docs/pictures/ is used."""
    documents = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    assert ROOT / "CONTRIBUTING.md" in documents
    unused = set(PICTURES.iterdir())
    for document in documents:
        for target in re.findall(r'(?:\]\(|src="|srcset=")([^)"#:]+)[)"#]', document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
            unused.discard((document.parent / target).resolve())
    assert not unused


def test_architecture_is_short_and_lists_what_exists():
    """ARCHITECTURE.md has at most 2,000 words and 40 terms; the paths that it names exist; it names each folder."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 2000
    assert text.partition("## Glossary")[2].count("\n| ") - 1 <= 40
    package = ROOT / "src" / "crossreduce"
    folders = [path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"]
    homes = [ROOT, ROOT / "src", ROOT / "tests", package, *folders]
    paths = [name for name in re.findall(r"`([\w./]+)`", text) if name.endswith((".py", "/", ".md", ".jsonl", ".cpp"))]
    assert [name for name in paths if not any((home / name).exists() for home in homes)] == []
    assert {f"{path.name}/" for path in folders} <= set(paths)
