"""The typer application: its commands and their common settings."""

from __future__ import annotations

from typing import Annotated, Any, Final

from typer import Exit, Option, Typer
from typer.core import TyperCommand

from .. import __version__
from ..errors import ArgumentError
from .bench.command import bench
from .bundle import bundle
from .calibrate import calibrate
from .doctor.command import doctor
from .export import export
from .groups import groups
from .info import info
from .plan import plan
from .top.command import top
from .topology import topology
from .trace import trace
from .train.command import train
from .verify import verify

_TOPOLOGY_FILE: Final = "write the topology with: crossreduce topology MACHINE {} --export machine.json, and plan that"
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
    },
    "topology": {
        "--measured": "crossreduce calibrate MACHINE RESULTS",
        "--measured-algorithm": "crossreduce calibrate MACHINE RESULTS --assume",
    },
}
"""For each command, the options of earlier versions, and what to write instead."""


class Command(TyperCommand):
    """A command that rejects options of earlier versions with an error that names the new spelling."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for arg in args:
            option = arg.partition("=")[0]
            if option in MOVED.get(self.name or "", {}):
                raise ArgumentError(f"{self.name} has no {option}.  try: {MOVED[self.name or ''][option]}")
        return super().parse_args(ctx, args)


app = Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # without frames, the help of each command fits a screen of 50 lines
)
_COMMANDS = (topology, plan, groups, export, bundle, calibrate, verify, train, bench, top, doctor, trace, info)
for command in _COMMANDS:
    app.command(cls=Command)(command)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    """Cross-device reductions for NumPy, PyTorch, JAX, TensorFlow and CuPy."""
    if version:
        print(f"crossreduce {__version__}")
        raise Exit
