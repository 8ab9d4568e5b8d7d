"""Training on the backend: DDP, its hook, FSDP2 and torch's other tools for several processes."""

import pytest
from torch_running import checked
from torch_training import CHECKS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run torch_training.py on three ranks; return their reports."""
    return checked("torch_training.py", 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_training(found, name):
    """Each check of torch_training.py passes on every rank."""
    for rank, report in enumerate(found):
        assert name not in report["failed"], f"rank {rank}:\n{report['failed'][name]}"
