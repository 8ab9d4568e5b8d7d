"""Processes that import only torch find the backend, by the entry point of the installed distribution."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_running
from paths import ROOT

import crossreduce

pytest.importorskip("torch", minversion="2.5")
MODULES = "import sys, torch, json; json.dump(sorted(sys.modules), sys.stdout)"
RANK = """
import os, sys, torch, torch.distributed as dist

made = dist.Backend._plugins["CROSSREDUCE"]
dist.init_process_group("crossreduce", f"file://{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
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
def path(tmp_path_factory):
    """Return a PYTHONPATH that contains the package, and the metadata that setuptools installs with it."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100, capture_output=True)
    return os.pathsep.join([str(folder), str(Path(crossreduce.__file__).parents[1])])


def test_import_torch_loads_only_a_small_module(path):
    """The entry point adds one module to those of ``import torch``, and none of the package, NumPy or the kernels."""
    loaded = {}
    for switch in ("0", "1"):
        environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": switch}
        ran = subprocess.run([sys.executable, "-c", MODULES], env=environment, capture_output=True, check=True)
        loaded[switch] = set(json.loads(ran.stdout))
    assert loaded["1"] - loaded["0"] == {"_crossreduce_torch"}
    assert not [name for name in loaded["1"] if name.split(".")[0] == "crossreduce"]


def test_ranks_that_import_only_torch_find_the_backend(path, tmp_path):
    """A rank that does not import crossreduce makes a group by its name; a later import registers nothing again."""
    ranks = torch_running.start(["-c", RANK, tmp_path / "store"], 2, lambda _: {"PYTHONPATH": path})
    assert torch_running.finish(ranks, 100) == [(0, "3.0\n")] * 2
