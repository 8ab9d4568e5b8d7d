"""The Python files beside exported plans: register_mscclpp.py with a stand-in of MSCCL++, and measure.py with gloo."""

import json
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

import crossreduce as cr
from crossreduce.export import bundle as bundles
from crossreduce.export.bundle import SIZES, bundle
from crossreduce.export.formats.mscclpp import verify_mscclpp_json
from crossreduce.export.groups import group_files
from crossreduce.export.runners import launch_text
from crossreduce.topology.measurements import read_measurements

NCV4 = cr.Topology.machine("ncv4")


class Algorithm:
    """A stand-in of mscclpp.Algorithm, with the arguments of microsoft/mscclpp, python/mscclpp/_core/algorithm.py."""

    class Constraint:
        def __init__(self, world_size: int = 0, n_ranks_per_node: int = 0):
            self.world_size, self.n_ranks_per_node = world_size, n_ranks_per_node

    def __init__(self, id=None, execution_plan=None, native_handle=None, tags=None, constraint=None):  # noqa: A002
        self.id, self.plan, self.constraint = id, execution_plan, constraint


class AlgorithmCollectionBuilder:
    """A stand-in of the builder of python/mscclpp/ext/algorithm_collection_builder.py, which has one instance."""

    def __init__(self):
        self.algorithms, self.selector = [], None
        builders.append(self)

    def add_algorithm_builder(self, algorithm_builder):
        assert isinstance(algorithm_builder, Algorithm)
        self.algorithms.append(algorithm_builder)

    def set_algorithm_selector(self, selector):
        self.selector = selector


class ExecutionPlan:
    """A stand-in of mscclpp.ExecutionPlan, which reads the part of a rank."""

    def __init__(self, plan_path, rank):
        self.content = json.loads(Path(plan_path).read_text())
        assert 0 <= rank < len(self.content["gpus"])


builders: list[AlgorithmCollectionBuilder] = []


@pytest.fixture(params=["mscclpp", "mscclpp.ext"])
def runtime(request, monkeypatch):
    """Install the stand-in, in which the package itself or mscclpp.ext has the builder."""
    builders.clear()
    package, ext = types.ModuleType("mscclpp"), types.ModuleType("mscclpp.ext")
    package.Algorithm, package.ExecutionPlan, package.ext = Algorithm, ExecutionPlan, ext
    (package if request.param == "mscclpp" else ext).AlgorithmCollectionBuilder = AlgorithmCollectionBuilder
    monkeypatch.setitem(sys.modules, "mscclpp", package)
    monkeypatch.setitem(sys.modules, "mscclpp.ext", ext)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that writes the bundle of a collective of four GPUs into a folder."""
    made = {}

    def folder(collective):
        if collective not in made:
            made[collective] = tmp_path_factory.mktemp(collective)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(bundles, "SIZES", SIZES[::5])
                files = bundle(NCV4, collective).files
            for name, text in files.items():
                (made[collective] / name).parent.mkdir(exist_ok=True)
                (made[collective] / name).write_text(text)
        return made[collective]

    return folder


def request_of(collective, nbytes):
    return types.SimpleNamespace(collective=collective, message_size=nbytes, world_size=4)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_each_call_gets_the_plan_for_its_size(runtime, folders, collective):
    """NCCL calls get the plan whose range has their size. Other collectives and sizes that do not fit get none. The
    size of an all-gather's request is that of one rank's part."""
    folder = folders(collective)
    runpy.run_path(str(folder / "register_mscclpp.py"))["register"]()
    (builder,) = builders
    entries = [e for e in json.loads((folder / "ranks.json").read_text())["files"] if e["format"] == "mscclpp"]
    assert [algorithm.id for algorithm in builder.algorithms] == [entry["file"] for entry in entries]
    assert {vars(algorithm.constraint).values().__repr__() for algorithm in builder.algorithms} == {
        "dict_values([4, 4])"
    }
    kind = collective.replace("_", "")
    names = {algorithm.plan.content["name"]: algorithm for algorithm in builder.algorithms}
    parts = 4 if collective == "all_gather" else 1
    for entry in entries:
        multiple = entry["bytes_multiple_of"]
        nbytes = max(-(-entry["least_bytes"] // multiple), 1) * multiple
        chosen = builder.selector({kind: names}, request_of(kind, nbytes // parts))
        assert chosen.id == entry["file"]
        assert chosen.plan.content["min_message_size"] <= nbytes <= chosen.plan.content["max_message_size"]
    assert builder.selector({kind: names}, request_of("broadcast", 4096)) is None
    assert builder.selector({kind: names}, request_of(kind, 4097)) is None


def test_a_communicator_of_ones_own(runtime, folders, monkeypatch):
    """``select`` returns the algorithm for a size. The number of ranks must be that of the plans."""
    module = runpy.run_path(str(folders("all_reduce") / "register_mscclpp.py"))
    made = module["algorithms"](0)
    assert module["select"](made, 1 << 20).id in made
    assert module["select"](made, 3) is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit, match="the plans are for 4 ranks, but WORLD_SIZE is 8"):
        module["algorithms"](0)


def test_a_single_file_has_files_of_its_own(runtime, printed, tmp_path):
    """``export`` writes both files beside the plan, under names that begin with the plan's."""
    assert "p_register_mscclpp.py, p_measure.py" in printed(
        "export", "ncv4", tmp_path / "p.json", "--format", "mscclpp"
    )
    made = runpy.run_path(str(tmp_path / "p_register_mscclpp.py"))["algorithms"](3)
    assert list(made) == ["p.json"]
    assert "ABOUT = 'p.json.ranks.json'" in (tmp_path / "p_measure.py").read_text()


def test_measured_times_can_be_read_back(folders, tmp_path):
    """measure.py prints planned beside measured times, and writes a report that the library reads."""
    pytest.importorskip("torch")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=4",
        folders("all_gather") / "measure.py",
    ]
    options = ["--json", tmp_path / "results.json", "--least", "1024", "--most", "32768", "--calls", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "measured / planned" in lines[0]
    assert [int(line.split()[0]) for line in lines[1:]] == [1 << k for k in range(10, 16)]
    assert "-" not in lines[1].split()  # 1 KiB has a planned time
    measured = read_measurements((tmp_path / "results.json").read_bytes(), NCV4)
    assert [(each.collective, each.nbytes) for each in measured] == [("all_gather", 1 << k) for k in range(10, 16)]
    assert measured[0].devices == NCV4.devices


def test_each_group_has_a_file_of_its_own_ranks(printed, crossreduce, tmp_path):
    """Groups on a switch keep the common plan. Groups that would need helpers get separate plans, which the files say;
    all files are right. A folder that is not empty is an error before planning."""
    together = group_files(cr.plan_groups("hgx-h100", [range(4), range(4, 8), [0]]))
    about = json.loads(together["groups.json"])
    assert about["planned"] == "together"
    assert [entry.get("file") for entry in about["groups"]] == ["group_0.json", "group_1.json", None]
    assert about["groups"][1]["ranks"] == [f"cuda:{k}" for k in range(4, 8)]
    text = printed("groups", "dgx-1v", "0-3;4-7", "--export", tmp_path / "made")
    assert "planned separately, without helpers" in text
    for name in ("group_0.json", "group_1.json"):
        assert verify_mscclpp_json((tmp_path / "made" / name).read_text()).ngpus == 4
        assert verify_mscclpp_json(together[name]).ngpus == 4
    code, _, error = crossreduce("groups", "dgx-1v", "0-3;4-7", "--export", tmp_path / "made")
    assert code != 0
    assert "it exists and is not an empty folder" in error
    with pytest.raises(cr.PlanError, match="need devices outside of them"):
        group_files(cr.plan_groups("dgx-1v", [[0, 5]]))


def test_the_command_is_for_the_hosts_and_gpus_of_the_plan():
    """The command of a README names the hosts, their processes, and the GPUs if they are not the first ones. For hosts
    of different sizes the number of processes is a letter."""

    def command(*ranks):
        return re.search(r"^ .*torchrun.*", launch_text("msccl", ranks), re.MULTILINE)[0].strip()

    assert command("cuda:0", "cuda:1") == "torchrun --nproc_per_node=2 measure.py --json results.json"
    assert command("cuda:1", "cuda:4").startswith("CUDA_VISIBLE_DEVICES=1,4 torchrun --nproc_per_node=2 ")
    two = command("host0/cuda:0", "host0/cuda:1", "host1/cuda:0", "host1/cuda:1")
    assert two.startswith("torchrun --nnodes=2 --node_rank=N --master_addr=HOST ")
    assert " --nproc_per_node=2 " in two
    assert " --nproc_per_node=P " in command("host0/cuda:0", "host0/cuda:1", "host1/cuda:0")
    assert command("a/cuda:0", "b/cuda:4").startswith("CUDA_VISIBLE_DEVICES=G torchrun --nnodes=2 ")
    assert ", G the numbers of its GPUs:" in launch_text("msccl", ["a/cuda:0", "b/cuda:4"])
