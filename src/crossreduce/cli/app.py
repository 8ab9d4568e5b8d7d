"""The typer application: its commands and their common settings."""

from __future__ import annotations

from typing import Annotated

from typer import Exit, Option, Typer

from .. import __version__
from .bench.command import bench
from .doctor import doctor
from .info import info
from .plan import plan
from .top import top
from .topology import topology
from .trace import trace
from .train import train
from .verify import verify

app = Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (topology, plan, verify, train, bench, top, doctor, trace, info):
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    """Cross-device reductions for NumPy, PyTorch, JAX, TensorFlow and CuPy."""
    if version:
        print(f"crossreduce {__version__}")
        raise Exit
