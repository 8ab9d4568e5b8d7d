"""The options with which every command selects a topology, and the selected topology.

A device's number is its position in the complete machine, even if ``--devices`` and ``--without-link`` remove parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from ... import Topology
from ...errors import ArgumentError
from .arguments import read_link, read_subset

MACHINE: Final = (
    "A machine of the library, a file (JSON, NCCL's XML, nvidia-smi topo -m, rocm-smi), or 'this' for this machine"
)
Machine = Annotated[str, Argument(metavar="MACHINE|FILE|this", help=f"{MACHINE}.")]
_PANEL: Final = "For several hosts, and for tables of GPUs, which state no speeds"
Nics = Annotated[
    str | None,
    Option(
        "--nics",
        help="The network, or Gb/s of a card: ndr, 400, 8x400.",
        rich_help_panel=_PANEL,
    ),
]
Gpu = Annotated[str | None, Option("--gpu", help="Kind of GPU: gb200, mi300x.", rich_help_panel=_PANEL)]
Pcie = Annotated[int | None, Option("--pcie", help="Generation of PCIe: 4.", rich_help_panel=_PANEL)]
BetweenCpus = Annotated[float | None, Option("--between-cpus", help="GB/s between CPUs.", rich_help_panel=_PANEL)]
Hosts = Annotated[int, Option("--hosts", help="Number of equal hosts.")]
InNetwork = Annotated[bool, Option("--in-network", help="Let switches combine and multicast.")]
Devices = Annotated[str | None, Option("--devices", help="Use only these devices: 0-3,6 or cuda:0,cuda:1.")]
WithoutLink = Annotated[
    list[str] | None, Option("--without-link", help="Remove this cable: 0,3 or cuda:0,cuda:3. Repeatable.")
]
Picture = Annotated[Path | None, Option("--picture", help="Draw a picture: a .svg or .png file.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
PICTURE_SUFFIXES: Final = (".svg", ".png")


def select(complete: Topology, devices: str | None, without_link: list[str] | None) -> Topology:
    """Return a topology without the links of ``--without-link``, and with only the devices of ``--devices``."""
    topology = complete
    for text in without_link or ():
        topology = topology.without_link(*read_link("--without-link", text, complete))
    if devices is not None:
        topology = topology.subset(read_subset("--devices", devices, complete))
    return topology


def check_picture(path: Path | None) -> None:
    """Raise an error if the path of a picture does not end in .svg or .png."""
    if path is not None and path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ArgumentError(f"--picture must be a .svg or .png file, not {path}.")
