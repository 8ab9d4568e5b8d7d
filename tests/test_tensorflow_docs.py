"""What docs/tensorflow.md shows is so, and examples/keras_digits.py trains."""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import NAMES, load

if "tensorflow" not in NAMES:
    pytest.skip("tensorflow is left out by CROSSREDUCE_TEST_FRAMEWORKS", allow_module_level=True)
load("tensorflow")  # sets up logical devices, once for all tests

from crossreduce import pipeline  # noqa: E402

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tensorflow.md").read_text()


def test_code_prints_what_the_page_shows():
    """Each Python block of the page, run in turn, prints the block that follows it."""
    blocks = re.findall(r"```python\n(.*?)```\s*```\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("```python") == 3
    logger, names = logging.getLogger("crossreduce"), {}
    before = logging.root.handlers[:], logger.level
    pipeline.say_once.cache_clear()  # a plan that another test made is told anew
    pipeline.groups.cache_clear()
    try:
        for code, shown in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            assert printed.getvalue() == shown
    finally:
        logging.root.handlers[:] = before[0]
        logger.setLevel(before[1])


def test_the_command_line_of_the_page_runs(tmp_path):
    """The command that the page names writes the trace."""
    (command,) = re.findall(r"On the command line: `crossreduce (.*?)`", PAGE)
    subprocess.run([sys.executable, "-m", "crossreduce", *command.split()], cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "step.trace.json").stat().st_size > 1000


def test_keras_digits_trains_alike_on_several_replicas_and_on_one():
    """The example ends with 0, having printed that both loss curves agree; with a replica's part lost it would not."""
    command = [sys.executable, str(ROOT / "examples" / "keras_digits.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("the curves agree\n")
    assert "new plan: all_reduce hierarchical_copy: 3 devices" in ran.stderr
