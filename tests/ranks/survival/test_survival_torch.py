"""Training goes on in the same processes after ranks have died: plain loops, DDP, FSDP2, and groups of some ranks."""

import pytest
from forked_torch import cases_of, expect_passed, ran
from torch_running import HERE

PROGRAM = HERE / "survival_torch.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run survival_torch.py; return the folder with the reports."""
    return ran(PROGRAM, tmp_path_factory.mktemp("survival"))


@pytest.mark.parametrize(("ranks", "killed", "name"), cases_of(PROGRAM), ids=lambda value: str(value))
def test_survivors_go_on(found, ranks, killed, name):
    """Each case of survival_torch.py passes on all ranks that it does not kill."""
    expect_passed(found, ranks, killed, name)


def test_all_cases_are_found():
    """The cases that the test above takes from the source are all that the program registers."""
    assert len(cases_of(PROGRAM)) == PROGRAM.read_text().count("@CASES.add(") == 9
