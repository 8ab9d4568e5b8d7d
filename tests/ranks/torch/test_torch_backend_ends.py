"""How a process group ends: with its process, by a signal, by another rank's death, under torchrun."""

import os
import signal
import subprocess
import sys

import pytest
from torch_running import HERE, finish, start

PROGRAM = HERE / "torch_endings.py"


@pytest.mark.parametrize(
    "scene",
    [
        "without_destroy",
        "unfinished",
        "unfinished_in_gloo",
        "ends_during_gloo",
        "left_by_one_rank",
        "destroyed_with_a_pending_op",
        "interrupted",
        "interrupted_in_backward",
        "interrupted_in_recv",
        "late",
        "late_for_one_call",
        "composed",
    ],
)
def test_scene(tmp_path, scene):
    """Every rank runs a scene of torch_endings.py to its end, and its process then exits with status 0."""
    for rank, (status, text) in enumerate(finish(start([PROGRAM, scene, tmp_path], 3), 60)):
        assert status == 0, f"rank {rank} ended with {status}:\n{text}"
        assert (tmp_path / f"{scene}-{rank}").exists()


@pytest.mark.parametrize("scene", ["killed_in_backward", "killed_in_hook"])
def test_killed(tmp_path, scene):
    """When a rank is killed, the others' backward() raises PeerLostError within seconds."""
    outputs = finish(start([PROGRAM, scene, tmp_path], 3), 60)
    assert outputs[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        assert outputs[rank][0] == 0, f"rank {rank}:\n{outputs[rank][1]}"


def test_debug_detail(tmp_path):
    """Ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL run and end as without it."""
    detail = start([PROGRAM, "without_destroy", tmp_path], 2, lambda rank: {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    outputs = finish(detail, 60)
    assert [status for status, _ in outputs] == [0, 0], outputs


def test_torchrun(tmp_path):
    """torchrun can start the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = {**os.environ, "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(PROGRAM), "launched", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1", "rank2"]
