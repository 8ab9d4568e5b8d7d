"""Collectives of torch tensors that overlap, in every form, compared with an oracle on copies."""

import sys

import pytest
from fleets import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st
from overlaps import FORMS, cases, check
from torch_running import HERE


@pytest.fixture(scope="module", params=["AA", "AAA", "AB", "AAB"])
def ranks(request, tmp_path_factory):
    """Start a group of ranks on one host, or on two simulated ones; return its ``Fleet`` and its size."""
    folder, n = tmp_path_factory.mktemp("ranks"), len(request.param)
    environments = [
        {"RANK": str(rank), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "CROSSREDUCE_HOST": request.param[rank]}
        for rank in range(n)
    ]
    command = [sys.executable, str(HERE / "torch_overlap.py"), str(folder)]
    fleet = Fleet([command] * n, environments, folder / "log")
    yield fleet, n
    statuses = fleet.finish()
    assert not any(statuses), (folder / "log").read_text()


@settings(max_examples=int(__import__("os").environ.get("N", "150")))
@given(data=st.data())
def test_every_overlap_gives_right_values_or_an_error_on_all_ranks(ranks, data):
    """Each collective gives what it gives on copies; if results share memory, all ranks raise before any writes."""
    fleet, n = ranks
    case = data.draw(cases(n, FORMS))
    check(case, fleet.run(case))
