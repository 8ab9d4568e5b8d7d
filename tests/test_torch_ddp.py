"""Training on the backend: DDP, its hook, FSDP2 and what else torch has for several processes."""

import pytest
from torch_running import checked
from torch_training import CHECKS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What three ranks wrote."""
    return checked("torch_training.py", 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_training(found, name):
    """Each check of torch_training.py holds on every rank."""
    for rank, said in enumerate(found):
        assert name not in said["failed"], f"rank {rank}:\n{said['failed'][name]}"
