"""The typer application: its commands, and what they have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .doctor import doctor
from .info import info
from .plan import plan
from .topology import topology
from .train import train
from .verify import verify

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(topology)
app.command()(plan)
app.command()(verify)
app.command()(train)
app.command()(bench)
app.command()(doctor)
app.command()(info)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Cross-device reductions for NumPy, PyTorch, JAX and TensorFlow."""
    if version:
        print(f"crossreduce {__version__}")
        raise typer.Exit
