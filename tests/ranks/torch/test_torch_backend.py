"""``dist.init_process_group("crossreduce")`` on several processes: every collective, exact sums, training."""

import functools
import operator

import pytest
import torch_checks
import torch_exact
import torch_training
from torch_running import checked

PROGRAMS = [(torch_checks, "AAA"), (torch_checks, "AAB"), (torch_exact, "AAA"), (torch_exact, "AAB")]
PROGRAMS += [(torch_training, "AAA")]


@pytest.fixture(scope="module")
def reports_of(tmp_path_factory):
    """Return a function that runs a program on three ranks, on the hosts of these names, and returns their reports."""

    @functools.cache
    def run(program, hosts):
        folder = tmp_path_factory.mktemp(hosts)
        environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
        return checked(f"{program.__name__}.py", len(hosts), folder, 200, lambda rank: environment[rank])

    return run


@pytest.mark.parametrize(
    ("program", "hosts", "name"),
    [
        pytest.param(program, hosts, name, id=f"{program.__name__} {hosts} {name}")
        for program, hosts in PROGRAMS
        for name in program.CHECKS
    ],
)
def test_check(reports_of, program, hosts, name):
    """Each check of torch_checks.py, torch_exact.py and torch_training.py passes on every rank of one or two hosts."""
    for rank, report in enumerate(reports_of(program, hosts)):
        assert name not in report["failed"], f"rank {rank}:\n{report['failed'][name]}"


@pytest.mark.parametrize("hosts", ["AAA", "AAB"])
def test_same_bits(reports_of, hosts):
    """All ranks' results have the same bits, and their errors the same texts."""
    first, *others = (report["digests"] for report in reports_of(torch_checks, hosts))
    assert len(first) > 100
    assert others == [first] * 2


@pytest.mark.parametrize("hosts", ["AAA", "AAB"])
def test_destroyed_groups_release_everything(reports_of, hosts):
    """The number of threads and descriptors does not depend on how many groups were made and destroyed."""
    for report in reports_of(torch_checks, hosts):
        first, last = report["counts"][0], report["counts"][2]
        assert all(map(operator.le, last, first))  # a thread that frees unused memory ends after some seconds
        assert last[0] == 1  # only the main thread of Python
