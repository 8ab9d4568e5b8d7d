"""Draw the charts of the documentation from stored results, in the style of crossreduce.export.pictures.style.

Input: JSON files in results/. Output: SVG files in docs/pictures, and those of the site, which docs/site/charts.py
writes. Nothing is measured here. ``pictures.py`` draws all files of docs/pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from common import RESULTS, size_text

from crossreduce.export.pictures import style
from crossreduce.export.pictures.figure import new_figure

Rows = list[dict[str, Any]]


def draw_host(kept: dict[str, Any], path: Path) -> None:
    """Draw each contender's median rates as a line, and the rate of a copy of the largest size as a dotted line."""
    sizes, machine = sorted(map(int, kept["sizes"])), kept["machine"]
    names = {  # contender: its name in the chart, and whether it is a variant
        "ours, out=": ("crossreduce, into given arrays", False),
        "ours": ("crossreduce, new arrays", True),
        "NumPy loop and copies": ("NumPy loop, and copies", False),
        "torch stack().sum(0), one result": ("torch, stack().sum(0)", False),
        "TensorFlow ReductionToOneDevice": ("TensorFlow, ReductionToOneDevice", False),
        "TensorFlow HierarchicalCopyAllReduce": ("TensorFlow, HierarchicalCopyAllReduce", True),
        "JAX jit psum": ("JAX, psum in jit", False),
    }
    title = f"Sum over {kept['devices']} replicas in host memory"
    with new_figure(path, style.WIDTH, 5.2, title, fit=True) as figure:
        axes = figure.subplots()
        rates = [1e-9]
        for name, (label, is_variant) in names.items():
            rows = {size: kept["sizes"][str(size)][name] for size in sizes if name in kept["sizes"][str(size)]}
            if rows:
                label += " *" * (rows[max(rows)]["results"] == 1)
                points = {size: row["GBps"] for size, row in rows.items()}
                style.line(axes, points, label, dashed=is_variant)
                rates += points.values()
        largest = kept["sizes"][str(sizes[-1])]
        copy = next(row["GBps"] for name, row in largest.items() if name.startswith("np.copyto"))
        text = f"copying {size_text(sizes[-1])} arrays: {copy:.0f} GB/s"
        axes.axhline(copy, color=style.EDGE, linestyle=":", label=text)
        style.size_axis(axes, sizes)
        style.value_axis(axes, min(rates[1:]) / 1.5, max(*rates, copy) * 1.5, steps=(1,))
        axes.set_ylabel("GB/s, read and written")
        about = f"bytes per replica of {kept['dtype']}; medians on {machine['cores']} cores of an {machine['cpu']}"
        style.note(axes, about, "* one result; the others make one per replica")
        style.legend_below(figure, axes, 2)


def draw_grid(kept: dict[str, Any], path: Path) -> None:
    """Draw the bytes read and written per second over the size of an array, for several numbers of replicas."""
    names = {
        "ours, out=": ("crossreduce, into given arrays", False),
        "ours": ("crossreduce, new arrays", True),
        "tiled C loop": ("C loop, tiled, one thread", False),
        "NumPy loop": ("NumPy loop, and copies", False),
        "copy": ("np.copyto, all threads", False),
    }

    def panel(replicas: int) -> Callable[[Any], None]:
        rows = [r for r in kept["rows"] if (r["dtype"], r["replicas"], r["offset"]) == ("float32", replicas, 16)]

        def draw(axes: Any) -> None:
            for name, (label, is_variant) in names.items():
                more = {"marker": "", "linestyle": ":", "color": style.EDGE} if name == "copy" else {}
                points = {row["bytes"]: 2e-9 * replicas * row["bytes"] / row["seconds"][name] for row in rows}
                style.line(axes, points, label, dashed=is_variant, markersize=3.5, **more)
            style.size_axis(axes, [row["bytes"] for row in rows], 6)

        return draw

    panels = [(f"{replicas} replicas of float32", panel(replicas)) for replicas in (2, 8, 32)]
    draw_panels(path, "Rate of a sum over replicas in host memory", panels, "GB/s, read and written", (0.07, 100))


def draw_ranks(kept: dict[str, Any], path: Path) -> None:
    """Draw a panel for each number of ranks of one host."""
    chosen = [row for row in kept["rows"] if row["collective"] == "all_reduce" and row["dtype"] == "float32"]

    def panel(place: str) -> Callable[[Any], None]:
        rows = [row for row in chosen if row["place"] == place]
        numpy = [row for row in rows if row["part"] == "mpi" and row["form"] == "out="]
        torch = [row for row in rows if row["part"] != "mpi"]
        peers = list(dict.fromkeys(row["peer"] for row in numpy))

        def draw(axes: Any) -> None:
            if peers:
                first = [row for row in numpy if row["peer"] == peers[0]]
                style.line(axes, microseconds(first, "ours_s"), "crossreduce, NumPy")
            if torch:
                style.line(axes, microseconds(torch, "ours_s"), "crossreduce, torch", dashed=True)
                style.line(axes, microseconds(torch, "peer_s"), "gloo, torch")
            for peer in peers:
                points = microseconds([row for row in numpy if row["peer"] == peer], "peer_s")
                style.line(axes, points, f"{peer}, NumPy")
            style.size_axis(axes, sorted({row["bytes"] for row in rows}), 6)

        return draw

    places = sorted({row["place"] for row in chosen}, key=lambda place: int(place.split()[0]))
    times = [row[key] * 1e6 for row in chosen for key in ("ours_s", "peer_s")]
    title = "Time of an all-reduce among ranks of one host"
    draw_panels(path, title, [(place, panel(place)) for place in places], "microseconds", (min(times), max(times)))


def draw_hosts(kept: dict[str, Any], path: Path) -> None:
    """Draw a panel for each network between hosts with an MTU of 9000."""
    chosen = [row for row in kept["rows"] if row["collective"] == "all_reduce" and "9000" in row["network"]]

    def panel(network: str) -> Callable[[Any], None]:
        rows = [row for row in chosen if row["network"] == network]

        def draw(axes: Any) -> None:
            for name in dict.fromkeys(name for row in rows for name in row["seconds"]):
                points = {row["bytes"]: row["seconds"][name] * 1e6 for row in rows if name in row["seconds"]}
                more = {"marker": "v"} if name == "crossreduce.mpi" else {}
                style.line(axes, points, name, dashed=name.startswith(("crossreduce,", "crossreduce.")), **more)
            style.size_axis(axes, sorted({row["bytes"] for row in rows}), 6)

        return draw

    networks = list(dict.fromkeys(row["network"] for row in chosen))
    panels = [(f"hosts x ranks: {network.removesuffix(', MTU 9000')}", panel(network)) for network in networks]
    times = [seconds * 1e6 for row in chosen for seconds in row["seconds"].values()]
    title = "Time of an all-reduce among ranks of several hosts (MTU 9000)"
    draw_panels(path, title, panels, "microseconds", (min(times), max(times)))


def microseconds(rows: Rows, key: str) -> dict[int, float]:
    """Return the microseconds of ``key`` by size."""
    return {row["bytes"]: row[key] * 1e6 for row in rows}


def draw_panels(
    path: Path,
    title: str,
    panels: Sequence[tuple[str, Callable[[Any], None]]],
    label: str,
    limits: tuple[float, float],
) -> None:
    """Draw panels in lines of two, with one logarithmic y axis from below to above ``limits``, and one legend.

    The legend is in the last place if the number of panels is odd, and else below them.
    """
    lines = -(-len(panels) // 2)
    with new_figure(path, style.WIDTH, 0.9 + 2.9 * lines, title, fit=True) as figure:
        every = figure.subplots(lines, 2, sharey=True, squeeze=False)
        for axes, (name, draw) in zip(every.flat, panels, strict=False):
            draw(axes)
            axes.set_title(name)
        style.value_axis(every[0][0], limits[0] / 1.5, limits[1] * 1.5)
        for line in every:
            line[0].set_ylabel(label)
            line[1].tick_params(labelleft=False)
        labelled = {}
        for axes in every.flat[: len(panels)]:
            labelled |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        if len(panels) % 2:
            every.flat[-1].set_axis_off()
            every.flat[-1].legend(labelled.values(), labelled, loc="center left")
        else:
            figure.legend(labelled.values(), labelled, loc="outside lower left", ncols=3)


def draw_exact_training(kept: dict[str, Any], path: Path) -> None:
    """Draw the losses on 1, 2, 4 and 8 replicas, and for each kind their differences from those on one replica."""
    curves = kept["curves"]
    title = "Losses of one training, and differences from 1 replica"
    with new_figure(path, style.WIDTH, 7.2, title, fit=True) as figure:
        every = figure.subplots(-(-(len(curves) + 1) // 2), 2, sharex=True, squeeze=False)
        first, *panels = every.flat
        first.set_title("loss, all runs")
        for axes, (kind, runs) in zip(panels, curves.items(), strict=False):
            for colour, (n, run) in zip(style.REPLICAS, runs.items(), strict=False):
                first.plot(run["losses"], color=colour, linewidth=1)
                pairs = zip(run["losses"], runs["1"]["losses"], strict=True)
                apart = [max(abs(a - b), 1e-9) for a, b in pairs]
                axes.plot(apart, color=colour, linewidth=1, label=f"{n} replica{'s' * (n != '1')}")
            axes.set_title(f"difference: {kind}")
            style.value_axis(axes, 0.7e-9, 1e-6, steps=(1,))
            axes.set_yticks([1e-9, 1e-8, 1e-7, 1e-6], ["1e-9 or less", "1e-8", "1e-7", "1e-6"])
            axes.set_xlabel("step")
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
            axes.legend(*panels[0].get_legend_handles_labels(), loc="center left")


def draw_elastic(kept: dict[str, Any], path: Path) -> None:
    """Draw the loss and the number of ranks over time."""
    start = kept["seconds"][0]
    seconds = [each - start for each in kept["seconds"]]
    title = "A training that loses two ranks and admits two"
    with new_figure(path, style.WIDTH, 4.4, title, fit=True) as figure:
        upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        upper.plot(seconds, kept["losses"], color=style.REDUCE, linewidth=1)
        style.value_axis(upper, min(kept["losses"]) / 1.2, max(kept["losses"]) * 1.2, steps=(1,))
        upper.set_ylabel("loss of a step")
        lower.step(seconds, kept["sizes"], where="post", color=style.INK)
        lower.set(xlabel="seconds since the first step", ylabel="ranks", ylim=(0, max(kept["sizes"]) + 1))
        looks = {
            "kill": (style.LOOKS["TensorFlow"].colour, "a rank is killed"),
            "join": (style.OURS, "a process asks to join"),
        }
        for moment, event in kept["happened"]:
            colour, label = looks["kill" if event == "kill" else "join"]
            for axes in (upper, lower):
                axes.axvline(moment - start, linestyle="--", color=colour, label=label)
        handles, labels = upper.get_legend_handles_labels()
        different = dict(zip(labels, handles, strict=True))
        upper.legend(different.values(), different, loc="upper right")


def draw_frameworks(kept: dict[str, Any], path: Path) -> None:
    """Draw the time of a framework's own reduction as a multiple of crossreduce's, for each job in its programs."""
    names = {
        "tensorflow_gradients": "TensorFlow: ResNet-50's gradients",
        "tensorflow_small": "TensorFlow: 160 x 1 KiB",
        "tensorflow_large": "TensorFlow: 64 MiB",
        "jax_gradients": "JAX: ResNet-50's gradients",
        "jax_small": "JAX: 160 x 1 KiB",
        "jax_large": "JAX: 64 MiB",
    }
    compiled, eager = [], []
    for case in names:
        times = {name: row["median_s"] for name, row in kept["cases"][case]["rows"].items()}
        peers = {name: seconds for name, seconds in times.items() if not name.startswith("ours")}
        for ways, graph in ((compiled, True), (eager, False)):
            peer = [s for name, s in peers.items() if ("tf.function" in name or "jit" in name) == graph]
            ours = times["ours, tf.function" if graph and "ours, tf.function" in times else "ours"]
            ways.append(peer[0] / ours if peer else 0)
    colours = style.LOOKS["TensorFlow"].colour, style.LOOKS["JAX"].colour
    series = {"in a compiled program": (compiled, colours[1]), "eager": (eager, colours[0])}
    title = "Time of the framework's own op, as a multiple of crossreduce's time"
    draw_bars(path, title, list(names.values()), series, "above 1: the framework's own op is slower")


def draw_machines(kept: dict[str, Any], path: Path) -> None:
    """Draw the planned rate of all-reduces on each machine as a part of its bound, beside other algorithms."""
    rows = [row for row in kept["machines"] if row["collective"] == "all_reduce"]
    keys = {"the plan": "rate", "TensorFlow's trees": "tensorflow", "rings": "rings", "one device": "one_device"}
    series = {}
    for name, key in keys.items():
        parts = [100 * Fraction(row[key]) / Fraction(row["bound"]) if row.get(key) else 0 for row in rows]
        series[name] = ([float(part) for part in parts], PLANNERS[name])
    labels = [row["name"] for row in rows]
    draw_bars(path, "Calculated rate of an all-reduce", labels, series, "percent of the bound, for large arrays")


def draw_parts(kept: dict[str, Any], path: Path) -> None:
    """Draw, for all parts of each machine of eight devices, the median part of the bound that algorithms reach."""
    found = kept["subsets"]
    keys = {"the plan": "ratio", "TensorFlow's trees": "tensorflow", "rings": "rings"}
    series = {
        name: ([float(100 * Fraction(found[machine][key]["median"])) for machine in found], PLANNERS[name])
        for name, key in keys.items()
    }
    label = "percent of the bound, median of all parts of two to eight devices"
    draw_bars(path, "Calculated rate of an all-reduce, on parts of machines", list(found), series, label)


PLANNERS = {
    "the plan": style.OURS,
    "TensorFlow's trees": style.LOOKS["TensorFlow"].colour,
    "rings": style.LOOKS["MPI"].colour,
    "one device": style.OTHER,
}


def draw_bars(
    path: Path, title: str, labels: list[str], series: dict[str, tuple[list[float], str]], xlabel: str
) -> None:
    """Draw groups of horizontal bars, a group per label from the top, and in each a bar per series."""
    high = 1.3 + 0.19 * len(labels) * (len(series) + 0.8)
    with new_figure(path, style.WIDTH, high, title, fit=True) as figure:
        axes = figure.subplots()
        height = 0.8 / len(series)
        for k, (name, (values, colour)) in enumerate(series.items()):
            places = [row + k * height for row in range(len(labels))]
            drawn = axes.barh(places, values, height * 0.92, label=name, color=colour)
            texts = [f"{value:.3g}" if value else "none" for value in values]
            axes.bar_label(drawn, texts, padding=2, fontsize=style.FOOT, color=style.TEXT)
        axes.set_yticks([row + 0.4 - height / 2 for row in range(len(labels))], labels)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.margins(x=0.08, y=0.01)
        axes.set_xlabel(xlabel, loc="left")
        style.legend_below(figure, axes, 4)


# The charts of docs/pictures: the file's name, the results, and the function that draws it.
CHARTS: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    "host_reduction": ("host_reduction.json", draw_host),
    "host_grid": ("host_grid.json", draw_grid),
    "ranks": ("processes.json", draw_ranks),
    "hosts": ("hosts.json", draw_hosts),
    "exact_training": ("exact_training.json", draw_exact_training),
    "elastic": ("elastic.json", draw_elastic),
}


def draw(name: str, folder: Path, results: Path = RESULTS) -> None:
    """Draw a chart of docs/pictures into a folder."""
    file, function = CHARTS[name]
    function(json.loads((results / file).read_text()), folder / f"{name}.svg")
