"""What the README says is so: its code runs and prints what it shows, its commands are CI's."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("document", "count"), [("README.md", 3), ("docs/host.md", 1)])
def test_code_prints_what_the_document_shows(document, count):
    """Each Python block of a document, run in turn, prints the block that follows it."""
    text = (ROOT / document).read_text()
    blocks = re.findall(r"```python\n(.*?)```\s*```\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") == count
    names = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown


def test_ci_runs_readmes_commands():
    """Each command of the README stands in .ci/run to the letter, in the README's order."""
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    script = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    places = [script.index(command) for command in commands]
    assert places == sorted(places)


def test_links_lead_somewhere():
    """Every relative link in the documents names a file that is there."""
    documents = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_architecture_names_files_that_are_there():
    """Every file and folder that ARCHITECTURE.md's tables name exists."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    for name in re.findall(r"`(tests/\w+\.py)`", tables):
        assert (ROOT / name).exists(), name
    listed = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    for name in re.findall(r"`([\w/.]+)`", " ".join(listed)):
        if name.endswith((".py", "/")):
            assert (ROOT / "src" / "crossreduce" / name).exists() or name == "import crossreduce", name
