"""Draw the rate of reductions on host memory against their size.

Input: results/host_reduction.json, from host_reduction.py --sizes. Output: docs/pictures/host_reduction.png.
Run: python benchmarks/plot.py [--json PATH] [--picture PATH]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from common import RESULTS, size_text

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "host_reduction.png"
# Contender: (label, colour, marker, dashes). The colours are those of Okabe and Ito, for colour-blind readers.
LINES = {
    "ours, out=": ("crossreduce, into given arrays", "#D55E00", "o", "-"),
    "ours": ("crossreduce, new arrays", "#E69F00", "s", "-"),
    "NumPy loop and copies": ("NumPy loop and copies", "#000000", "x", "--"),
    "torch stack().sum(0), one result": ("torch stack().sum(0)", "#CC79A7", "v", "--"),
    "TensorFlow ReductionToOneDevice": ("TensorFlow ReductionToOneDevice", "#009E73", "^", "--"),
    "TensorFlow HierarchicalCopyAllReduce": ("TensorFlow HierarchicalCopyAllReduce", "#56B4E9", "D", "--"),
    "JAX jit psum": ("JAX psum, jit", "#0072B2", "P", "--"),
}


def draw(kept: dict[str, Any], picture: Path) -> None:
    """Draw each contender's median rates as a line, and the rate of a copy of the largest size as a dotted line."""
    sizes = sorted(map(int, kept["sizes"]))
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "crossreduce"})
    figure, axes = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    copy = next(name for name in kept["sizes"][str(sizes[-1])] if name.startswith("np.copyto"))
    rate = kept["sizes"][str(sizes[-1])][copy]["GBps"]
    axes.axhline(rate, color="0.45", linewidth=1.2, linestyle=":")
    axes.text(sizes[0], rate * 1.1, f"copying {size_text(sizes[-1])} arrays: {rate:.0f} GB/s", color="0.3", va="bottom")
    for name, (label, color, marker, dashes) in LINES.items():
        rows = {size: kept["sizes"][str(size)].get(name) for size in sizes}
        xs = [size for size in sizes if rows[size]]
        if not xs:
            continue
        label += " *" * (rows[xs[-1]]["results"] == 1)
        axes.plot(xs, [rows[x]["GBps"] for x in xs], dashes, marker=marker, color=color, label=label, markersize=4.5)
    axes.set(xscale="log", yscale="log", xlabel="bytes per replica (float32)", ylabel="GB/s, read and written")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    machine = kept["machine"]
    axes.set_title(
        f"Sum over {kept['devices']} replicas in host memory: {machine['cpu']}, {machine['cores']} cores", loc="left"
    )
    axes.legend(frameon=False, loc="lower right", title="* one result; the others make one per replica")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120, metadata={"Date" if picture.suffix == ".svg" else "Software": None})
    print(f"drawn: {picture.name}, {picture.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "host_reduction.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    kept = json.loads(options.json.read_text())
    if "sizes" not in kept:
        parser.error(f"{options.json.name} contains no sizes; run python benchmarks/host_reduction.py --sizes")
    draw(kept, options.picture)


if __name__ == "__main__":
    main()
