"""Documents agree with the code: their examples print the shown output, CI runs the README's commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


BLOCK = re.compile(r"```python\n(.*?)```\s*```\n(.*?)```", re.DOTALL)
MARK = "--- next block ---"
DOCUMENTS = {
    "README.md": 3,
    "docs/host.md": 1,
    "docs/numpy.md": 2,
    "docs/pytorch.md": 3,
    "docs/jax.md": 3,
    "docs/tensorflow.md": 3,
    "docs/processes.md": 1,
}


@pytest.mark.parametrize(("document", "count"), DOCUMENTS.items())
def test_code_prints_what_the_document_shows(document, count, tmp_path):
    """Each Python block prints the block that follows it; the blocks of a document run in one new process."""
    text = (ROOT / document).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") == count
    code = f"\nprint({MARK!r})\n".join(code for code, _ in blocks)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_", "XLA_"))}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=inherited, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split(MARK + "\n") == [shown for _, shown in blocks]
    for trace in tmp_path.iterdir():
        assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])


def test_command_lines_on_the_frameworks_pages_write_traces(tmp_path):
    """Each ``crossreduce plan`` command for a trace on a framework's page writes a trace."""
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("pytorch", "jax", "tensorflow"))
    commands = re.findall(r"`crossreduce (plan .*?--export (\S+?))`", pages)
    assert len(commands) == 3
    for command, file in commands:
        subprocess.run([sys.executable, "-m", "crossreduce", *command.split()], cwd=tmp_path, check=True, timeout=100)
        assert json.loads((tmp_path / file).read_text())["traceEvents"]


def test_the_page_on_jax_has_the_thresholds_and_versions_of_the_code(jax_):
    """The size below which leaves are joined and the oldest JAX are those of the code and of pyproject.toml."""
    from crossreduce.jax import SMALL_BYTES

    page = (ROOT / "docs" / "jax.md").read_text()
    assert f"below {SMALL_BYTES >> 10} KiB each" in page
    (oldest,) = re.findall(r'^jax = \["jax>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"It needs JAX {oldest} or later" in page


def test_ci_runs_readmes_commands():
    """.ci/run contains each command of the README unchanged, in the README's order."""
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    script = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    places = [script.index(command) for command in commands]
    assert places == sorted(places)


def test_links_have_targets():
    """Every relative link in the documents names an existing file."""
    documents = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_architecture_lists_existing_files():
    """Every file and folder in the tables of ARCHITECTURE.md exists."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    for name in re.findall(r"`(tests/\w+\.py)`", tables):
        assert (ROOT / name).exists(), name
    listed = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    for name in re.findall(r"`([\w/.]+)`", " ".join(listed)):
        if name.endswith((".py", "/")):
            assert (ROOT / "src" / "crossreduce" / name).exists() or name == "import crossreduce", name
