"""The best rate of trees, as a linear program: of an all-reduce, or of broadcasts from roots with weights.

Input: a topology. Output: an ``Optimum``: the rate, the use of roots and links, and the prices that prove it, all
exact. Trees exist exactly if no cut is violated, by Edmonds' theorem (see ``CutProgram``). There are exponentially many
cuts; minimum cuts find those that a solution violates, until it violates none. HiGHS solves each program in floating
point; its solution and its dual are rounded to fractions, and each is then proved exactly, so rounding cannot make a
result wrong. If the two proofs disagree, the program is solved again to as many digits as it needs (``refined``).

Source: Edmonds, Edge-disjoint branchings, 1973; Bang-Jensen, Frank & Jackson, Preserving and increasing local
edge-connectivity in mixed graphs, SIAM J. Discrete Math. 8(2), 1995 (switches).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from ....topology import Topology
from .cut_program import CutProgram, NodeCut, Proof, Usage
from .solver import Solution, refine, solve

# Denominators that are tried when a solution in floating point is made exact, the simplest first. Vertices of these
# programs have small ones; HiGHS is accurate to about 1e-9.
DENOMINATORS: Final = (12, 60, 420, 5040, 100_000, 10_000_000)
_MOST_ROUNDS: Final = 500  # of new cuts; with fewer cuts the bound is higher, and still holds
# If none of ``DENOMINATORS`` gives a solution that is proved: the bits of the denominators to try next, and the gain
# of each round of refinement. HiGHS sometimes stops at a wrong solution with one gain, and finds the right one with
# another.
_TRIES: Final = ((24, 30), (24, 20), (48, 30), (48, 12), (96, 30), (192, 20), (384, 30))

Pair = tuple[str, str]
Weights = tuple[tuple[int, Fraction], ...]
_Exact = tuple[Proof, Fraction, list[Fraction]]  # the proof; the rate of the values, -1: no solution; the values


class Optimum(NamedTuple):
    """The best use of links by trees."""

    rate: Fraction  # the upper bound of the rate in GB/s
    cuts: tuple[tuple[frozenset[str], Fraction, bool], ...]  # (nodes, weight, outward); see ``Cut``
    potentials: tuple[tuple[str, Fraction, Fraction], ...]  # (switch, in broadcasts, in reductions); see ``Bound``
    # The rate of ``roots``, ``down`` and ``up``; it equals ``rate`` unless rounding failed (-1: no solution), as it may
    # if bandwidths and weights are very far apart: HiGHS leaves out coefficients below 1e-9. If equal rates of all
    # roots, with half of every bandwidth for ``down`` and half for ``up``, reach ``rate``, they are the solution of an
    # all-reduce.
    reached: Fraction
    roots: dict[str, Fraction]  # the rate rooted at each device
    down: dict[Pair, Fraction]  # the bandwidth of each link that broadcasts use, GB/s, by (src, dst)
    up: dict[Pair, Fraction]  # the bandwidth of each link that reductions use, likewise; empty if there are none


@lru_cache(maxsize=1024)
def optimum(topology: Topology, weights: Weights | None = None) -> Optimum:
    """Return the best all-reduce on a connected topology of two or more devices, or the best broadcasts.

    Args:
      topology: its devices take part; its switches that do not reduce send as much as they receive.
      weights: for broadcasts, the bytes of each root, by its number. ``None``: an all-reduce.

    >>> found = optimum(Topology.ring(4, gb_per_s=3))
    >>> found.rate, found.reached
    (Fraction(4, 1), Fraction(4, 1))
    >>> uneven = Topology(["cpu:0", "cpu:1"], [("cpu:0", "s", 5), ("s", "cpu:1", 3), ("cpu:1", "cpu:0", 1)], ["s"])
    >>> found = optimum(uneven, ((0, Fraction(1)),))
    >>> found.reached, found.down["cpu:0", "s"]
    (Fraction(3, 1), Fraction(3, 1))
    """
    program = CutProgram(topology, None if weights is None else dict(weights))
    proof, reached, values = _exact_solution(program)
    nodes = program.topology.nodes
    named = tuple((frozenset(nodes[k] for k in inside), weight, outward) for inside, weight, outward in proof.cuts)
    shifts = tuple((nodes[switch], *two) for switch, two in proof.potentials.items())
    first = program.usages[0]
    roots = {nodes[root]: rate for root, rate in program.root_rates(first, values).items()}
    down, up = _used_links(program, first, values), dict[Pair, Fraction]()
    if program.paired:
        up = {(dst, src): rate for (src, dst), rate in down.items()}
    elif weights is None:
        up = _used_links(program, program.usages[1], values)
    return Optimum(proof.rate, named, shifts, reached, roots, down, up)


def _used_links(program: CutProgram, usage: Usage, values: list[Fraction]) -> dict[Pair, Fraction]:
    return {(link.src, link.dst): values[c] for link, c in zip(program.links, usage.columns, strict=True)}


def _exact_solution(program: CutProgram) -> _Exact:
    solution, cuts = _solve(program)
    found = _round(program, solution, cuts)
    return found if found[1] == found[0].rate else _refine(program, cuts, found)


def _solve(program: CutProgram) -> tuple[Solution, list[NodeCut]]:
    """Solve with more and more cuts, until the solution violates none, or is not better than ``simple``."""
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


def _round(program: CutProgram, solution: Solution, cuts: list[NodeCut]) -> _Exact:
    """Return the exact solution and its proof, from a solution in floating point."""
    near = sum(solution.values[: program.rates]) * program.largest / program.scale * (1 + 1e-9)
    proofs: list[Proof] = []
    for limit in DENOMINATORS:
        proofs.append(program.proof(solution, cuts, limit))
        if proofs[-1].rate <= near:
            break
    proof = min(proofs, key=lambda proof: proof.rate)
    halves = [program.simple / program.n] * program.rates
    halves += [link.bandwidth / 2 for link in program.links] * len(program.usages)
    best = program.simple or Fraction(-1), halves  # without ``simple``: no solution, and any values
    for limit in DENOMINATORS if best[0] < proof.rate else ():
        values = [
            max(Fraction(0), Fraction(float(value) * program.largest).limit_denominator(limit)) / program.scale
            for value in solution.values
        ]
        best = max(best, (program.feasible_rate(values), values), key=lambda found: found[0])
        if best[0] == proof.rate:
            break
    return proof, *best


def _refine(program: CutProgram, cuts: list[NodeCut], found: _Exact) -> _Exact:
    """Return the solution with as many digits as it needs to be exact; ``found``: the best solution so far."""
    # Trees of n devices use a link at most n - 1 times, to reduce and to broadcast. More than twice that of any link
    # changes neither the optimum nor the prices, which would be 0 for the rest.
    least = program.least_cut
    most = int(4 * program.n * least) + 1
    exponent = int(least).bit_length()  # bandwidths are divided by 2**exponent
    known = dict.fromkeys(cuts)
    for bits, gain in _TRIES:
        while True:
            solution = refine(program.rows(known, 1 << exponent, most), exponent + 2 * bits + 8, gain)
            values = [
                max(Fraction(0), (value * (1 << exponent)).limit_denominator(1 << bits)) / program.scale
                for value in solution.values
            ]
            if not program.fits(values):
                break
            violated = program.violated_cuts(values)
            new = [cut for cut in violated if cut not in known]
            if not new:
                proof = program.proof(solution, list(known), 1 << bits)
                rate = Fraction(-1) if violated else sum(values[: program.rates], Fraction(0))
                if rate == proof.rate:
                    return proof, rate, values
                break
            known.update(dict.fromkeys(new))
    return found
