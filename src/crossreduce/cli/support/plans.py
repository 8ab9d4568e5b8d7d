"""Options that describe one plan, the same in every command that plans, and the plan that they describe.

Input: a command, and the names of options that it does not have. Output: the command with all others, which gets a
``PlanRequest``; the plan of a request, as text or JSON.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

from typer import Option

from ... import Costs, GroupsPlan, Plan, Topology, __version__
from ... import plan as library_plan
from ...errors import ArgumentError, printable
from ...options import ALGORITHMS
from ...packing import MOST_PACKS
from ...planning.explain import shape, wrapped
from ...planning.optimal.bounds import COLLECTIVES
from ...planning.schedules import CHOICES, REGISTRY
from .arguments import (
    in_range,
    one_of,
    read_beside,
    read_costs,
    read_machine,
    read_nbytes,
    read_node,
    read_subset,
    say_unused,
)
from .output import INVOKED, bound_json, rate_json, text_width
from .topologies import BetweenCpus, Devices, Gpu, Hosts, InNetwork, Machine, Nics, Pcie, WithoutLink, select

NBYTES: Final = "64M"

Collective = Annotated[str, Option(help=", ".join(COLLECTIVES))]
Nbytes = Annotated[str, Option(help="Bytes of the buffer: 64, 8K, 64M, 1G.")]
Algorithm = Annotated[str, Option(help=", ".join(ALGORITHMS))]
Root = Annotated[str | None, Option(help="Number or name. Default: the best.")]
Packs = Annotated[int, Option(help="Number of trees, for one_device and hierarchical_copy.")]
Participants = Annotated[
    str | None,
    Option(help="Devices that take part: 0-3,6; others only help. Default: all."),
]
CostsOption = Annotated[
    str | None,
    Option(
        "--costs",
        metavar="FILE|published",
        help="A file of Costs.to_json, or the published costs of the machine.",
    ),
]
OperationUs = Annotated[
    float | None,
    Option(help="Microseconds to queue an operation. Default: 2 on CUDA, 0 on others and in files for other programs."),
]
Granularity = Annotated[
    float | None,
    Option(
        help="Percent by which rounded shares, which fit messages of more sizes, may slow down the plan. "
        "Default: 2 in MSCCL and MSCCL++ files, else 0."
    ),
]

_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {  # the type and the default of each option, in the order of --help
    "collective": (Collective, "all_reduce"),
    "nbytes": (Nbytes, NBYTES),
    "algorithm": (Algorithm, "auto"),
    "root": (Root, None),
    "packs": (Packs, 1),
    "participants": (Participants, None),
    "devices": (Devices, None),
    "without_link": (WithoutLink, None),
    "hosts": (Hosts, 1),
    "in_network": (InNetwork, False),
    "nics": (Nics, None),
    "gpu": (Gpu, None),
    "pcie": (Pcie, None),
    "between_cpus": (BetweenCpus, None),
    "costs": (CostsOption, None),
    "operation_us": (OperationUs, None),
}


class PlanRequest(NamedTuple):
    """The values of a command's plan options: the requested plan, and the topology for it."""

    machine: str
    hosts: int
    nics: str | None
    devices: str | None
    without_link: list[str] | None
    complete: Topology  # before devices and links were removed; the number of a device is its position here
    topology: Topology
    collective: str
    nbytes: int
    algorithm: str
    root: str | None
    participants: tuple[str, ...] | None
    packs: int
    costs: Costs

    @property
    def label(self) -> str:
        """The machine, the number of hosts, and whether some devices or links were removed."""
        label = f"{self.machine}, {self.hosts} hosts" if self.hosts > 1 else self.machine
        return printable(label) + ("" if self.topology == self.complete else ", only a part of it")

    def part_of(self, complete: Topology) -> Topology:
        """Return a topology without the devices and links that ``--devices`` and ``--without-link`` remove."""
        return select(complete, self.devices, self.without_link)

    def beside(self, name: str) -> PlanRequest:
        """Return the same request for another algorithm, or for another machine or file, as one to compare with.

        The devices and lost links are those of this request, and for a machine or a table the number of hosts.
        """
        with suppress(ArgumentError):
            return self._replace(algorithm=one_of(ALGORITHMS, "--beside", name))
        try:
            complete = read_beside(name, self.hosts, self.nics, self.machine)
            topology = self.part_of(complete)
        except ArgumentError as error:
            error.prefix(f"--beside {name}")
            raise
        return self._replace(machine=name, complete=complete, topology=topology)

    def for_one_kernel(self) -> PlanRequest:
        """Return the request for a plan that runs as one kernel: queuing operations costs nothing by default."""
        return self if self.costs.operation_s is not None else self._replace(costs=replace(self.costs, operation_s=0))

    def plan(self, *, granularity: float = 0.0, costs: Costs | None = None) -> Plan:
        """Return the plan for the request. ``costs`` replaces the costs of the request."""
        return library_plan(
            self.topology,
            self.collective,
            self.nbytes,
            self.algorithm,
            root=self.root,
            participants=self.participants,
            packs=self.packs,
            costs=self.costs if costs is None else costs,
            granularity=granularity,
        )


def plan_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the machine and the options of a plan, except ``without``, to a command.

    The first parameter of the command gets a ``PlanRequest``. The machine becomes the first argument, and the options
    come before the last option of the command, ``--json``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = {name: option for name, option in _OPTIONS.items() if name not in without}

        @wraps(command)
        def run(machine: str, **values: Any) -> None:
            options = {name: values.pop(name, default) for name, (_, default) in _OPTIONS.items()}
            command(read_plan_request(machine, **options), **values)

        # typer reads the arguments and options of a command from its signature, so ``run`` gets the combined one.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        types = get_type_hints(command, include_extras=True)
        _request, *command_parameters, json_option = (
            each.replace(annotation=types[name]) for name, each in inspect.signature(command).parameters.items()
        )
        added = [
            inspect.Parameter(name, kind, annotation=type_, default=value) for name, (type_, value) in shared.items()
        ]
        machine_parameter = inspect.Parameter("machine", kind, annotation=Machine)
        parameters = [machine_parameter, *command_parameters, *added, json_option]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def read_plan_request(
    machine: str,
    *,
    collective: str,
    nbytes: str,
    algorithm: str,
    root: str | None,
    packs: int,
    participants: str | None,
    devices: str | None,
    without_link: list[str] | None,
    hosts: int,
    in_network: bool,
    nics: str | None,
    gpu: str | None,
    pcie: int | None,
    between_cpus: float | None,
    costs: str | None,
    operation_us: float | None,
) -> PlanRequest:
    """Check the values of the options, and return the request that they describe."""
    collective = one_of(COLLECTIVES, "--collective", collective)
    algorithm = one_of(ALGORITHMS, "--algorithm", algorithm)
    if operation_us is not None and not 0 <= operation_us <= 1e6:
        problem = "--operation-us must be a number of microseconds from 0 to 1000000."
        raise ArgumentError.of(problem, str(operation_us), "--operation-us 2")
    size = read_nbytes("--nbytes", nbytes)
    in_range("--packs", packs, 1, MOST_PACKS)
    known: dict[str, Any] = {"gpu": gpu, "pcie": pcie, "between_cpus": between_cpus}
    complete = read_machine(machine, hosts, nics=nics, in_network=in_network, **known)
    topology = select(complete, devices, without_link)
    if packs > 1 and algorithm not in CHOICES and not REGISTRY[algorithm].has_root:
        say_unused("--packs", f"{algorithm} has no roots")
    root_node = None if root is None else read_node("--root", root, complete)
    members = None if participants is None else read_subset("--participants", participants, topology)
    if members is not None and set(members) == set(topology.devices):
        say_unused("--participants", "it lists all devices")
    all_costs = read_costs(costs, machine, hosts, nics)
    if operation_us is not None:
        all_costs = replace(all_costs, operation_s=operation_us / 1e6)
    return PlanRequest(
        machine=machine,
        hosts=hosts,
        nics=nics,
        devices=devices,
        without_link=without_link,
        complete=complete,
        topology=topology,
        collective=collective,
        nbytes=size,
        algorithm=algorithm,
        root=root_node,
        participants=members,
        packs=packs,
        costs=all_costs,
    )


def read_granularity(percent: float | None, default: float) -> float:
    """Return the granularity as a share of the rate: ``percent`` / 100, or ``default`` if ``percent`` is ``None``.

    >>> read_granularity(5, 0.02), read_granularity(None, 0.02)
    (0.05, 0.02)
    """
    if percent is None:
        return default
    if not 0 <= percent <= 100:
        problem = "--granularity must be a percentage from 0 to 100."
        raise ArgumentError.of(problem, str(percent), "--granularity 2")
    return percent / 100


def plan_json(machine: str, plan: Plan, *, with_steps: bool = False) -> dict[str, Any]:
    """Return the properties of a plan as a dict for JSON, on request with its schedule."""
    schedule, trees = plan.schedule, shape(plan.schedule)
    report = {
        "crossreduce": __version__,
        "machine": machine,
        "collective": plan.collective,
        "nbytes": plan.nbytes,
        "devices": plan.bound.devices,
        "ranks": plan.ranks,
        "helpers": plan.helpers,
        "algorithm": plan.algorithm,
        "seconds": plan.seconds,
        "algbw_gb_per_s": plan.algbw,
        "rate": rate_json(plan.rate),
        "bound": bound_json(plan.bound),
        "assumed": plan.topology.assumed,
        "ratio": {"exact": str(plan.ratio), "value": float(plan.ratio)},
        "roots": trees.roots,
        "depth": trees.depth,
        "chunks": schedule.chunk_count,
        "rounds": schedule.round_count,
        "steps": schedule.steps,
        "pieces": schedule.pieces,
        "others": {
            name: {"seconds": seconds, "rate": rate_json(rate)} for name, (seconds, rate) in plan.others().items()
        },
    }
    return report | ({"schedule": json.loads(schedule.to_json())} if with_steps else {})


def plan_text(request: PlanRequest, plan: Plan | GroupsPlan, lines: dict[str, str]) -> str:
    """Return the explanation of a plan or of plans for groups, with its machine, the command and ``lines``.

    ``lines`` has texts by their labels. The text fits the terminal.
    """
    width = text_width()
    head, *rest = plan.explain(width).splitlines()
    while rest and rest[0].startswith(" " * 12):  # of a head that is wrapped
        head += f"\n{rest.pop(0)}"
    about = {"machine": request.label, "command": INVOKED.get()}
    first, last = ([f"  {label:<10}{line}" for label, line in part.items()] for part in (about, lines))
    return "\n".join([head, wrapped(first, width), *rest, *([wrapped(last, width)] if last else [])])
