"""The program on the page "When a rank dies" does what the page says, if a rank is killed."""

import os
import re
import signal
import time

from torch_running import HERE, finish, start

PAGE = (HERE.parent / "docs" / "how-to" / "when-a-rank-dies.md").read_text()
SECONDS = 200  # on a machine with other work


def test_the_program_of_the_page_goes_on(tmp_path):
    """Of three ranks, rank 0 is killed, which also serves the store. The others continue, to the same loss as alone."""
    program = tmp_path / "train.py"
    program.write_text(re.search(r"```py\n(.*?)```", PAGE, re.DOTALL)[1])
    port = 20000 + os.getpid() % 20000
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = start(["-u", program], 3, lambda rank: address)
    deadline = time.monotonic() + SECONDS
    first = running[0].stdout.readline()
    while "step 0:" not in first:
        assert time.monotonic() < deadline, first
        assert running[0].poll() is None, first
        first = running[0].stdout.readline()
    running[0].send_signal(signal.SIGKILL)
    (killed, _), *others = finish(running, SECONDS)
    assert killed == -signal.SIGKILL
    alone = finish(start([program], 1, lambda rank: address), SECONDS)
    assert alone[0][0] == 0, alone[0][1]
    (want,) = re.findall(r"step 1900: loss ([\d.]+)", alone[0][1])
    means = []
    for status, text in others:
        assert status == 0, text
        assert text.count("ranks (1, 2) continue") == 1
        means.append(float(re.findall(r"step 1900: loss ([\d.]+)", text)[0]))
    assert abs(sum(means) / 2 - float(want)) < 2e-6, (means, want)
