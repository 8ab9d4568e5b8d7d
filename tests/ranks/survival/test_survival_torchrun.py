"""Under torchrun, one agent per rank: an agent and its rank are killed, the others continue, a new torchrun joins."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_port import free_port
from torch_running import HERE

PROGRAM = HERE / "survival_torchrun.py"
SECONDS = 300  # for all of it, on a machine with other work


def torchrun(options, *arguments):
    """Start an agent with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "0", *options]
    return subprocess.Popen(
        [*command, str(PROGRAM), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for(condition, agents, deadline):
    """Wait until a condition holds; fail with the output of an agent that has ended before."""
    while not condition():
        ended = [agent for agent in agents if agent.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.05)


def processes(folder):
    """Return the process numbers of the ranks that have begun; a rank of an agent has a session of its own."""
    return [int(path.name.split()[1]) for path in folder.glob("process *") if ".new" not in path.name]


@pytest.mark.system
@pytest.mark.parametrize(("rendezvous", "victim"), [("c10d", "a later one"), ("static", "the first one")])
def test_an_agent_is_killed_and_another_joins(tmp_path, rendezvous, victim):
    """Three agents run a rank each. One agent is killed with its rank; with static rendezvous the first one, which runs
    the store. The others continue as two ranks, until a process of a new agent joins them by an invitation."""
    port, deadline, agents = free_port(), time.monotonic() + SECONDS, []
    for node in range(3):
        options = ["--nnodes", "3", "--node-rank", str(node)]
        if rendezvous == "c10d":
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one"]
            options += ["--rdzv-conf", f"is_host={int(node == 0)}"]
        else:
            options += ["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        agents.append(torchrun(options, tmp_path))
    everyone = list(agents)
    try:
        wait_for(lambda: len(processes(tmp_path)) == 3 and (tmp_path / "step").exists(), agents, deadline)
        killed = agents.pop(0 if victim == "the first one" else 2)
        (rank,) = [pid for pid in processes(tmp_path) if parent(pid) == killed.pid]
        killed.kill()
        os.kill(rank, signal.SIGKILL)
        before = int((tmp_path / "step").read_text())
        wait_for(lambda: int((tmp_path / "step").read_text()) > before + 3, agents, deadline)
        everyone.append(torchrun(["--standalone"], tmp_path, "join"))
        agents.append(everyone[-1])
        output = agents.pop().communicate(timeout=deadline - time.monotonic())[0]
        assert everyone[-1].returncode == 0, output
        # At the end, the other agents wait up to five minutes for the one that was killed.
        wait_for(lambda: not any(parent(pid) for pid in processes(tmp_path)), agents, deadline)
        reports = [json.loads((tmp_path / f"done {rank}").read_text()) for rank in range(3)]
        assert [report["sizes"] for report in reports] == [[3, 2, 3], [3, 2, 3], [3]]
        assert len({report["step"] for report in reports}) == 1
    finally:
        for agent in everyone:
            agent.kill()
        for pid in processes(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in everyone:
            agent.communicate()


def parent(pid):
    """Return the parent of a process; 0: it has ended."""
    with contextlib.suppress(OSError):
        state, found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return 0 if state == "Z" else int(found)
    return 0
