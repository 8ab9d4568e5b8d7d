"""A process of ``crossreduce bench --against``: it times crossreduce and one peer in turn.

``python -m crossreduce.cli.bench.contest REQUEST PEER FOLDER [keep]`` writes FOLDER/times.json: for each size the times
of crossreduce and of the peer. REQUEST is JSON. JAX, TensorFlow, torch and numpy run in one process, the others in
ranks, which ``launch`` or mpiexec starts. With ``keep`` the C library keeps freed memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ... import AllReduceCrossDeviceOps, PerReplica, keep_memory
from ...errors import ReductionError
from ..train.trainers import load
from . import exact
from .ranks import MPIS, OURS, Backend, MpiBackend, TorchBackend, combine_times
from .ranks import PEERS as RANK_PEERS
from .request import BenchRequest

LEAST_S: Final = 0.02  # faster calls are timed together, so that one measurement takes about this long
REST_S: Final = 0.005  # a pause before a measurement, since OpenMP's threads still use the CPU after their work


class Contender(NamedTuple):
    """A way to all-reduce arrays of one size.

    Args:
      run: the function that is timed; it returns when the results are computed.
      count_wrong: runs once and returns how many elements of the results are wrong.
      one_result: whether the devices' results share memory.
    """

    run: Callable[[], object]
    count_wrong: Callable[[], int]
    one_result: bool = False


def times(
    contenders: dict[str, Contender], request: BenchRequest, gather: Callable[[Any], list[Any]] = lambda value: [value]
) -> dict[str, list[float]]:
    """Return, for each contender, the seconds of a call in each round. In a round, each contender is timed once.

    ``gather`` returns the values of all ranks. Their times are combined according to ``request.average``.
    """
    calls, seconds = {}, {}
    for name, contender in contenders.items():
        warm_up_s = _seconds_per_call(contender.run, max(1, request.warmup_iters))
        calls[name] = gather(max(1, min(2000, int(LEAST_S / warm_up_s))))[0]  # rank 0's number, for all ranks
        seconds[name] = list[float]()
    for _ in range(request.iterations):
        for name, contender in contenders.items():
            time.sleep(REST_S)
            gather(None)  # a barrier
            seconds[name].append(combine_times(request, gather(_seconds_per_call(contender.run, calls[name]))))
    return seconds


def _seconds_per_call(run: Callable[[], object], calls: int) -> float:
    before = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - before) / calls


def row(size: int, contenders: dict[str, Contender], measured: dict[str, list[float]], wrong: Iterable[int]) -> Any:
    """Return the measurement of one size for the JSON file."""
    return {
        "size": size,
        "contenders": {
            name: {"times_s": measured[name], "one_result": contender.one_result, "nwrong": count}
            for (name, contender), count in zip(contenders.items(), wrong, strict=True)
        },
    }


def in_process(request: BenchRequest, peer: str) -> Iterator[dict[str, Any]]:
    """Yield a row per size: the times of a peer's own ways, and of crossreduce on arrays of ``request.framework``."""
    theirs, ours = load(peer, request.devices), load(request.framework, request.devices)
    ops = AllReduceCrossDeviceOps(request.algorithms[0], request.num_packs)
    op, devices, options = request.op, request.devices, request.options
    patterns = exact.inputs(op, request.dtype, len(devices))
    reduced = exact.result(op, patterns)

    def contender(trainer: Any, reduce: Callable[[], Iterable[Any]], count: int, one_result: bool = False) -> Contender:
        def run() -> None:
            trainer.wait(list(reduce()))

        def count_wrong() -> int:
            return sum(exact.wrong(trainer.get(x), reduced, count) for x in reduce())

        return Contender(run, count_wrong, one_result)

    def put(trainer: Any, count: int) -> list[Any]:
        return [trainer.put(np.resize(x, count), device) for x, device in zip(patterns, devices, strict=True)]

    for size, count in request.counts():
        value = PerReplica(put(ours, count), devices)
        contenders = {OURS: contender(ours, partial(ops.reduce, op, value, value, options), count)}
        for name, way in theirs.own_ways(op, put(theirs, count), devices).items():
            try:
                contenders[name] = contender(theirs, way.run, count, way.one_result)
                contenders[name].run()
            except NotImplementedError:  # the framework has no such operation for this dtype
                del contenders[name]
        wrong = [each.count_wrong() for each in contenders.values()]
        yield row(size, contenders, times(contenders, request), wrong)


def in_ranks(request: BenchRequest, peer: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per size, on rank 0 only: the in-place times of crossreduce's torch backend and of a peer's ranks."""
    import torch.distributed as dist

    from ...torch import Options

    theirs: Backend | None = MpiBackend() if peer in MPIS else None
    rank = int(os.environ["RANK"]) if theirs is None else theirs.rank
    n, rendezvous = len(request.devices), f"file://{folder}/rendezvous"
    dist.init_process_group(OURS, init_method=rendezvous, rank=rank, world_size=n, pg_options=Options(request.exact))
    try:
        control = dist.new_group(backend="gloo")
        backends: dict[str, Backend] = {OURS: TorchBackend(dist.group.WORLD, control)}
        backends[peer] = theirs or TorchBackend(dist.new_group(backend=peer), control)
        gather = backends[OURS].gather
        patterns = exact.inputs(request.op, request.dtype, n, True)  # True: for ranks
        reduced = exact.result(request.op, patterns, True)
        for size, count in request.counts():
            contenders = {
                name: _rank_contender(backend, request, np.resize(patterns[rank], count), reduced)
                for name, backend in backends.items()
            }
            wrong = [sum(gather(each.count_wrong())) for each in contenders.values()]
            measured = times(contenders, request, gather)
            if rank == 0:
                yield row(size, contenders, measured, wrong)
    finally:
        dist.destroy_process_group()


def _rank_contender(backend: Backend, request: BenchRequest, inputs: Any, reduced: Any) -> Contender:
    """Return the all-reduce in place of this rank's array ``inputs``. ``reduced``: the pattern of the right result."""

    def call(x: Any) -> Callable[[], None]:
        return backend.call("all_reduce", request.op, x, x, root=0, in_place=True)

    def count_wrong() -> int:
        source = backend.array(inputs)
        call(source)()
        return exact.wrong(backend.numpy(source), reduced, inputs.size)

    return Contender(call(backend.array(inputs)), count_wrong)


def main(text: str, peer: str, place: str, *settings: str) -> None:
    """Measure a peer, and write times.json into the folder ``place``. ``text``: the request as JSON."""
    if "keep" in settings:
        keep_memory()
    # TensorFlow's default on x86, which ``load`` changes: with oneDNN, TensorFlow has an allocator that keeps memory.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    request, folder = BenchRequest.from_json(text), Path(place)
    rows = list(in_ranks(request, peer, folder) if peer in RANK_PEERS else in_process(request, peer))
    if rows:
        (folder / "times.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ReductionError as error:
        sys.exit(f"crossreduce: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
