"""What docs/jax.md says is so: its code runs and prints what it shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from crossreduce import pipeline

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "jax.md").read_text()


@pytest.mark.usefixtures("jax_")
def test_page_code_prints_what_the_page_shows():
    """Each Python block of the page, run in turn, prints the block that follows it."""
    blocks = re.findall(r"```python\n(.*?)```\s*```\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("```python") == 3
    pipeline.say_once.cache_clear()  # a plan that another test has met is new to a reader
    names = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown


def test_page_names_the_thresholds_and_versions_of_the_code(jax_):
    """The bytes below which leaves are joined, and the oldest JAX, are those of the code and of pyproject.toml."""
    from crossreduce.jax import SMALL_BYTES

    assert f"below {SMALL_BYTES >> 10} KiB each" in PAGE
    (oldest,) = re.findall(r'^jax = \["jax>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"It needs JAX {oldest} or later" in PAGE
