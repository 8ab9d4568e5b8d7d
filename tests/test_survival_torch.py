"""Training goes on in the same processes after ranks have died: plain loops, DDP, FSDP2, and groups of some ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_running import HERE

PROGRAM = HERE / "survival_torch.py"
CASES = re.findall(r"^@case\((\d), \(([\d, ]*)\)\)\ndef (\w+)", PROGRAM.read_text(), re.M)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run survival_torch.py; return the folder with the reports."""
    folder = tmp_path_factory.mktemp("survival")
    ran = subprocess.run(
        [sys.executable, PROGRAM, folder], cwd=HERE, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.parametrize(("ranks", "killed", "name"), CASES, ids=[name for _, _, name in CASES])
def test_survivors_go_on(found, ranks, killed, name):
    """Each case of survival_torch.py passes on all ranks that it does not kill; those write no report."""
    killed = {int(rank) for rank in re.findall(r"\d", killed)}
    for rank in range(int(ranks)):
        report = Path(found, f"{name} {rank}.json")
        assert report.exists() == (rank not in killed), f"rank {rank}"
        if report.exists():
            failed = json.loads(report.read_text())["failed"]
            assert failed is None, f"rank {rank}:\n{failed}"
