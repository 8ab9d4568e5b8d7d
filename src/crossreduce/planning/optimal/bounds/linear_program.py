"""The best rate of trees, as a linear program: of an all-reduce, or of broadcasts from roots with weights.

Input: a topology. Output: an ``Optimum`` with exact numbers: the rate, the use of roots and links, and the cuts that
prove the rate. By Edmonds' theorem, trees exist if and only if no cut is violated (see ``CutProgram``). There are
exponentially many cuts, so the program starts with a few. Cuts that its solution violates are found as minimum cuts and
added, until none is violated. HiGHS solves each program in floating point. The solution and the dual are rounded to
fractions and checked exactly, so rounding cannot make a result wrong. If the rates of the solution and of the dual
differ, the program is solved again with as many digits as it needs (``_refine``).

Source: Edmonds, Edge-disjoint branchings, 1973; Bang-Jensen, Frank & Jackson, Preserving and increasing local
edge-connectivity in mixed graphs, SIAM J. Discrete Math. 8(2), 1995 (switches).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ....topology import Topology
from .cut_program import CutProgram, NodeCut, Proof, TreeKind
from .solver import Solution, refine, solve

# A solution in floating point is rounded to fractions with denominators up to each of these limits, until one fits.
# Vertices of these programs have small denominators, and HiGHS is accurate to about 1e-9.
DENOMINATORS: Final = (12, 60, 420, 5040, 100_000, 10_000_000)
_MOST_ROUNDS: Final = 500  # in which cuts are added; if cuts are then missing, the bound is too high, but valid
# The refinements that are tried if no limit of ``DENOMINATORS`` gives a proved solution: (bits of the denominators,
# gain of ``refine``). HiGHS sometimes stops at a wrong solution with one gain, and finds the right one with another.
_TRIES: Final = ((24, 30), (24, 20), (48, 30), (48, 12), (96, 30), (192, 20), (384, 30))

Pair = tuple[str, str]
Weights = tuple[tuple[int, Fraction], ...]
_Exact = tuple[Proof, Fraction, list[Fraction]]  # (proof, rate of the values or -1 if they are no solution, values)


class Optimum(NamedTuple):
    """The best use of links by trees."""

    rate: Fraction  # the upper bound of the rate in GB/s
    cuts: tuple[tuple[frozenset[str], Fraction, bool], ...]  # (nodes, weight, outward); see ``Cut``
    potentials: tuple[tuple[str, Fraction, Fraction], ...]  # (switch, in broadcasts, in reductions); see ``Bound``
    # The rate of ``roots``, ``down`` and ``up``. It equals ``rate``, or is smaller if rounding failed, or is -1 if no
    # solution was found. Bandwidths and weights that differ very much can cause this: HiGHS ignores coefficients below
    # 1e-9. In an all-reduce, equal rates of all roots are preferred, with half of every bandwidth for ``down`` and half
    # for ``up``, if they reach ``rate``.
    reached: Fraction
    roots: dict[str, Fraction]  # the rate rooted at each device
    down: dict[Pair, Fraction]  # the bandwidth of each link that broadcasts use, GB/s, by (src, dst)
    up: dict[Pair, Fraction]  # the bandwidth of each link that reductions use; empty for broadcasts


@lru_cache(maxsize=1024)
def optimum(topology: Topology, weights: Weights | None = None) -> Optimum:
    """Return the best use of the links by an all-reduce, or by broadcasts from roots with weights.

    Args:
      topology: connected, with two or more devices, all of which take part. Switches that do not reduce send as much as
        they receive.
      weights: for broadcasts, (number of the root, its bytes). ``None``: an all-reduce.

    >>> best = optimum(Topology.ring(4, gb_per_s=3))
    >>> best.rate, best.reached
    (Fraction(4, 1), Fraction(4, 1))
    >>> uneven = Topology(["cpu:0", "cpu:1"], [("cpu:0", "s", 5), ("s", "cpu:1", 3), ("cpu:1", "cpu:0", 1)], ["s"])
    >>> best = optimum(uneven, ((0, Fraction(1)),))
    >>> best.reached, best.down["cpu:0", "s"]
    (Fraction(3, 1), Fraction(3, 1))
    """
    program = CutProgram(topology, None if weights is None else dict(weights))
    proof, reached, values = _exact_solution(program)
    nodes = program.topology.nodes
    cuts = tuple((frozenset(nodes[k] for k in inside), weight, outward) for inside, weight, outward in proof.cuts)
    shifts = tuple((nodes[switch], *pair) for switch, pair in proof.potentials.items())
    broadcasts = program.kinds[0]
    roots = {nodes[root]: rate for root, rate in program.root_rates(broadcasts, values).items()}
    down, up = _used_bandwidths(program, broadcasts, values), dict[Pair, Fraction]()
    if program.paired:
        up = {(dst, src): rate for (src, dst), rate in down.items()}
    elif weights is None:
        up = _used_bandwidths(program, program.kinds[1], values)
    return Optimum(proof.rate, cuts, shifts, reached, roots, down, up)


def _used_bandwidths(program: CutProgram, kind: TreeKind, values: list[Fraction]) -> dict[Pair, Fraction]:
    return {(link.src, link.dst): values[c] for link, c in zip(program.links, kind.columns, strict=True)}


def _exact_solution(program: CutProgram) -> _Exact:
    """Return an exact solution, by rounding one in floating point or, if this fails, by refinement."""
    solution, cuts = _solve(program)
    rounded = _round_to_fractions(program, solution, cuts)
    return rounded if rounded[1] == rounded[0].rate else _refine(program, cuts, rounded)


def _solve(program: CutProgram) -> tuple[Solution, list[NodeCut]]:
    """Return a solution and its cuts. Add cuts until none is violated, or until the rate is only ``program.simple``."""
    cuts = program.first_cuts()
    for _ in range(_MOST_ROUNDS):
        solution = solve(program.rows(cuts, program.largest, program.largest))
        rate = sum(solution.values[: program.rates])
        if program.simple and rate * program.largest <= program.simple * program.scale * (1 + 1e-9):
            break
        violated = [cut for cut in program.nearly_violated(solution.values) if cut not in cuts]
        if not violated:
            break
        cuts.update(dict.fromkeys(violated))
    return solution, list(cuts)


def _round_to_fractions(program: CutProgram, solution: Solution, cuts: list[NodeCut]) -> _Exact:
    """Return the best proof and the best exact solution to which a solution in floating point can be rounded."""
    near = sum(solution.values[: program.rates]) * program.largest / program.scale * (1 + 1e-9)
    proofs: list[Proof] = []
    for limit in DENOMINATORS:
        proofs.append(program.proof(solution, cuts, limit))
        if proofs[-1].rate <= near:
            break
    proof = min(proofs, key=lambda proof: proof.rate)
    halves = [program.simple / program.n] * program.rates
    halves += [link.bandwidth / 2 for link in program.links] * len(program.kinds)
    best = program.simple or Fraction(-1), halves  # if ``simple`` is 0, the halves are no solution
    for limit in DENOMINATORS if best[0] < proof.rate else ():
        values = [
            max(Fraction(0), Fraction(float(value) * program.largest).limit_denominator(limit)) / program.scale
            for value in solution.values
        ]
        best = max(best, (program.feasible_rate(values), values), key=lambda exact: exact[0])
        if best[0] == proof.rate:
            break
    return proof, *best


def _refine(program: CutProgram, cuts: list[NodeCut], rounded: _Exact) -> _Exact:
    """Return an exact solution, found with as many digits as it needs, or ``rounded`` if no refinement succeeds."""
    # A tree of n devices uses a link at most n - 1 times to reduce and n - 1 times to broadcast, so it needs less than
    # 2 n times the rate. Limiting bandwidths to twice as much changes neither the optimum nor the prices.
    least = program.least_cut
    most = int(4 * program.n * least) + 1
    exponent = int(least).bit_length()  # bandwidths are divided by 2**exponent
    all_cuts = dict.fromkeys(cuts)
    for bits, gain in _TRIES:
        while True:
            solution = refine(program.rows(all_cuts, 1 << exponent, most), exponent + 2 * bits + 8, gain)
            values = [
                max(Fraction(0), (value * (1 << exponent)).limit_denominator(1 << bits)) / program.scale
                for value in solution.values
            ]
            if not program.fits(values):
                break
            violated = program.violated_cuts(values)
            new = [cut for cut in violated if cut not in all_cuts]
            if not new:
                proof = program.proof(solution, list(all_cuts), 1 << bits)
                rate = Fraction(-1) if violated else sum(values[: program.rates], Fraction(0))
                if rate == proof.rate:
                    return proof, rate, values
                break
            all_cuts.update(dict.fromkeys(new))
    return rounded
