"""``dist.init_process_group("crossreduce")``: every collective in every form, on ranks that are processes."""

import pytest
from torch_checks import CHECKS
from torch_running import checked


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What three ranks of one host wrote."""
    return checked("torch_checks.py", 3, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """What three ranks wrote of which two share a host, or so they are told."""
    folder = tmp_path_factory.mktemp("apart")
    return checked("torch_checks.py", 3, folder, 200, lambda rank: {"CROSSREDUCE_HOST": "AAB"[rank]})


@pytest.mark.parametrize("name", CHECKS)
def test_on_one_host(found, name):
    """Each check of torch_checks.py holds on every rank."""
    for rank, said in enumerate(found):
        assert name not in said["failed"], f"rank {rank}:\n{said['failed'][name]}"


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_hosts(apart, name):
    """The same holds where the ranks are on two hosts."""
    for rank, said in enumerate(apart):
        assert name not in said["failed"], f"rank {rank}:\n{said['failed'][name]}"


def test_same_bits(found, apart):
    """All ranks get the same bits, and the same text of an error."""
    for ranks in (found, apart):
        assert len(ranks[0]["digests"]) > 100
        assert ranks[0]["digests"] == ranks[1]["digests"] == ranks[2]["digests"]


def test_groups_leave_nothing(found, apart):
    """However many groups were made and destroyed, as many threads and descriptors are left."""
    for ranks in (found, apart):
        for said in ranks:
            assert said["counts"][0] == said["counts"][2]
            assert said["counts"][2][0] == 1  # no Python thread but the first
