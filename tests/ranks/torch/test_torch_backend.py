"""``dist.init_process_group("crossreduce")`` on several ranks: every collective, exact sums, training."""

import operator
import subprocess
import sys
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_checks
import torch_exact
import torch_group_checks
import torch_oracle
import torch_training
from ranks import ranks

import crossreduce.torch as crt
from crossreduce.errors import ContextError
from crossreduce.torch import op_queue

pytestmark = pytest.mark.usefixtures("torch_optimizers")
COLLECTIVES = torch_checks.CHECKS + torch_group_checks.CHECKS


@pytest.mark.parametrize(
    ("checks", "hosts", "direct"),
    [
        pytest.param(COLLECTIVES, "AAA", (1,), id="collectives-one_host"),
        pytest.param(COLLECTIVES, "AAB", (), id="collectives-two_hosts"),
        pytest.param(torch_exact.CHECKS, "AAA", (), id="exact_sums-one_host"),
        pytest.param(torch_exact.CHECKS, "AAB", (2,), id="exact_sums-two_hosts"),
        pytest.param(torch_training.CHECKS, "AAA", (), id="training"),
    ],
)
def test_all_checks_pass_on_every_rank(tmp_path, checks, hosts, direct):
    """Each check passes on every rank. The results of all ranks have the same bits, and their errors the same texts.
    The number of threads and descriptors does not grow with the number of destroyed groups. Ranks in ``direct`` call
    ``group.all_reduce`` in place of ``dist.all_reduce``: it is the same call."""
    environment = [{"CROSSREDUCE_HOST": host} for host in hosts]
    found = ranks(3, torch_oracle.run, checks, tmp_path, direct, environment=environment)
    for rank, (failed, digests, counts) in enumerate(found):
        assert not failed, "\n".join([f"rank {rank}", *failed])
        assert digests == found[0][1]
        if checks is COLLECTIVES:
            assert len(digests) > 50
            assert all(map(operator.le, counts[2], counts[0]))  # a thread that frees memory may end some seconds later
            assert counts[2][0] == 1  # Python threads


REPEATED = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("crossreduce", f"file://{sys.argv[1]}", rank=0, world_size=1)
kind, in_python = type(dist.group.WORLD.communicator), []
all_reduce = kind.all_reduce
kind.all_reduce = lambda *arguments: (in_python.append(1), all_reduce(*arguments))
for _ in range(5):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print(len(in_python))
"""


def test_a_repeated_call_runs_in_compiled_code(tmp_path):
    """In a program that only calls torch.distributed, the compiled code reads tensors: a repeated call needs no
    Python below it. (In a process in which other tests have run, it may have learned that from their calls.)"""
    command = [sys.executable, "-c", REPEATED, str(tmp_path / "store")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert ran.stdout == "1\n"


@pytest.mark.parametrize("end", ["wait", "get_future"])
def test_tensors_refer_to_their_works_in_earlier_versions_of_torch(monkeypatch, end):
    """With torch 2.4 to 2.6 a work lives until it was waited for, also if only C++ code has it: functional collectives
    would otherwise wait for ever, now and then. After that, no tensor refers to it. A tensor can have several works."""
    monkeypatch.setattr(op_queue, "KEEPS_WORKS", True)
    group = crt.Group(dist.HashStore(), 0, 1, timedelta(seconds=20), "kept")
    x, parts = torch.ones(3), [torch.empty(3)]
    calls = {"allreduce": lambda: group.allreduce([x]), "allgather": lambda: group.allgather([parts], [x])}
    for tensor, call in zip((x, parts[0]), calls.values(), strict=True):
        works = [weakref.ref(call()) for _ in range(2)]
        assert tensor.__dict__["_crossreduce_works"] == [work() for work in works]
        getattr(works[0](), end)()
        assert tensor.__dict__["_crossreduce_works"] == [works[1]()]
        getattr(works[1](), end)()
        assert not tensor.__dict__
    group.shutdown()
    with pytest.raises(
        ContextError, match="was destroyed"
    ):  # and a call that is refused leaves no work, with which x could not be saved
        group.allreduce([x])
    assert not x.__dict__
