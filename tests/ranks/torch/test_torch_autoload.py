"""Processes that import only torch find the backend through the entry point of the installed package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_running
from paths import ROOT

import crossreduce
from _crossreduce_torch import VARIABLE

pytest.importorskip("torch", minversion="2.5")
RANK = """
import os, sys, torch, torch.distributed as dist

if os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0":  # do now what the import of torch would have done
    before = set(sys.modules)
    torch._import_device_backends()
    assert set(sys.modules) - before == {"_crossreduce_torch"}
assert not [name for name in sys.modules if name.split(".")[0] == "crossreduce"]
made = dist.Backend._plugins["CROSSREDUCE"]
name = "gloo" if os.environ["CROSSREDUCE_FOR_GLOO"] else "crossreduce"
dist.init_process_group(name, f"file://{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
x = torch.tensor([float(1 + dist.get_rank())])
dist.all_reduce(x)
import crossreduce.torch
assert isinstance(dist.group.WORLD, crossreduce.torch.Group)
assert dist.Backend._plugins["CROSSREDUCE"] is made
assert dist.Backend.backend_list.count("crossreduce") == 1
dist.destroy_process_group()
print(x.item())
"""


@pytest.fixture(scope="module")
def entry_point(tmp_path_factory):
    """Return a folder with the metadata of the entry point, which setuptools installs with the package."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200, capture_output=True)
    return folder


@pytest.mark.parametrize("value", ["", "1"])
def test_ranks_that_import_only_torch_find_the_backend(entry_point, tmp_path, value):
    """A rank can make a group by the backend's name without importing crossreduce. A later import registers nothing
    again. With CROSSREDUCE_FOR_GLOO=1 a rank also gets one for gloo. The entry point imports only one small module, and
    not the package, NumPy or the kernels, with the variable and without it."""
    path = os.pathsep.join([str(entry_point), str(Path(crossreduce.__file__).parents[1])])
    variables = [{"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": off, VARIABLE: value} for off in "01"]
    ranks = torch_running.start(["-c", RANK, tmp_path / "store"], 2, variables.__getitem__)
    assert torch_running.finish(ranks, 200) == [(0, "3.0\n")] * 2
