"""Covering designs: fewer test cases than the full product of several factors, for the same faults.

Input: factors, each a sequence of values. Output: cases, tuples with one value of each factor, always in the same
order. ``pairs`` contains every pair of values of two factors, so it finds each fault that depends on at most two of
them, as most faults do (Kuhn, Wallace & Gallo, Software fault interactions and implications for software testing, IEEE
TSE 30(6), 2004). ``each`` contains every single value; it suits factors that the tested code treats separately.

Values that are not allowed together, such as an op and a dtype, belong in one factor that lists the allowed tuples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairs(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases that contain every pair of values of two different factors.

    The construction is greedy: each case starts with a missing pair, and each further value is the one that adds most
    missing pairs; among equals, the least used one. The number of cases is about the product of the two largest
    factors.

    >>> pairs("ab", [0, 1], [False, True])
    [('a', 0, False), ('a', 1, True), ('b', 0, True), ('b', 1, False)]
    """
    values = _lists(factors)
    if len(values) == 1:
        return [(value,) for value in values[0]]
    cells = [[(factor, k) for k in range(len(listed))] for factor, listed in enumerate(values)]
    used = dict.fromkeys(itertools.chain(*cells), 0)
    missing = dict.fromkeys(pair for a, b in itertools.combinations(cells, 2) for pair in itertools.product(a, b))
    cases = []
    while missing:
        case = list(next(iter(missing)))
        taken = {factor for factor, _ in case}
        for candidates in sorted(cells, key=len, reverse=True):
            if candidates[0][0] not in taken:
                case.append(max(candidates, key=lambda cell: (_added(cell, case, missing), -used[cell])))
        case.sort()
        for cell in case:
            used[cell] += 1
        for pair in itertools.combinations(case, 2):
            missing.pop(pair, None)
        cases.append(tuple(values[factor][k] for factor, k in case))
    return cases


def each(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return as many cases as the largest factor has values; each value of each factor is in at least one.

    >>> each("abc", [0, 1])
    [('a', 0), ('b', 1), ('c', 0)]
    """
    values = _lists(factors)
    return [tuple(listed[k % len(listed)] for listed in values) for k in range(max(map(len, values)))]


def _lists(factors: tuple[Iterable[Any], ...]) -> list[list[Any]]:
    values = [list(factor) for factor in factors]
    assert values, "no factors were given"
    assert all(values), "a factor has no values: no test would run"
    return values


def _added(cell: tuple[int, int], case: list[tuple[int, int]], missing: dict[Any, None]) -> int:
    """Return how many missing pairs a value adds to a case."""
    return sum((min(cell, other), max(cell, other)) in missing for other in case)
