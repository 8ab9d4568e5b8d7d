"""Topologies by name and path, and devices by number, wherever the library takes them."""

import numpy as np
import pytest

import crossreduce as cr
from crossreduce import ArgumentError, DeviceError, Topology
from crossreduce.export.formats.nccl_graph import to_nccl_graph_xml
from crossreduce.export.formats.trace import to_chrome_trace
from crossreduce.export.pictures import draw_schedule, draw_topology
from crossreduce.topology import topology_of

DGX = Topology.machine("dgx-1v")
GPUS = DGX.devices


def ways_to_give_it(folder):
    """Return names and paths that stand for a DGX-1. Its files are written to ``folder``, the current folder."""
    for name in ("box.json", "box"):
        (folder / name).write_text(DGX.to_json())
    return "dgx-1v", "DGX-1", folder / "box.json", f"{folder}/box.json", "box"


def test_every_function_takes_it(tmp_path, monkeypatch):
    """Planning, bounds, simulation, exports and pictures accept a name or path in place of the topology."""
    monkeypatch.chdir(tmp_path)
    for given in ways_to_give_it(tmp_path):
        assert topology_of(given) == DGX
        assert cr.plan(given, "broadcast", "1M") == cr.plan(DGX, "broadcast", 1 << 20)
    assert cr.bound(given, "all_reduce") == cr.bound(DGX, "all_reduce")  # the last way, a file called "box"
    schedule = cr.plan(DGX, algorithm="ring").schedule
    assert cr.simulate(schedule, given, "64M") == cr.simulate(schedule, DGX, 1 << 26)
    assert to_chrome_trace(schedule, given, "64K") == to_chrome_trace(schedule, DGX, 1 << 16)
    assert to_nccl_graph_xml(schedule, given) == to_nccl_graph_xml(schedule, DGX)
    for draw in (draw_topology, lambda topology, path: draw_schedule(schedule, topology, path)):
        draw(given, tmp_path / "a.svg")
        draw(DGX, tmp_path / "b.svg")
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_every_op_takes_it(tmp_path):
    """Ops (also for TensorFlow) and ``crossreduce.jax.all_reduce`` accept a name or path in place of a topology."""
    import jax

    import crossreduce.jax
    import crossreduce.tensorflow as crt

    name, _, path, *_ = ways_to_give_it(tmp_path)
    value = cr.PerReplica([np.full(3, 2.0**k) for k in range(8)])  # the sum is 255
    for op in (cr.AllReduceCrossDeviceOps("forest", topology=name), cr.HierarchicalCopyAllReduce(topology=path)):
        assert repr(DGX) in repr(op)
        assert op.reduce("sum", value, value)[7].tolist() == [255.0] * 3
    assert repr(DGX) in repr(crt.HierarchicalCopyAllReduce(topology=path))
    reduced = jax.vmap(lambda x: crossreduce.jax.all_reduce(x, "i", "sum", name), axis_name="i")(2.0 ** np.arange(8))
    assert reduced.tolist() == [255.0] * 8


def test_what_gives_no_topology(tmp_path):
    """Other objects, unknown machines and missing files raise errors with a remedy or name. "this" is this machine."""
    assert topology_of("this") == Topology.discover()
    for wrong in (None, 3, b"dgx-1v", ["dgx-1v"], DGX.links, Topology):
        with pytest.raises(ArgumentError, match=r"this is not a topology\.\n  given: [\s\S]*name of a machine"):
            topology_of(wrong)
    with pytest.raises(ArgumentError, match=r"there is no machine of this name[\s\S]*dgx-1v"):
        cr.plan("dgx-1w")
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*none\.json'"):
        cr.plan(tmp_path / "none.json")


def test_devices_by_number():
    """A number k is the k-th device of the topology, also if the devices' own numbers differ."""
    part = DGX.subset([6, "cuda:2", np.int64(0)])
    assert part == DGX.subset(["cuda:6", "cuda:2", "cuda:0"])
    assert part.subset(range(2)) == DGX.subset(["cuda:6", "cuda:2"])
    assert DGX.without_link(0, 3) == DGX.without_link("cuda:0", 3) == DGX.without_link("cuda:0", "cuda:3")
    assert DGX.link(0, 3) == DGX.link("cuda:0", "cuda:3")
    numbered = cr.plan(DGX, nbytes="8K", algorithm="direct", sources=[0, 1, 2], destinations=range(3))
    assert numbered == cr.plan(DGX, nbytes=8192, algorithm="direct", sources=GPUS[:3], destinations=GPUS[:3])
    assert cr.plan(DGX, "broadcast", root=2) == cr.plan(DGX, "broadcast", root="cuda:2")
    assert cr.bound(DGX, "reduce", 2, range(4)) == cr.bound(DGX, "reduce", "cuda:2", GPUS[:4])
    assert cr.bound(DGX, "reduce", {2: 1, 3: 5}) == cr.bound(DGX, "reduce", {"cuda:2": 1, "cuda:3": 5})


@pytest.mark.parametrize("wrong", [8, -1, True, 1.0, b"0", ["cuda:0"]])
def test_numbers_of_no_device(wrong):
    """A number that no device has, or an object of another type, raises a DeviceError with the valid numbers."""
    calls = [lambda: DGX.subset([0, wrong]), lambda: DGX.without_link(0, wrong)]
    calls += [lambda: cr.plan(DGX, sources=[0, wrong]), lambda: cr.plan(DGX, "reduce", root=wrong)]
    for call in calls:
        with pytest.raises(DeviceError, match=r"not a device, by name or number\.[\s\S]*a number from 0 to 7"):
            call()
    with pytest.raises(DeviceError, match="a number from 0 to 2"):  # switches have no numbers
        Topology.star(3).without_link(0, 3)


def test_a_plan_says_how_to_run_it():
    """``explain`` names the op that runs the plan. If no op runs the collective, it says to export the plan."""
    for collective in ("all_reduce", "reduce", "broadcast"):
        plan = cr.plan(DGX, collective, algorithm="one_device")
        assert 'to run    AllReduceCrossDeviceOps("one_device", topology=...) plans and runs' in plan.explain()
    for collective in ("reduce_scatter", "all_gather"):
        assert "to run    export it for another tool" in cr.plan(DGX, collective).explain()
