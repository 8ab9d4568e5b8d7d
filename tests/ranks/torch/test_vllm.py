"""crossreduce.vllm, with a stand-in for vLLM (support/standins/vllm): communicators of its groups on CPUs."""

import logging
import re
import subprocess
import sys
import tomllib
from importlib import import_module

import namespaces
import pytest
import torch
import torch.distributed as dist
from host_checks import on
from paths import ROOT, SUPPORT
from ranks import ranks

from crossreduce.errors import ArgumentError, MismatchError, UnsupportedError

STANDINS = str(SUPPORT / "standins")
ON, OFF = {"CROSSREDUCE_VLLM": "1"}, {"CROSSREDUCE_VLLM": ""}


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Let the tests, and the ranks that they fork, import the stand-in, and call the plug-in as vLLM does."""
    monkeypatch.syspath_prepend(STANDINS)
    yield import_module("vllm.platforms")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm" or name.startswith("crossreduce.vllm")]:
        del sys.modules[name]


def plug_in():
    """Call what the entry point names."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, function = entries["crossreduce"].split(":")
    getattr(import_module(module), function)()


def begin(rendezvous, address, name="tp:0", groups=None):
    """Do what a worker of vLLM does: call the plug-in, make the default group, and make a group of ranks."""
    plug_in()
    dist.init_process_group("gloo", address, rank=rendezvous.rank, world_size=rendezvous.size)
    parallel_state = import_module("vllm.distributed.parallel_state")
    return parallel_state.GroupCoordinator(groups or [list(range(rendezvous.size))], "gloo", name)


def use(rendezvous, address, bed=None):
    """Use the communicators of a group of all ranks, and of groups of two ranks, as vLLM does."""
    if bed is not None:
        namespaces.enter(bed.holders[rendezvous.rank // 2].pid)
    n, me = rendezvous.size, rendezvous.rank
    tp = begin(rendezvous, address)
    pairs = [[rank, rank + n // 2] for rank in range(n // 2)]
    pp = type(tp)(pairs, "gloo", "pp:0")
    for coordinator in (tp, pp):
        check(coordinator)
    kind = type(tp.device_communicator.device_group).__module__
    tp.destroy()
    pp.destroy()
    dist.destroy_process_group()
    return kind, me


def check(coordinator):
    communicator, me, n = coordinator.device_communicator, coordinator.rank_in_group, coordinator.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        every = [(torch.arange(60).reshape(3, 4, 5) % 7 * (rank + 1)).to(dtype) for rank in range(n)]
        x = every[me].clone()
        with torch.inference_mode():
            assert communicator.all_reduce(x) is x
        assert torch.equal(x, sum(every))
        for dim in (0, 1, -1):
            assert torch.equal(communicator.all_gather(every[me], dim), torch.cat(every, dim))
            for dst in (0, n - 1):
                whole = communicator.gather(every[me], dst, dim)
                assert torch.equal(whole, torch.cat(every, dim)) if me == dst else whole is None
    after, before = (me + 1) % n, (me - 1) % n
    things = [{"x": torch.full((k, 3), k + 0.5), "half": torch.ones(2).half(), "none": torch.ones(0)} for k in range(n)]
    if me % 2:
        communicator.send(every[me])
        communicator.send_tensor_dict(things[me], after)
    received = communicator.recv((3, 4, 5), torch.int64), communicator.recv_tensor_dict(before)
    if me % 2 == 0:
        communicator.send(every[me])
        communicator.send_tensor_dict(things[me], after)
    assert torch.equal(received[0], every[before])
    assert list(received[1]) == list(things[before])
    for got, due in zip(received[1].values(), things[before].values(), strict=True):
        assert got.dtype == due.dtype
        assert torch.equal(got, due)
    with pytest.raises(UnsupportedError, match=r"can only have tensors(?s:.)*'x': 3"):
        communicator.send_tensor_dict({"x": 3}, after)
    assert communicator.supports_tensor_dict
    assert communicator.unique_name == coordinator.unique_name


@pytest.mark.parametrize("environment", [[ON] * 2, [{**ON, **host} for host in on("a", "a", "b", "b")]])
def test_groups_of_vllm_use_crossreduce(tmp_path, environment):
    """Two ranks on a host, and two on each of two hosts: all calls of a communicator have the right results, for a
    group of all ranks as for pairs of ranks."""
    found = ranks(len(environment), use, f"file://{tmp_path}/store", environment=environment)
    assert found == [("crossreduce.torch.group", rank) for rank in range(len(environment))]


@pytest.mark.system
@pytest.mark.skipif(namespaces.available() is not None, reason=f"network namespaces: {namespaces.available()}")
def test_groups_of_vllm_on_two_hosts():
    """The same on two hosts with networks of their own."""
    with namespaces.hosts(2) as bed:
        environment = [{**ON, "GLOO_SOCKET_IFNAME": bed.interface}] * 4
        found = ranks(4, use, f"tcp://{bed.addresses[0]}:29500", bed, environment=environment)
    assert found == [("crossreduce.torch.group", rank) for rank in range(4)]


def compiled(rendezvous, address):
    """Return the results of two layers, compiled as one graph and not compiled."""
    tp = begin(rendezvous, address)
    layers = import_module("vllm.distributed.parallel_state")
    torch.manual_seed(1)
    x, up, down = torch.randn(4, 16), torch.randn(32, 16), torch.randn(16, 32)

    def model(x):
        for _ in range(2):
            x = layers.row_parallel(tp, layers.column_parallel(tp, x, up).relu(), down)
        return x

    calls = []
    graphs = torch.compile(model, fullgraph=True, backend=lambda graph, _: calls.append(graph) or graph)
    with torch.no_grad():
        return torch.equal(model(x), graphs(x)), len(calls), model(x).tolist()


def test_models_are_compiled_as_one_graph(tmp_path):
    """torch.compile makes one graph of layers with sums of ranks, with the results of the layers themselves."""
    found = ranks(2, compiled, f"file://{tmp_path}/store", environment=[ON] * 2)
    assert [rest[:2] for rest in found] == [(True, 1)] * 2
    assert found[0][2] == found[1][2]


def layers_of(rendezvous, address, inputs):
    """Return the results of two layers, whose weights are divided among the ranks, for each input."""
    tp = begin(rendezvous, address)
    layers = import_module("vllm.distributed.parallel_state")
    up, down = torch.eye(8), torch.ones(1, 8)
    return [layers.row_parallel(tp, layers.column_parallel(tp, x, up), down).item() for x in inputs]


def test_exact_sums_do_not_depend_on_the_number_of_ranks_if_the_parts_are_exact(tmp_path):
    """Each rank multiplies its columns, and rounds. If that is exact, exact sums are the same for 2 and 4 ranks, in
    each order of the ranks, on one host and on two. If it is not, they may differ: docs/use-it-with.md says so."""
    exact, rounded = [2.0**22] * 4 + [0.25, 0.5, 0.5, 0.25], [2.0**23] * 2 + [0.5] * 2 + [-(2.0**23)] * 2 + [0.5] * 2
    inputs = [torch.tensor([values]) for values in (exact, exact[::-1], rounded, rounded[::-1])]
    for n in (2, 4):
        environment = [{**ON, "CROSSREDUCE_EXACT": "1", "CROSSREDUCE_HOST": str(rank % 2)} for rank in range(n)]
        found = ranks(n, layers_of, f"file://{tmp_path}/{n}", inputs, environment=environment)
        assert [values[:2] for values in found] == [[2.0**24 + 2] * 2] * n
        assert {value == 2 for values in found for value in values[2:]} == {n == 4}


def refused(rendezvous, address):
    """Return the error that a rank gets. Rank 1 makes the groups of torch only."""
    if rendezvous.rank == 1:
        dist.init_process_group("gloo", address, rank=1, world_size=3)
        for _ in range(2):
            dist.new_group(backend="gloo")
        rendezvous.all_gather(b"")
        return None
    import_module("crossreduce.vllm.communicator")._WAIT_S = 0.5
    with pytest.raises(MismatchError) as caught:
        begin(rendezvous, address)
    rendezvous.all_gather(b"")
    return str(caught.value)


def test_ranks_without_the_variable_are_named(tmp_path):
    """If some ranks of a group do not use crossreduce, the others say which, and what to do. They do not wait for the
    timeout of the group."""
    first, _, last = ranks(3, refused, f"file://{tmp_path}/store", environment=[ON, OFF, ON])
    assert re.search(r"not all ranks of vLLM's group tp:0 use crossreduce", first)
    assert re.search(r"rank 0 does; 1 did not say so(?s:.)*CROSSREDUCE_VLLM=1 on all hosts", first)
    assert "rank 2 does; 1 did not" in last


def test_the_variable_selects_it(monkeypatch, vllm):
    """Without the variable, or with 0, vLLM's own communicator stays; another value is an error."""
    own = vllm.CpuPlatform.get_device_communicator_cls()
    for value in (None, "", "0"):
        monkeypatch.delenv("CROSSREDUCE_VLLM", raising=False)
        if value is not None:
            monkeypatch.setenv("CROSSREDUCE_VLLM", value)
        plug_in()
        assert vllm.current_platform.get_device_communicator_cls() == own
    monkeypatch.setenv("CROSSREDUCE_VLLM", "yes")
    with pytest.raises(ArgumentError, match=r"CROSSREDUCE_VLLM must be 0 or 1(?s:.)*'yes'(?s:.)*CROSSREDUCE_VLLM=1"):
        plug_in()
    monkeypatch.setenv("CROSSREDUCE_VLLM", "1")
    plug_in()
    plug_in()
    chosen = vllm.current_platform.get_device_communicator_cls
    assert (chosen(), chosen.own()) == ("crossreduce.vllm.communicator.CrossreduceCommunicator", own)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("vllm.platforms", "No module named|None in sys.modules"),
        ("vllm.distributed.device_communicators.cpu_communicator", "None in sys.modules"),
        ("get_device_communicator_cls", "get_device_communicator_cls"),
        ("is_cpu", "its platform is CpuPlatform, and crossreduce serves CPUs only"),
    ],
)
def test_other_versions_of_vllm_keep_their_own(monkeypatch, caplog, vllm, missing, text):
    """If vLLM lacks what the communicator needs, or runs on GPUs, its own one is used, and a warning says why."""
    own = vllm.CpuPlatform.get_device_communicator_cls()
    monkeypatch.setenv("CROSSREDUCE_VLLM", "1")
    if missing.startswith("vllm."):
        monkeypatch.setitem(sys.modules, missing, None)
    elif missing == "is_cpu":
        monkeypatch.setattr(vllm.CpuPlatform, "cpu", False)
    else:
        monkeypatch.delattr(vllm.CpuPlatform, missing)
    with caplog.at_level(logging.WARNING, "crossreduce"):
        plug_in()
        if missing != "get_device_communicator_cls":
            assert vllm.current_platform.get_device_communicator_cls() == own
    (record,) = caplog.records
    assert re.search(f"vLLM's own communicator is used in spite of CROSSREDUCE_VLLM=1: .*({text})", record.getMessage())


def test_the_variable_costs_nothing_when_it_is_not_set(monkeypatch):
    """Without the variable, the entry point imports nothing."""
    monkeypatch.delenv("CROSSREDUCE_VLLM", raising=False)
    code = "import sys, _crossreduce_torch as e; had = {*sys.modules}; e.register_vllm(); print({*sys.modules} - had)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
