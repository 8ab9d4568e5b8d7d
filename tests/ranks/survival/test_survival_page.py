"""The programs on the page "When a rank dies" continue, as the page says, when a rank is killed."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from free_port import free_port
from paths import ROOT
from torch_running import finish, start

PAGE = (ROOT / "docs" / "how-to" / "when-a-rank-dies.md").read_text()
SECONDS = 200  # the limit of a test, on a machine with other work


def program_of(heading, folder):
    """Write the first program below a heading of the page to a file, and return its path."""
    program = folder / "train.py"
    program.write_text(re.search(r"```py\n(.*?)```", PAGE.partition(f"# {heading}\n")[2], re.DOTALL)[1])
    return program


def killed_at_first(program, address):
    """Run a program on three ranks, kill rank 0 in its first step, and return the output of the others."""
    running = start(["-u", program], 3, lambda rank: address)
    deadline = time.monotonic() + SECONDS
    first = running[0].stdout.readline()
    while "step 0" not in first:
        assert time.monotonic() < deadline, first
        assert running[0].poll() is None, first
        first = running[0].stdout.readline()
    running[0].send_signal(signal.SIGKILL)
    (killed, _), *others = finish(running, SECONDS)
    assert killed == -signal.SIGKILL
    for status, text in others:
        assert status == 0, text
        assert text.count("ranks (1, 2) continue") == 1
    return [text for _, text in others]


def killed_with_its_agent(agents, outputs, victim):
    """Kill an agent of torchrun and its rank when all ranks have begun. Wait until the others have finished."""
    deadline = time.monotonic() + SECONDS

    def wait_for(text, nodes):
        while not all(text in outputs[node].read_text() for node in nodes):
            assert time.monotonic() < deadline, [each.read_text() for each in outputs]
            time.sleep(0.05)

    wait_for("step 0", range(3))
    for pid in (agents[victim].pid, *children(agents[victim].pid)):
        os.kill(pid, signal.SIGKILL)
    wait_for("step 1900: loss", {0, 1, 2} - {victim})


def children(pid):
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def new_address():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.system
def test_the_program_of_the_page_goes_on(tmp_path):
    """Of three ranks, rank 0, which serves the store, is killed. The others reach the loss of one process alone."""
    program, address = program_of("A loop that continues", tmp_path), new_address()
    others = killed_at_first(program, address)
    alone = finish(start([program], 1, lambda rank: address), SECONDS)
    assert alone[0][0] == 0, alone[0][1]
    (want,) = re.findall(r"step 1900: loss ([\d.]+)", alone[0][1])
    means = [float(re.findall(r"step 1900: loss ([\d.]+)", text)[0]) for text in others]
    assert abs(sum(means) / 2 - float(want)) < 2e-6, (means, want)


@pytest.mark.system
@pytest.mark.parametrize(("rendezvous", "victim"), [("static", 0), ("c10d", 2)])
def test_the_program_goes_on_under_torchrun(tmp_path, rendezvous, victim):
    """Three agents of torchrun run a rank each, and one agent is killed with its rank. With static rendezvous this is
    the first agent, which runs the store. The other ranks continue, and their agents do not end them."""
    program, port, agents = program_of("A loop that continues", tmp_path), str(free_port()), []
    outputs = [tmp_path / f"output{node}" for node in range(3)]
    try:
        for node, output in enumerate(outputs):
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "0"]
            command += ["--nnodes", "3", "--node-rank", str(node), "--rdzv-backend", rendezvous]
            if rendezvous == "c10d":
                command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one"]
                command += ["--rdzv-conf", f"is_host={int(node == 0)}"]
            else:
                command += ["--master-addr", "127.0.0.1", "--master-port", port]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            with output.open("w") as opened:
                started = subprocess.Popen([*command, program], env=environment, stdout=opened, stderr=opened)
            agents.append(started)
        killed_with_its_agent(agents, outputs, victim)
    finally:
        for agent in agents:  # they would wait for the one that was killed for five minutes
            for pid in children(agent.pid) if agent.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.kill()
            agent.wait()
    for node in {0, 1, 2} - {victim}:
        assert outputs[node].read_text().count(f"ranks {tuple({0, 1, 2} - {victim})} continue") == 1


def test_the_numpy_program_of_the_page_goes_on(tmp_path):
    """Of three NumPy ranks, rank 0, at whose address they met, is killed. The others reach the right weights."""
    for text in killed_at_first(program_of("NumPy, without PyTorch", tmp_path), new_address()):
        assert re.search(r"^step 1800, 2 ranks: [\d.]+e-1\d$", text, re.MULTILINE), text  # the error of the weights


@pytest.mark.system
def test_the_numpy_program_of_the_page_lets_a_process_in(tmp_path):
    """A process that reads the invitation of two NumPy ranks joins them, and all three end with the same weights. Only
    this user can read the invitation."""
    program = program_of("New NumPy processes", tmp_path)
    text = program.read_text()
    assert text.count("while step < 2000:") == 1
    program.write_text(text.replace("while step < 2000:", "while is_new or group.size < 3 or step % 500:"))
    address = new_address()
    running = start(["-u", program], 2, lambda rank: address)
    deadline = time.monotonic() + SECONDS
    while not (invitation := tmp_path / "invitation").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stat.S_IMODE(invitation.stat().st_mode) == 0o600
    running += start(["-u", program, "new"], 1, lambda rank: {})
    ended = finish(running, SECONDS)
    for status, output in ended:
        assert status == 0, output
    last = {output.splitlines()[-1] for _, output in ended}
    assert len(last) == 1, last
    assert re.fullmatch(r"step \d+, 3 ranks: [\d.]+e-\d+", last.pop())
