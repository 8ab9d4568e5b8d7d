"""How a process group ends: with its process, by a signal, by another rank's death."""

import signal

import pytest
from torch_running import HERE, finish, start

PROGRAM = HERE / "torch_endings.py"
SCENES = ["unfinished_in_gloo", "ends_during_gloo", "interrupted", "destroyed_with_a_pending_op", "composed", "late"]
SCENES += ["interrupted_in_backward", "interrupted_in_recv"]


@pytest.mark.parametrize(
    ("scene", "killed"),
    [
        *((scene, None) for scene in SCENES),
        pytest.param("late_for_one_call", None, marks=pytest.mark.system),
        ("killed_in_backward", 1),
        pytest.param("killed_in_hook", 1, marks=pytest.mark.system),
    ],
)
def test_scene(tmp_path, scene, killed):
    """Every rank runs a scene of torch_endings.py to its end, and its process then exits with status 0, or is killed.

    When a rank is killed in the backward pass, that of the others raises PeerLostError.
    """
    for rank, (status, text) in enumerate(finish(start([PROGRAM, scene, tmp_path], 3), 150)):
        assert status == (-signal.SIGKILL if rank == killed else 0), f"rank {rank} ended with {status}:\n{text}"
        assert (tmp_path / f"{scene}-{rank}").exists() == (rank != killed)


def test_debug_detail(tmp_path):
    """Ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL, which torch reads when it is imported, run and end as without it."""
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    outputs = finish(start(["-u", PROGRAM, "without_destroy", tmp_path], 2, lambda rank: environment), 60)
    assert [status for status, _ in outputs] == [0, 0], outputs
