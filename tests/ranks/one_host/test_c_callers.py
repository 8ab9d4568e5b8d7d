"""What docs/processes.md says about callers in C."""

import os
import re
import subprocess
import sys
import sysconfig

import torch_running
from free_port import free_port
from paths import ROOT


def test_the_c_program_of_the_page_sums(tmp_path):
    """The C program on the page, which embeds Python, is compiled without warnings. It sums over two ranks."""
    (program,) = re.findall(r"```c\n(.*?)```", (ROOT / "docs" / "processes.md").read_text(), re.DOTALL)
    source, binary = tmp_path / "sum.c", tmp_path / "sum"
    source.write_text(program)
    folder, version = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDVERSION")
    places = [f"-I{sysconfig.get_path('include')}", f"-L{folder}", f"-Wl,-rpath,{folder}"]
    command = ["gcc", "-Wall", "-Wextra", "-Werror", source, *places, f"-lpython{version}", "-o", binary]
    subprocess.run(command, check=True, timeout=200)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [binary],
            env={**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    assert torch_running.finish(running, 100) == [(0, "1998\n")] * 2
