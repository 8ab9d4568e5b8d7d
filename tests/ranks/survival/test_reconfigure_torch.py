"""A group of torch ranks changes in the five ways that torchcomms tests: identity, merge, grow, shrink, both."""

import pytest
from forked_torch import cases_of, expect_passed, ran
from torch_running import HERE

PROGRAM = HERE / "reconfigure_torch.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run reconfigure_torch.py; return the folder with the reports."""
    return ran(PROGRAM, tmp_path_factory.mktemp("reconfigure"))


@pytest.mark.parametrize(("processes", "killed", "name"), cases_of(PROGRAM), ids=lambda value: str(value))
def test_a_group_changes(found, processes, killed, name):
    """Each case of reconfigure_torch.py passes in all processes that it does not kill."""
    expect_passed(found, processes, killed, name)


def test_all_five_cases_are_found():
    """The cases that the test above takes from the source are those of torchcomms."""
    names = [name for _, _, name in cases_of(PROGRAM)]
    assert names == ["identity", "merge_after_a_split", "growth", "shrinkage", "both_at_once"]
