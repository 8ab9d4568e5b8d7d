"""Exact sums of torch tensors, on one host and on two."""

import pytest
from torch_exact import CHECKS
from torch_running import checked


@pytest.fixture(scope="module", params=["AAA", "AAB"])
def found(request, tmp_path_factory):
    """Run torch_exact.py on three ranks; return their reports."""
    folder = tmp_path_factory.mktemp(request.param)
    return checked("torch_exact.py", 3, folder, environment=lambda rank: {"CROSSREDUCE_HOST": request.param[rank]})


@pytest.mark.parametrize("name", CHECKS)
def test_exact_sums(found, name):
    """Each check of torch_exact.py passes on every rank."""
    for rank, report in enumerate(found):
        assert name not in report["failed"], f"rank {rank}:\n{report['failed'][name]}"
