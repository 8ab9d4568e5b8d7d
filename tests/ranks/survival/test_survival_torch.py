"""Training continues in the same processes after ranks have died: plain loops, DDP, FSDP2, and groups of some ranks.

A group also splits and merges, and grows and shrinks at once, as torchcomms tests it.
"""

import pytest
from forked_torch import cases_of, expect_passed, ran
from torch_running import HERE

PROGRAM = HERE / "survival_torch.py"
SYSTEM = {"hsdp"}
CASES = [
    pytest.param(*case, id=case[-1], marks=[pytest.mark.system] if case[-1] in SYSTEM else [])
    for case in cases_of(PROGRAM)
]


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Run the cases that were collected; return the folder with the reports."""
    own = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    return ran(PROGRAM, tmp_path_factory.mktemp("survival"), [item.callspec.params["name"] for item in own])


@pytest.mark.parametrize(("processes", "killed", "name"), CASES)
def test_survivors_go_on(reports, processes, killed, name):
    """Each case of survival_torch.py passes in all processes that it does not kill."""
    expect_passed(reports, processes, killed, name)


def test_all_cases_are_found():
    """The cases that the test above takes from the source are all that the program registers."""
    assert len(CASES) == PROGRAM.read_text().count("@CASES.add(") == 7
