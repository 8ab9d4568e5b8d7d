"""The example whose ranks are killed while others join, run in a new process; and its checks, which notice faults."""

import json
import re
import subprocess
import sys
from pathlib import Path

from torch_running import HERE

EXAMPLE = HERE.parent / "examples" / "elastic_digits.py"
SECONDS = 400  # on a machine with other work


def run(path, *arguments):
    """Run an example."""
    command = [sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_ranks_are_killed_and_others_join(tmp_path):
    """Two ranks are killed and two processes join; each step is made once, with the losses of an undisturbed run, in
    every bit; 97 % of the digits are recognized, and a chart is drawn."""
    ran = run(EXAMPLE, "--seed", 1, "--json", tmp_path / "report.json", "--chart", tmp_path / "chart.svg")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("the curves agree\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert sorted(event for _, event in report["happened"]) == ["join", "join", "kill", "kill"]
    sizes = report["sizes"]
    assert sizes[0] == sizes[-1] == 4
    assert len(set(sizes)) > 1
    assert len(report["losses"]) == len(sizes) == len(report["undisturbed"]) == 400
    assert report["losses"] == report["undisturbed"]
    assert sum(report["losses"][-20:]) < 0.05 * sum(report["losses"][:20])
    assert report["accuracy"] >= 0.97
    chart = (tmp_path / "chart.svg").read_text()
    assert chart.startswith("<?xml")
    assert len(re.findall(r'id="axes_\d"', chart)) == 2


def test_a_state_that_is_not_received_is_noticed(tmp_path):
    """If the new processes receive the number of the step, but not the weights, the example fails.

    A fourth of its steps are enough for that, though not for an accurate network.
    """
    text, broken = EXAMPLE.read_text(), tmp_path / EXAMPLE.name
    sent = "for x in (known, *(p.detach() for p in self.parameters), *momentum):"
    for old, new in ((sent, "for x in (known, *momentum):"), ("STEPS = 400", "STEPS = 100")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    broken.write_text(text)
    ran = run(broken, "--seed", 1)
    assert ran.returncode == 1
    noticed = "THE CURVES DIFFER", "the ranks end with different networks"
    assert any(words in ran.stdout + ran.stderr for words in noticed), ran.stdout + ran.stderr


def test_options():
    """``--help`` prints the options; an invalid number of ranks is rejected with an error and exit code 2."""
    assert "--chart" in run(EXAMPLE, "--help").stdout
    rejected = run(EXAMPLE, "--replicas", "0")
    assert rejected.returncode == 2
    assert "invalid choice: 0" in rejected.stderr


def test_the_page_shows_a_run_of_the_example():
    """The picture of the how-to page is a chart of the example."""
    page = Path(HERE.parent, "docs", "how-to", "when-a-rank-dies.md").read_text()
    assert "../pictures/elastic.svg" in page
    assert "asks to join" in (HERE.parent / "docs" / "pictures" / "elastic.svg").read_text()
