"""CROSSREDUCE_FOR_GLOO: requests for gloo on CPUs get groups of crossreduce, and programs see no other difference."""

import inspect
import logging
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import Moment, ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import _crossreduce_torch as entry
import crossreduce.torch as crt
from _crossreduce_torch import VARIABLE
from crossreduce.errors import ArgumentError, BackendError, CollectiveTimeout, MismatchError, UnsupportedError

ON, OFF = {VARIABLE: "1"}, {VARIABLE: ""}
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
REAL = c10d._new_process_group_helper.__wrapped__  # torch's function
BUILT_IN = {"GLOO", "NCCL", "MPI", "UCC", "XCCL", "FAKE"} if TORCH >= (2, 15) else set()  # plug-ins of torch itself


def begin(rendezvous, folder, backend="gloo", **options):
    """Make the default group, and return this rank's number."""
    rank, size = rendezvous.rank, rendezvous.size
    for other in {*c10d.Backend._plugins} - BUILT_IN - {"CROSSREDUCE"}:  # of tests in the process that forked this one
        del c10d.Backend._plugins[other]
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=size, **options)
    return rank


def total(group=None):
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x, group=group)
    return x.item()


def names(group=None):
    """Return what a program can read of a group's backend."""
    own = (group or dist.group.WORLD)._get_backend_name()
    own = "gloo" if TORCH < (2, 5) and own in ("undefined", "cpu:gloo") else own  # torch 2.4 repeats the request
    return dist.get_backend(group), dist.get_backend_config(group), own


def requests(rendezvous, folder, backend):
    """Make groups in every way. Return the class, the names, and a sum of each."""
    begin(rendezvous, folder, backend)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group(backend="gloo"), mesh["a"].get_group()]
    groups += [dist.new_subgroups(1)[0], dist.new_group([0, 1], use_local_synchronization=True, group_desc="x")]
    return [(type(group).__name__, *names(group), total(group)) for group in groups]


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo"])
def test_every_request_for_gloo_gets_a_group(tmp_path, backend):
    """Whatever way a program asks for gloo, it gets a group of crossreduce. The names are those of torch with gloo."""
    results = {}
    for value in ("", "1"):
        (folder := tmp_path / f"at{value}").mkdir()
        results[value] = ranks(2, requests, folder, backend, environment=[{VARIABLE: value}] * 2)
    assert {kind for rank in results["1"] for kind, *_ in rank} == {"Group"}
    assert {kind for rank in results[""] for kind, *_ in rank} == {"ProcessGroup"}
    without_kinds = [[[rest for _, *rest in rank] for rank in found] for found in results.values()]
    assert without_kinds[0] == without_kinds[1]


def splits(rendezvous, folder):
    rank = begin(rendezvous, folder)
    first = dist.group.WORLD.split_group([0, 2], timeout=timedelta(seconds=20), group_name="split")
    if rank == 1:
        return first
    first.allreduce([x := torch.tensor([rank + 1.0])]).wait()
    second = first.split_group([first.rank()])
    second.allreduce([x]).wait()
    return first.rank(), first.group_name, first._get_backend_name(), second.rank(), second.size(), x.item()


def test_groups_are_split(tmp_path):
    """A group can be split, as one of gloo. The parts are groups of crossreduce."""
    first, second, third = ranks(3, splits, tmp_path, environment=[ON] * 3)
    assert (first, second, third) == ((0, "split", "gloo", 0, 1, 4.0), None, (1, "split", "gloo", 0, 1, 4.0))


def names_of_groups(rendezvous, folder, backend):
    begin(rendezvous, folder, backend)
    return names(), names(dist.new_group()), names(dist.new_group(backend="gloo")), dist.monitored_barrier()


def test_with_the_value_name_groups_have_the_name_crossreduce(tmp_path):
    """CROSSREDUCE_FOR_GLOO=name shows the name of the backend that runs. monitored_barrier works in spite of it."""
    (found, _) = ranks(2, names_of_groups, tmp_path, "gloo", environment=[{VARIABLE: "name"}] * 2)
    expected = "crossreduce", "cpu:crossreduce,cuda:crossreduce", "crossreduce"
    assert found == (expected, expected, expected, None)


def with_nccl_by_name(rendezvous, folder):
    begin(rendezvous, folder, "cuda:nccl,cpu:gloo")
    return type(dist.group.WORLD).__name__, dist.get_backend(), total()


def test_a_request_for_gloo_beside_nccl(tmp_path):
    """The CPUs' part of "cpu:gloo,cuda:nccl" is crossreduce in any order of the devices."""
    assert ranks(2, with_nccl_by_name, tmp_path, environment=[ON] * 2) == [("Group", "cuda:nccl,cpu:gloo", 3.0)] * 2


def logged(rendezvous, folder):
    """Make three groups, the last with gloo's options. Return the lines about the variable, and the groups' classes."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("crossreduce")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    begin(rendezvous, folder)
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._timeout = [dist.ProcessGroupGloo.create_device("127.0.0.1")], timedelta(seconds=100)
    groups = [dist.new_group(), dist.new_group(pg_options=options), dist.new_group(pg_options=crt.Options(exact=True))]
    entry._announce_direct_groups(dist.ProcessGroupGloo)
    store = dist.PrefixStore("direct", c10d._get_default_store())
    # It is kept until all ranks have used it: gloo fails if a rank closes connections while another still makes them.
    direct = dist.ProcessGroupGloo(store, rendezvous.rank, 2, timedelta(seconds=100))
    direct.allreduce([torch.ones(1)]).wait()
    lines = [(record.levelname, record.getMessage()) for record in records if "GLOO" in record.getMessage()]
    return lines, [(type(group).__name__, dist.get_backend(group), total(group)) for group in groups]


def test_gloo_stays_where_only_gloo_will_do(tmp_path):
    """One INFO line says that the variable is in effect. Options that are made for gloo, and a ProcessGroupGloo that a
    program makes itself, keep gloo, and a line says why."""
    (lines, groups), _ = ranks(2, logged, tmp_path, environment=[ON] * 2)
    assert lines[0] == ("INFO", f"{VARIABLE}=1: groups that request gloo on CPUs are groups of crossreduce")
    assert [level for level, _ in lines[1:]] == ["WARNING"] * 2
    assert lines[1][1].startswith(f"gloo runs in spite of {VARIABLE}=1: ")
    assert "ProcessGroupGloo._Options" in lines[1][1]
    assert "test_for_gloo makes a ProcessGroupGloo" in lines[2][1]
    assert groups == [("Group", "gloo", 3.0), ("ProcessGroup", "gloo", 3.0), ("Group", "gloo", 3.0)]


def lists_of_tensors(rendezvous, folder):
    """Call the collectives that accept several tensors per rank only in gloo. Return the results."""
    rank = begin(rendezvous, folder)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    sums, copies = ([torch.full((2,), 10.0 * k + rank) for k in (1, 2)] for _ in range(2))
    gathered = [[torch.zeros(2) for _ in range(4)] for _ in range(2)]
    group = dist.group.WORLD
    group.allgather(gathered, sums).wait()
    group.broadcast(copies, options).wait()
    group.allreduce(sums).wait()
    if isinstance(group, crt.Group):
        with pytest.raises(MismatchError, match="allreduce of 2 tensors per rank"):
            group.allreduce(sums[: 1 + rank]).wait()
    return [[x.tolist() for x in each] for each in (*gathered, sums, copies)]


def test_several_tensors_per_rank(tmp_path):
    """Calls with several tensors per rank, which only gloo has, run in gloo. If ranks differ in it, all learn that."""
    results = []
    for number, variables in enumerate((ON, OFF)):
        (folder := tmp_path / str(number)).mkdir()
        results.append(ranks(2, lists_of_tensors, folder, environment=[variables] * 2))
    assert results[0] == results[1]


def unsupported(rendezvous, folder, backend):
    """Make calls that crossreduce does not support. Return the last lines of their errors."""
    begin(rendezvous, folder, backend)
    ones, where = torch.ones(2), torch.device("meta")
    calls = [
        lambda: dist.all_reduce(ones.to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(ones, dist.ReduceOp.BAND, async_op=True).wait(),
        lambda: dist.all_reduce(ones.to(where)),
        lambda: dist.send(ones.to(where), 1 - dist.get_rank()),
    ]
    texts = []
    for call in calls:
        with pytest.raises(UnsupportedError) as caught:
            call()
        texts.append(str(caught.value).splitlines()[-1])
    return texts


@pytest.mark.parametrize(("variables", "ends"), [(ON, True), (OFF, False)])
def test_errors_say_how_to_go_back_to_gloo(tmp_path, variables, ends):
    """If a call is not supported, the error names gloo as one remedy, but only where the variable has replaced it."""
    for texts in ranks(2, unsupported, tmp_path, "gloo" if ends else "crossreduce", environment=[variables] * 2):
        assert [text.count(f"; or gloo: unset {VARIABLE}") for text in texts] == [ends] * 4, texts


def uneven_gather(rendezvous, folder):
    """Gather rows of an uneven last batch, as Lightning does: each rank expects parts of its own size."""
    rank = begin(rendezvous, folder)
    rows = torch.ones(3 - rank, 2)
    with pytest.raises(MismatchError) as caught:
        dist.all_gather([torch.empty_like(rows) for _ in range(2)], rows)
    return str(caught.value).splitlines()[-1], total()


def test_an_uneven_all_gather_says_what_to_do(tmp_path):
    """The error names padding and accelerate's function. The group can still be used."""
    for text, after in ranks(2, uneven_gather, tmp_path, environment=[ON] * 2):
        assert "pad the arrays" in text
        assert "gather_for_metrics" in text
        assert after == 3.0


def late_rank(rendezvous, folder):
    rank = begin(rendezvous, folder)
    dist.monitored_barrier(timeout=timedelta(seconds=100), wait_all_ranks=True)
    late = None
    if rank != 1:
        with pytest.raises(CollectiveTimeout) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5))
        late = caught.value.ranks
    rendezvous.all_gather(b"")  # until then, rank 1 lives
    return late


def test_monitored_barrier_names_late_ranks(tmp_path):
    assert ranks(3, late_rank, tmp_path, environment=[ON] * 3) == [(1,), None, (1,)]


def compiled(rendezvous, folder):
    rank = begin(rendezvous, folder)

    def doubled(x):
        y = 2 * x
        dist.all_reduce(y)
        return functional.all_reduce(y + 1, "sum", dist.group.WORLD)

    return torch.compile(doubled, backend="eager", fullgraph=True)(torch.ones(2) * (rank + 1)).tolist()


def test_compiled_functions(tmp_path):
    """torch.compile traces collectives of the default group, in their functional forms, too."""
    assert ranks(2, compiled, tmp_path, environment=[ON] * 2) == [[14.0, 14.0]] * 2


def shrinks(rendezvous, folder):
    begin(rendezvous, folder)
    group = crt.shrink(dist.new_group([0, 1]))
    found = [(names(group)[::2], total(group))]
    crt.shrink()
    return [*found, (names()[::2], total())]


def test_groups_that_are_formed_again_keep_the_name(tmp_path):
    assert ranks(2, shrinks, tmp_path, environment=[ON] * 2) == [[(("gloo", "gloo"), 3.0)] * 2] * 2


def attempt(rendezvous, folder, begins=begin):
    """Return the class and text of the error that this rank gets. The test ends long before the group's timeout."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        begins(rendezvous, folder, timeout=timedelta(seconds=1000))
    return type(caught.value), str(caught.value)


def without_library(rendezvous, folder, **options):
    """Make the default group as a process does in which crossreduce is not installed."""
    c10d._new_process_group_helper = REAL
    begin(rendezvous, folder, **options)
    total()


def attempt_with_or_without(rendezvous, folder, lacks):
    return attempt(rendezvous, folder, without_library if rendezvous.rank in lacks else begin)


@pytest.mark.parametrize("values", ["100", "2100", "0200"])
def test_ranks_that_differ_in_the_variable(tmp_path, values):
    """If some ranks have the variable and others have not, all of them say so within seconds."""
    began = Moment()
    found = ranks(len(values), attempt, tmp_path, environment=[{VARIABLE: value} for value in values])
    assert Moment().seconds_since(began) < 20  # a rank that ends the wait in gloo twice waits for 25 s
    invalid = "2" in values
    for kind, text in found:
        assert kind in ((ArgumentError, MismatchError) if invalid else (MismatchError,)), found
        assert f"{VARIABLE} must be 0, 1 or name." in text or f"the same {VARIABLE}, on all ranks" in text


def test_a_rank_without_the_library(tmp_path):
    """A rank that has gloo, and no crossreduce, does not wait for the timeout either. gloo raises an error there."""
    found = ranks(3, attempt_with_or_without, tmp_path, {1}, environment=[ON] * 3)
    assert [kind for kind, _ in found] == [MismatchError, RuntimeError, MismatchError]
    assert found[0][1].startswith("not all ranks make the group with the same backend: gloo on rank")
    assert "Connection" in found[1][1]


@pytest.mark.parametrize("value", ["2", "yes"])
def test_another_value_is_an_error_that_lists_the_values(tmp_path, value):
    """All ranks raise the error of the rank with the invalid value."""
    found = ranks(2, attempt, tmp_path, environment=[{VARIABLE: value}, ON])
    for kind, text in found:
        assert kind is ArgumentError
        assert text == f"rank 0: {VARIABLE} must be 0, 1 or name.\n  given: {value!r} (str)\n  try:   {VARIABLE}=1"


# Other versions of torch


def torch_with(**changes):
    """Return a stand-in for torch's module of groups, whose function returns its arguments."""

    def make(group_size, group_rank, ranks, backend, store, group_name, backend_options=None, enable_reconfigure=False):
        return backend, backend_options

    world = types.SimpleNamespace(pg_map={}, pg_backend_config={})
    stand_in = types.SimpleNamespace(
        _new_process_group_helper=make, _world=world, Backend=c10d.Backend, BackendConfig=c10d.BackendConfig
    )
    vars(stand_in).update(changes)
    return stand_in


def changed(group_size, where, backend_name):
    return backend_name, None


CALL = (1, 0, [], "gloo", None, "name")


@pytest.mark.parametrize(
    ("changes", "arguments", "reason"),
    [
        ({"_new_process_group_helper": changed}, (1, None, "gloo"), "makes process groups in another way"),
        ({"_world": types.SimpleNamespace()}, CALL, "it has no pg_backend_config, pg_map"),
        ({"BackendConfig": None}, CALL, "TypeError"),
        ({"_use_torchcomms_enabled": lambda: True}, CALL, "torchcomms"),
        ({}, (1, 0, [], "cpu:gloo,cuda:ucc", None, "name"), '"cuda:ucc"'),
        ({}, (*CALL, None, True), "enable_reconfigure"),
        ({}, (*CALL, object()), "(object)"),
    ],
)
def test_gloo_runs_if_torch_is_not_as_expected(changes, arguments, reason, monkeypatch, caplog):
    """If torch's function has changed, or a request needs more than crossreduce has, gloo runs, and a line says so."""
    monkeypatch.setenv(VARIABLE, "1")
    entry.say.cache_clear()
    groups = torch_with(**changes)
    make = entry._wrapped(groups._new_process_group_helper, groups)
    with caplog.at_level(logging.INFO, "crossreduce"):
        backend, _ = make(*arguments)
    assert backend == arguments[2 if changes and len(arguments) == 3 else 3]
    (line,) = (record for record in caplog.records if VARIABLE in record.getMessage())
    assert line.levelname == "WARNING"
    assert reason in line.getMessage()


def test_a_torch_without_the_function(monkeypatch, caplog):
    """If torch's function is gone, only the variable does not work: the backend is registered, and a line says so."""
    monkeypatch.setenv(VARIABLE, "1")
    entry.say.cache_clear()
    registered = []
    backend = types.SimpleNamespace(register_backend=lambda *arguments, **_: registered.append(arguments[0]))
    for name, value in (("Backend", backend), ("distributed_c10d", types.SimpleNamespace())):
        monkeypatch.setattr(dist, name, value)
    with caplog.at_level(logging.INFO, "crossreduce"):
        entry.register()
    assert registered == ["crossreduce"]
    assert "it has no _new_process_group_helper" in caplog.text


def test_the_wrapped_function_has_the_parameters_that_are_read():
    """The installed torch is one that the variable works with."""
    parameters = inspect.signature(REAL).parameters
    assert set(parameters) >= entry._NEEDED
    assert {"backend_options", "pg_options"} & set(parameters)


def one_rank(rendezvous, folder, backend):
    begin(rendezvous, folder, backend)
    total()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:crossreduce"])
def test_torch_does_not_warn_because_of_the_library(tmp_path, backend, capfd):
    """A group of "cpu:gloo" ends without torch's warning that it has no backend, which another plug-in would cause."""
    assert c10d.Backend._plugins["CROSSREDUCE"]
    ranks(1, one_rank, tmp_path, backend, environment=[OFF])
    assert "No backend of type" not in capfd.readouterr().err


def test_destroyed_groups_are_shut_down_with_an_earlier_torch():
    """torch 2.4 shuts down only NCCL when a group is destroyed. There ours is shut down, too."""
    ended, other = [], types.SimpleNamespace()
    ours = type("Ours", (), {"__module__": crt.Group.__module__, "shutdown": lambda _: ended.append("shutdown")})()
    for group in (ours, other):
        entry._shutdown_of_ours(ended.append)(group)
    assert ended == ["shutdown", ours, other]


class OfAnotherTorch(crt.Group):
    """A group whose rank is that of a backend with one rank, as in torch from 2.14 on."""

    def rank(self):
        return 1


def test_a_torch_that_reports_another_rank_is_an_error():
    """If torch reports another rank or size than a group was made with, making the group is an error. Programs would
    otherwise divide their data wrongly."""
    with pytest.raises(
        BackendError, match=r"another rank or size(.|\n)*rank 1 of 1 for rank 0 of 1(.|\n)*torch 2.4, or 2.13"
    ):
        OfAnotherTorch(dist.HashStore(), 0, 1, timedelta(seconds=20), "odd")
