"""The typer application: its commands and their common settings."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Annotated, Any, Final

from rich.panel import Panel
from rich.text import Text
from typer import BadParameter, Exit, Option, Typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import ArgumentError, printable
from .bench.command import bench
from .bundle import bundle
from .calibrate import calibrate
from .compare import compare
from .doctor.command import doctor
from .export import export
from .groups import groups
from .info import info
from .plan import plan
from .support.output import INVOKED, terminal
from .support.usage import usage_error
from .top.command import top
from .topology import topology
from .trace import trace
from .train.command import train
from .verify import verify

_TOPOLOGY_FILE: Final = "write the topology with: crossreduce topology MACHINE {} --export machine.json, and plan that"
_OUTPUT: Final = dict.fromkeys(("--output", "--out", "-o"), "crossreduce export MACHINE FILE")
MOVED: Final = {
    "plan": {
        "--export": "crossreduce export MACHINE FILE",
        "--format": "crossreduce export MACHINE FILE --format",
        "--rank": "crossreduce export MACHINE FILE --rank",
        "--granularity": "crossreduce export MACHINE FILE --granularity",
        "--report": "crossreduce export MACHINE plan.html",
        "--picture": "crossreduce export MACHINE plan.svg",
        "--bundle": "crossreduce bundle MACHINE DIR",
        "--groups": 'crossreduce groups MACHINE "0-3;4-7"',
        "--mesh": "crossreduce groups MACHINE 2x8",
        "--weights": "crossreduce groups MACHINE GROUPS --weights",
        "--measured": "crossreduce calibrate MACHINE RESULTS",
        "--measured-algorithm": "crossreduce calibrate MACHINE RESULTS --assume",
        "--speeds": _TOPOLOGY_FILE.format("--speeds effective"),
    }
    | _OUTPUT,
    "export": _OUTPUT,
    "topology": {
        "--measured": "crossreduce calibrate MACHINE RESULTS",
        "--measured-algorithm": "crossreduce calibrate MACHINE RESULTS --assume",
    },
}
"""For each command, options of earlier versions and of other programs, and what to write instead."""

EXAMPLES: Final = {
    "topology": ("topology", "topology dgx-a100 --hosts 2", "topology hgx-h100 --picture machine.svg"),
    "plan": ("plan dgx-1v", "plan dgx-1v --participants 0-4 --nbytes 1M", "plan hgx-h100 --hosts 2 --json"),
    "compare": ("compare dgx-1v dgx-a100", "compare a.json b.json", "compare hgx-h100 mi300x --hosts 2 --nbytes 1M"),
    "groups": (
        'groups dgx-1v "0-3;4-7"',
        "groups hgx-h100 2x8 --hosts 2",
        'groups dgx-1v "0-1;2-7" --weights 1,2.5',
    ),
    "export": (
        "export dgx-1v plan.xml",
        "export hgx-h100 plan.json --format mscclpp",
        "export dgx-1v plan.html --beside one_device",
    ),
    "bundle": (
        "bundle dgx-1v plans",
        "bundle dgx-1v msccl-plans --format msccl",
        "bundle hgx-h100 two-host-plans --hosts 2",
    ),
    "calibrate": (
        "calibrate dgx-1v results.json",
        "calibrate hgx-h100 one.json two.json --hosts 2 --assume ring",
        "calibrate dgx-1v results.json --export fitted.json",
    ),
    "verify": ("verify plan.xml", "verify plans", "verify plan.json --json"),
    "train": ("train", "train --framework torch --devices 4 --live", "train --devices 3 --algorithm ring"),
    "bench": (
        "bench -b 1K -e 64M -f 16",
        "bench --launch 4 --peers gloo,mpi",
        "bench --against jax,torch,numpy --picture ratios.svg",
    ),
    "top": ("top", "top --interval 5 --group 0", "top --once --json"),
    "doctor": ("doctor", "doctor DIR", "doctor DIR --report incident.html"),
    "trace": ("trace DIR", "trace DIR -o trace.json", "trace DIR --run 1 --json"),
    "info": ("info", "info --json", "info --json > info.json"),
}
"""For each command three lines to try, which its help shows."""
_METAVARS: Final = {
    "TYPE": "datatype",
    "BYTES": "maxbytes minbytes nbytes stepbytes",
    "DEVICES": "devices participants",
    "FILE": "export output picture",
    "FORMAT": "format",
    "NETWORK": "nics",
    "OP": "op",
    "PEERS": "peers",
    "RANK": "root rank",
    "W,W": "weights",
    "A,B": "without_link",
    "X": "between_cpus granularity interval operation_us",
    "N": "average batch_size check copies epochs hosts iters num_packs packs pcie per_iter_report seed stepfactor "
    "warmup_iters",
}
"""What stands for the value of an option in its help; for all other options, it is NAME."""


_UsageError: Any = BadParameter.__mro__[1]  # typer has its own classes, or those of click: this depends on its version


class _WithoutTypes:
    """Help that shows no types of Python: flags have no value, and the metavar of an argument says enough."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif not parameter.opts[0].startswith("-"):
                parameter.display_type_rich = _no_type  # newer versions of typer call this
            elif parameter.metavar is None:
                names = (metavar for metavar, options in _METAVARS.items() if parameter.name in options.split())
                parameter.metavar = next(names, "NAME")
        return parameters


def _no_type(ctx: Any) -> None:  # noqa: ARG001 - the signature is typer's
    return None


class Commands(_WithoutTypes, TyperGroup):
    """All commands; their help shows no types either."""


class Command(_WithoutTypes, TyperCommand):
    """A command whose help shows examples. The options in ``MOVED`` are errors that say what to write."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        lines = "\n".join(f"crossreduce {line}" for line in EXAMPLES[self.name or ""])
        terminal().print(Panel(Text(lines), title="Examples", title_align="left", border_style="dim"))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        INVOKED.set(printable(shlex.join(["crossreduce", self.name or "", *args])))
        if self.name in ("bench", "train") and any(
            arg.startswith("--json=") or (arg == "--json" and not after.startswith("-"))
            for arg, after in pairwise([*args, "-"])
        ):
            problem = "--json takes no file: it prints the results as JSON."
            raise ArgumentError.of(problem, shlex.join(args), f"crossreduce {self.name} --output FILE")
        for arg in args:
            option = arg.partition("=")[0]
            if option in MOVED.get(self.name or "", {}):
                raise ArgumentError(f"{self.name} has no {option}.  try: {MOVED[self.name or ''][option]}")
        return super().parse_args(ctx, args)


def run(args: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code.

    Raises:
      ArgumentError: the command line is wrong.
    """
    try:
        return app(args=args, prog_name="crossreduce", standalone_mode=False) or 0
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return int(error.exit_code)
        raise usage_error(error, args, EXAMPLES) from None


app = Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_COMMANDS = (topology, plan, compare, groups, export, bundle, calibrate, verify, train, bench, top, doctor, trace, info)
for command in _COMMANDS:
    app.command(cls=Command)(command)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, Option("-V", "--version", help="Print the version and exit.")] = False) -> None:
    """Cross-device reductions for NumPy, PyTorch, JAX, TensorFlow and CuPy."""
    if version:
        print(f"crossreduce {__version__}")
        raise Exit
