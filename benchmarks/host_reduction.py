"""How close are reductions on host memory to the rate of the memory, and how fast are other libraries?

8 replicas (2 to 64 in the last two cases) in one process, steady state, random data (memory that contains only zeros
is faster on some CPUs). The contenders of a case run in turn; a ratio is the median of the ratios
within the turns, and is printed beside its target. Rates count the bytes of the sources, read once, and of the results
that have their own memory, written once. Writable results are filled with NaN, reduced again and compared with a plain
NumPy loop: bit for bit if they add in the same order, else within the bound of Higham (The accuracy of floating point
summation, 1993). Sums of half types are compared with exact sums (``error_ulp``).

A library that is not installed is left out.
Run: python benchmarks/host_reduction.py [--quick] [--sizes] [--json PATH]
"""

from __future__ import annotations

import argparse
import gc
import math
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import optree
from cases import QUICK, Case, Sizes
from common import RESULTS, keep, size_text
from contenders import (
    COPY,
    HCA,
    HCA_GRAPH,
    JAX,
    LOOP,
    R2O,
    R2O_GRAPH,
    THREADS,
    TORCH,
    Batch,
    N,
    chunked,
    copy,
    jax_peer,
    loop,
    ours,
    ours_tree,
    plain_sum,
    tensorflow_peers,
    torch_peer,
    whole_lines,
)

from crossreduce import kernels


def large(sizes: Sizes) -> Case:
    """Return the case of one large tensor over 8 devices: several algorithms, a plain copy and every other library."""
    batch = Batch.random([(sizes.large // 4,)])
    to_all, fresh, one = "ours direct, out=", "ours direct", "ours direct to one, out="
    tree, forest = "ours hierarchical_copy, out=", "ours forest, out="
    contenders = {
        COPY: copy(batch),
        to_all: ours(batch, "direct", with_out=True, exact=True),
        fresh: ours(batch, "direct", exact=True),
        tree: ours(batch, "hierarchical_copy", with_out=True),
        forest: ours(batch, "forest", with_out=True),
        one: ours(batch, "direct", with_out=True, to="cpu:0", exact=True),
        "ours direct to one": ours(batch, "direct", to="cpu:0", exact=True),
        LOOP: loop(batch),
        f"NumPy in pieces, {THREADS} threads, out=": chunked(batch),
        **torch_peer(batch),
        **tensorflow_peers(batch, HCA, R2O),
        **jax_peer(batch),
    }
    case = Case(f"{N} x {size_text(sizes.large)} float32", contenders, sizes.repeats, sizes)
    for this in (to_all, fresh):
        case.require_rate(this, COPY, 1.2)
        case.require_speed(this, JAX, 7)
    case.require("ours hierarchical_copy: times as long as direct", case.ratio(tree, to_all), most=1.25)
    case.require("ours forest: times as long as direct", case.ratio(forest, to_all), most=1.25)
    for this in (one, "ours direct to one"):
        case.require_speed(this, R2O, 1)
        case.require_speed(this, TORCH, 1.5)
    return case


def halves(sizes: Sizes) -> Case:
    """Return the case of float16 and bfloat16: is the rate near that of float32, and each sum rounded only once?"""
    contenders, name = {}, "ours direct, out=, {}".format
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        dtype = np.dtype(dtype)
        batch = Batch.random([(sizes.large // dtype.itemsize,)], dtype=dtype)
        exact = None if dtype.itemsize == 2 else True
        contenders[name(dtype.name)] = ours(batch, "direct", with_out=True, exact=exact)
    case = Case(f"{N} x {size_text(sizes.large)} of half types", contenders, sizes.repeats, sizes)
    for dtype in ("float16", "bfloat16"):
        case.require_rate(name(dtype), name("float32"), 0.8)
        case.require(f"{dtype}: error in ulp against float64", error_ulp(contenders[name(dtype)].batch), most=0.51)
    return case


def error_ulp(batch: Batch) -> float:
    """Return the greatest error of results of a half type, in units in the last place of the exact sum.

    A result has two errors: rounding to the half type, of half an ulp, and the additions in float32, of at most
    gamma(7) sum |x|. Their total is checked for all sums. The returned error is that of sums of at least an eighth of
    sum |x|, for which the additions are at most 0.007 ulp in float16; in ulp of a smaller sum they can be more.
    """
    (xs,), (outs,) = batch.tensors, batch.outs
    assert all(np.array_equal(out.view(np.uint16), outs[0].view(np.uint16)) for out in outs[1:])
    digits, least = (11, -14) if xs[0].dtype == np.float16 else (8, -126)
    gamma = 7 * 2.0**-24 / (1 - 7 * 2.0**-24)
    worst, piece = 0.0, 1 << 18

    def ulp(x: np.ndarray) -> np.ndarray:
        return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - (digits - 1))

    for start in range(0, xs[0].size, piece):
        parts = [x[start : start + piece].astype(np.float64) for x in xs]
        exact, size = plain_sum(parts), plain_sum([np.abs(x) for x in parts])
        error = np.abs(outs[0][start : start + piece].astype(np.float64) - exact)
        assert (error <= ulp(np.abs(exact) + gamma * size) / 2 + gamma * size).all()
        keeps = np.abs(exact) >= size / 8
        worst = max(worst, float(np.max(error[keeps] / ulp(exact[keeps]))))
    return worst


def resnet50() -> dict[str, Any]:
    """Return the shapes of ResNet-50's parameters as a tree (He et al., arXiv:1512.03385, table 1)."""

    def convolution(out: int, of: int, width: int) -> dict[str, Any]:
        return {"weight": (out, of, width, width), "scale": (out,), "shift": (out,)}

    tree: dict[str, Any] = {"stem": convolution(64, 3, 7)}
    of = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        tree[f"stage{stage + 1}"] = []
        for number in range(blocks):
            block = {
                "reduce": convolution(width, of, 1),
                "conv": convolution(width, width, 3),
                "expand": convolution(4 * width, width, 1),
            }
            if number == 0:
                block["shortcut"] = convolution(4 * width, of, 1)
            tree[f"stage{stage + 1}"].append(block)
            of = 4 * width
    return {**tree, "classifier": {"weight": (1000, of), "bias": (1000,)}}


RESNET50 = optree.tree_leaves(resnet50(), is_leaf=lambda node: isinstance(node, tuple))  # the shapes in their order


def gradients(sizes: Sizes, alone: bool) -> Case:
    """Return the case of ResNet-50's gradients as trees, beside the frameworks or (``alone``) one tensor of that size.

    These are two cases, because the target of the second is a small difference, which takes more turns to measure.
    """
    shapes, structure = optree.tree_flatten(resnet50(), is_leaf=lambda node: isinstance(node, tuple))
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032
    if sizes.quick:
        shapes = [(min(math.prod(shape), 64),) for shape in shapes]
    flat = Batch.random([(sum(whole_lines(math.prod(shape)) for shape in shapes),)])
    batch = flat.split(shapes)  # all contenders use the same memory, since its place affects the speed
    fresh, into, bare = "ours all_reduce", "ours all_reduce, out=", "ours reduce of one flat tensor, out="
    contenders = {into: ours_tree(batch, structure, with_out=True), fresh: ours_tree(batch, structure)}
    name = f"ResNet-50's gradients, 161 tensors, {batch.replica_nbytes / 2**20:.3g} MiB, over {N} devices"
    if alone:
        contenders[bare] = ours(flat, "auto", with_out=True)
        case = Case(f"{name}, beside one tensor", contenders, sizes.many_repeats, sizes)
        for this in (into, fresh):
            case.require(f"{this}: extra time, %", (case.ratio(this, bare) - 1) * 100, most=3)
        return case
    contenders |= {**tensorflow_peers(batch, HCA, HCA_GRAPH, R2O), **jax_peer(batch)}
    case = Case(name, contenders, sizes.repeats, sizes)
    for this in (fresh, into):
        case.require_speed(this, HCA, 8)
        case.require_speed(this, HCA_GRAPH, 3.5)
        case.require_speed(this, R2O, 1.8)
        case.require_speed(this, JAX, 2)
    return case


def many_small(sizes: Sizes) -> Case:
    """Return the case of many small tensors, which measures the cost of the calls."""
    batch = Batch.random([(sizes.small // 4,)] * 160)
    contenders = {
        "ours batch_reduce": ours(batch, "auto"),
        "ours batch_reduce, out=": ours(batch, "auto", with_out=True),
        LOOP: loop(batch),
        **tensorflow_peers(batch, HCA, HCA_GRAPH, R2O, R2O_GRAPH),
        **jax_peer(batch),
    }
    case = Case(f"160 x {size_text(sizes.small)} float32 over {N} devices", contenders, sizes.repeats, sizes)
    for this in ("ours batch_reduce", "ours batch_reduce, out="):
        case.require_speed(this, HCA, 100)
        case.require_speed(this, HCA_GRAPH, 15)
        case.require_speed(this, JAX, 15)
        case.require(f"{this}: ms", case.rows[this]["median_s"] * 1e3, most=1)
    return case


def one_small(sizes: Sizes) -> Case:
    """Return the case of one small tensor, which measures the cost of a call."""
    batch = Batch.random([(sizes.small // 4,)])
    contenders = {
        "ours reduce": ours(batch, "auto"),
        "ours reduce, out=": ours(batch, "auto", with_out=True),
        LOOP: loop(batch),
        **torch_peer(batch),
        **tensorflow_peers(batch, HCA, HCA_GRAPH, R2O, R2O_GRAPH),
        **jax_peer(batch),
    }
    case = Case(f"{size_text(sizes.small)} float32 over {N} devices", contenders, sizes.many_repeats, sizes)
    for this in ("ours reduce", "ours reduce, out="):
        for peer in (JAX, HCA, HCA_GRAPH, R2O, R2O_GRAPH):
            case.require_speed(this, peer, 5)
        case.require(f"{this}: us", case.rows[this]["median_s"] * 1e6, most=40)
    return case


def sources(sizes: Sizes, to_one: bool) -> Case:
    """Return the case of 2 to 64 sources with the same total of bytes: is the rate constant?

    All numbers of sources use parts of the same arrays, since some memory is slower. Like large arrays of NumPy, the
    sources start at the same offset within a page; a page separates them.
    """
    counts, page = (2, 3, 5, 8, 16, 64), 1024
    total, room = sizes.sources // 4, 65 * page
    rng = np.random.default_rng(0)
    read = rng.standard_normal((total * 64 // 65 if to_one else total // 2) + room, np.float32)
    written = np.full(total // 2 + room, np.nan, np.float32)

    def batch(n: int, results: int) -> Batch:
        size = total // (n + results) // page * page
        starts = range(0, n * (size + page), size + page)
        return Batch([[read[k : k + size] for k in starts]], [[written[k : k + size] for k in starts[:results]]])

    contenders = {COPY: copy(batch(2, 2))}
    name = ("{} to 1" if to_one else "{} to each").format
    for n in counts:
        one = batch(n, 1 if to_one else n)
        contenders[name(n)] = ours(one, "direct", with_out=True, to="cpu:0" if to_one else "", exact=True)
    what = "one result" if to_one else "a result each"
    case = Case(
        f"2 to 64 sources, {what}, {size_text(sizes.sources)} read and written", contenders, sizes.repeats, sizes
    )
    rates = [case.relative_rate(name(n), COPY) for n in counts if n <= 16]
    case.require("2 to 16 sources: greatest rate / least rate", max(rates) / min(rates), most=1.25)
    if to_one:
        case.require_rate(name(64), COPY, 0.8)
    return case


def sweep(sizes: Sizes) -> dict[str, Any]:
    """Return the times of this library, its peers in one process and a copy; 1 KiB to ``sizes.large`` per replica."""
    kept = {}
    exponents = range(10, sizes.large.bit_length(), 2)
    for nbytes in (1 << exponent for exponent in exponents):
        batch = Batch.random([(nbytes // 4,)])
        contenders = {
            COPY: copy(batch),
            "ours, out=": ours(batch, "auto", with_out=True),
            "ours": ours(batch, "auto"),
            LOOP: loop(batch),
            **torch_peer(batch),
            **tensorflow_peers(batch, HCA, R2O),
            **jax_peer(batch),
        }
        case = Case(f"{size_text(nbytes)} float32 over {N} devices", contenders, max(3, sizes.repeats // 2), sizes)
        kept[str(nbytes)] = case.rows
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few repeats, to see whether it runs")
    parser.add_argument("--sizes", action="store_true", help="also measure from 1 KiB to 64 MiB, for the picture")
    parser.add_argument("--repeats", type=int, help="the number of turns of each case")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--json", type=Path, default=RESULTS / "host_reduction.json")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.repeats:
        sizes = sizes._replace(repeats=options.repeats, many_repeats=options.repeats)
    kernel = {"instruction_set": kernels.instruction_set(), "threads": kernels.threads()}
    print(f"kernels: {kernel['instruction_set']}, {kernel['threads']} threads")
    functions = {
        "large": large,
        "halves": halves,
        "gradients": partial(gradients, alone=False),
        "gradients_alone": partial(gradients, alone=True),
        "many_small": many_small,
        "one_small": one_small,
        "sources_to_each": partial(sources, to_one=False),
        "sources_to_one": partial(sources, to_one=True),
    }
    cases = []
    for name, function in functions.items():
        if options.only in name:
            cases.append(function(sizes))
            gc.collect()  # frees the frameworks' functions and arrays, which are in reference cycles
    kept = {case.name: case.kept() for case in cases}
    result = {"devices": N, "dtype": "float32", "quick": options.quick, "kernels": kernel, "cases": kept}
    if options.sizes:
        result["sizes"] = sweep(sizes)
    targets = [one for case in cases for one in case.targets]
    print(f"\n{sum(one['met'] is True for one in targets)} of {len(targets)} targets were met")
    for one in targets:
        if one["met"] is False and not sizes.quick:
            print(f"  missed: {one['what']}: target {one['target']}, measured {one['measured']:.4g}")
    keep("host_reduction", result, options.json)


if __name__ == "__main__":
    main()
