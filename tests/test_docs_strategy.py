"""What docs/pytorch.md and docs/numpy.md say is so: their code, run in a fresh process, prints what they show."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```\s*```\n(.*?)```", re.DOTALL)
MARK = "--- next ---"


@pytest.mark.parametrize(("page", "count"), [("pytorch.md", 3), ("numpy.md", 2)])
def test_page_code_prints_what_the_page_shows(page, count, tmp_path):
    """Each Python block, run in turn in one new process, prints the block that follows it; a trace has events."""
    text = (ROOT / "docs" / page).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") == count
    code = f"\nprint({MARK!r})\n".join(code for code, _ in blocks)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split(MARK + "\n") == [shown for _, shown in blocks]
    for trace in tmp_path.glob("*.trace.json"):
        assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
    assert len(list(tmp_path.iterdir())) == (page == "pytorch.md")
