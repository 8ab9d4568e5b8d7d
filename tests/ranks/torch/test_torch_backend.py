"""``dist.init_process_group("crossreduce")``: every collective in every form, on several processes."""

import operator

import pytest
from torch_checks import CHECKS
from torch_running import checked


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run torch_checks.py on three ranks of one host; return their reports."""
    return checked("torch_checks.py", 3, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Run torch_checks.py on three ranks of two simulated hosts; return their reports."""
    folder = tmp_path_factory.mktemp("apart")
    return checked("torch_checks.py", 3, folder, 200, lambda rank: {"CROSSREDUCE_HOST": "AAB"[rank]})


@pytest.mark.parametrize("name", CHECKS)
def test_on_one_host(found, name):
    """Each check of torch_checks.py passes on every rank of one host."""
    for rank, report in enumerate(found):
        assert name not in report["failed"], f"rank {rank}:\n{report['failed'][name]}"


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_hosts(apart, name):
    """Each check of torch_checks.py passes on every rank of two hosts."""
    for rank, report in enumerate(apart):
        assert name not in report["failed"], f"rank {rank}:\n{report['failed'][name]}"


def test_same_bits(found, apart):
    """All ranks' results have the same bits, and their errors the same texts."""
    for ranks in (found, apart):
        assert len(ranks[0]["digests"]) > 100
        assert ranks[0]["digests"] == ranks[1]["digests"] == ranks[2]["digests"]


def test_destroyed_groups_release_everything(found, apart):
    """The number of threads and descriptors does not depend on how many groups were made and destroyed."""
    for ranks in (found, apart):
        for report in ranks:
            first, last = report["counts"][0], report["counts"][2]
            assert all(map(operator.le, last, first))  # a thread that frees unused memory ends after some seconds
            assert report["counts"][2][0] == 1  # only the main thread of Python
