"""Functions that parse the SVG pictures that tests draw, and topologies to draw."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import NamedTuple

from crossreduce import Topology
from crossreduce.export.pictures.style import COPY as ORANGE  # noqa: F401
from crossreduce.export.pictures.style import REDUCE as BLUE  # noqa: F401

SVG = "{http://www.w3.org/2000/svg}"
GPUS = tuple(f"cuda:{k}" for k in range(5))
# Five devices of which some pairs have links, of 25 or 50 GB/s as in a DGX-1V.
PART = Topology.from_matrix(
    [[0, 50, 25, 50, 0], [50, 0, 25, 0, 25], [25, 25, 0, 0, 0], [50, 0, 0, 0, 50], [0, 25, 0, 50, 0]], GPUS
)


def both_ways(*links):
    return [one for a, b, speed in links for one in ((a, b, speed), (b, a, speed))]


def two_hosts():
    """Return a topology of two hosts, with two GPUs, a switch and a network card each, and a switch between them."""
    links = []
    for host in ("a", "b"):
        for k in range(2):
            links += [(f"{host}/cuda:{k}", f"{host}/nvswitch", 450), (f"{host}/cuda:{k}", f"{host}/nic", 50)]
        links.append((f"{host}/nic", "leaf", 50))
    devices = [f"{host}/cuda:{k}" for host in ("a", "b") for k in range(2)]
    return Topology(devices, both_ways(*links), ["a/nvswitch", "a/nic", "b/nvswitch", "b/nic", "leaf"])


def texts(path):
    """Return (text, (x, y)) for each text of an SVG, in the order of drawing."""
    found = []
    for element in ElementTree.parse(path).iter(f"{SVG}text"):
        style = element.get("transform", "") + f" translate({element.get('x', 0)} {element.get('y', 0)})"
        place = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", style)
        found.append(("".join(element.itertext()), (float(place[1]), float(place[2]))))
    return found


def words(path):
    return [text for text, _ in texts(path)]


def panels(path):
    """Return a ``Panel`` for each panel of an SVG."""
    found = []
    for axes in ElementTree.parse(path).iter(f"{SVG}g"):
        if not re.fullmatch(r"axes_\d+", axes.get("id", "")):
            continue
        labels = [("".join(text.itertext()), text.get("style")) for text in axes.iter(f"{SVG}text")]
        heads = Counter()
        for group in axes.iter(f"{SVG}g"):
            for shape in group if group.get("id", "").startswith("PolyCollection_") else ():
                style = dict(part.split(": ") for part in shape.get("style", "").split("; ") if part)
                heads[style["fill"]] += 1
        white = [word for word, style in labels if "fill: #ffffff" in style]
        found.append(Panel([word for word, _ in labels], white, heads))
    return found


class Panel(NamedTuple):
    """The texts of a panel, the texts that are white, and the number of its arrow heads by colour."""

    words: list
    white: list
    heads: Counter
