"""The best rate of trees, as a linear program: of an all-reduce, or of broadcasts from roots with weights.

Input: a topology. Output: an ``Optimum``: the rate, the use of roots and links, and the prices that prove it, all
exact. Trees exist exactly if no cut is violated, by Edmonds' theorem (see ``CutProgram``). There are exponentially many
cuts. So the program starts with a few cuts; those that its solution violates are found as minimum cuts and added, until
there are none. HiGHS solves each program in floating point. The solution and the dual are rounded to fractions, and
each is then checked exactly, so rounding cannot make a result wrong. If the rates of the two differ, the program is
solved again to as many digits as it needs (``_refine``).

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

# The limits of denominators when a solution in floating point is rounded to fractions, in the order of the attempts.
# Vertices of these programs have small denominators; HiGHS is accurate to about 1e-9.
DENOMINATORS: Final = (12, 60, 420, 5040, 100_000, 10_000_000)
_MOST_ROUNDS: Final = 500  # in which cuts are added; with fewer cuts the bound is higher, but valid
# The refinements that are tried if no limit of ``DENOMINATORS`` gives a proved solution: (bits of the denominators,
# gain of a round). HiGHS sometimes stops at a wrong solution with one gain, and finds the right one with another.
_TRIES: Final = ((24, 30), (24, 20), (48, 30), (48, 12), (96, 30), (192, 20), (384, 30))

Pair = tuple[str, str]
Weights = tuple[tuple[int, Fraction], ...]
_Exact = tuple[Proof, Fraction, list[Fraction]]  # the proof; the rate of the values, -1: no solution; the values


class Optimum(NamedTuple):
    """The best use of links by trees."""

    rate: Fraction  # the upper bound of the rate in GB/s
    cuts: tuple[tuple[frozenset[str], Fraction, bool], ...]  # (nodes, weight, outward); see ``Cut``
    potentials: tuple[tuple[str, Fraction, Fraction], ...]  # (switch, in broadcasts, in reductions); see ``Bound``
    # The rate of ``roots``, ``down`` and ``up``. It equals ``rate`` unless rounding failed; -1 if there is no solution.
    # That may happen if bandwidths and weights are very far apart: HiGHS leaves out coefficients below 1e-9. If equal
    # rates of all roots, with half of every bandwidth for ``down`` and half for ``up``, reach ``rate``, they are the
    # solution of an all-reduce.
    reached: Fraction
    roots: dict[str, Fraction]  # the rate rooted at each device
    down: dict[Pair, Fraction]  # the bandwidth of each link that broadcasts use, GB/s, by (src, dst)
    up: dict[Pair, Fraction]  # the bandwidth of each link that reductions use; empty for broadcasts


@lru_cache(maxsize=1024)
def optimum(topology: Topology, weights: Weights | None = None) -> Optimum:
    """Return the best all-reduce on a connected topology of two or more devices, or the best broadcasts.

    Args:
      topology: all its devices take part; switches that do not reduce send as much as they receive.
      weights: for broadcasts, the number of each root and its bytes. ``None``: an all-reduce.

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
    broadcasts = program.usages[0]
    roots = {nodes[root]: rate for root, rate in program.root_rates(broadcasts, values).items()}
    down, up = _used_bandwidths(program, broadcasts, values), dict[Pair, Fraction]()
    if program.paired:
        up = {(dst, src): rate for (src, dst), rate in down.items()}
    elif weights is None:
        up = _used_bandwidths(program, program.usages[1], values)
    return Optimum(proof.rate, cuts, shifts, reached, roots, down, up)


def _used_bandwidths(program: CutProgram, usage: Usage, values: list[Fraction]) -> dict[Pair, Fraction]:
    return {(link.src, link.dst): values[c] for link, c in zip(program.links, usage.columns, strict=True)}


def _exact_solution(program: CutProgram) -> _Exact:
    solution, cuts = _solve(program)
    rounded = _round_to_fractions(program, solution, cuts)
    return rounded if rounded[1] == rounded[0].rate else _refine(program, cuts, rounded)


def _solve(program: CutProgram) -> tuple[Solution, list[NodeCut]]:
    """Solve with more and more cuts, until the solution violates none, or is not better than ``program.simple``."""
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
    """Return the best exact solution and proof that rounding of a solution in floating point gives."""
    near = sum(solution.values[: program.rates]) * program.largest / program.scale * (1 + 1e-9)
    proofs: list[Proof] = []
    for limit in DENOMINATORS:
        proofs.append(program.proof(solution, cuts, limit))
        if proofs[-1].rate <= near:
            break
    proof = min(proofs, key=lambda proof: proof.rate)
    halves = [program.simple / program.n] * program.rates
    halves += [link.bandwidth / 2 for link in program.links] * len(program.usages)
    best = program.simple or Fraction(-1), halves  # without ``simple``: no solution, and the values have no meaning
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
    """Return the solution with as many digits as it needs to be exact, or ``rounded`` if no refinement succeeds."""
    # A tree of n devices uses a link at most n - 1 times to reduce, and as often to broadcast. Bandwidth of more than
    # twice that changes neither the optimum nor the prices, which would be 0 for the rest.
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
