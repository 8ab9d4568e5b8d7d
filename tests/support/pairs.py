"""Covering designs: fewer test cases than the full product of several factors, for the same faults.

``pairs`` contains every pair of values of two factors, so it finds each fault that depends on at most two of them, as
most faults do (Kuhn, Wallace & Gallo, Software fault interactions and implications for software testing, IEEE TSE
30(6), 2004). ``each`` contains every single value; it suits factors that the tested code treats separately. Values that
are not allowed together, such as an op and a dtype, belong in one factor that lists the allowed tuples.
"""

from itertools import chain, combinations, product


def pairs(*factors):
    """Return cases that contain every pair of values of two different factors.

    The construction is greedy: each case starts with a missing pair, and each further value is the one that adds most
    missing pairs; among equals, the least used one.
    """
    values = _lists(factors)
    if len(values) == 1:
        return [(value,) for value in values[0]]
    cells = [[(factor, k) for k in range(len(listed))] for factor, listed in enumerate(values)]
    used = dict.fromkeys(chain(*cells), 0)
    missing = dict.fromkeys(pair for a, b in combinations(cells, 2) for pair in product(a, b))

    def added(cell, case):
        return sum((min(cell, other), max(cell, other)) in missing for other in case), -used[cell]

    cases = []
    while missing:
        case = list(next(iter(missing)))
        taken = {factor for factor, _ in case}
        for candidates in sorted(cells, key=len, reverse=True):
            if candidates[0][0] not in taken:
                case.append(max(candidates, key=lambda cell: added(cell, case)))
        case.sort()
        for cell in case:
            used[cell] += 1
        for pair in combinations(case, 2):
            missing.pop(pair, None)
        cases.append(tuple(values[factor][k] for factor, k in case))
    return cases


def each(*factors):
    """Return as many cases as the largest factor has values; each value of each factor is in at least one."""
    values = _lists(factors)
    return [tuple(listed[k % len(listed)] for listed in values) for k in range(max(map(len, values)))]


def _lists(factors):
    values = [list(factor) for factor in factors]
    assert values, "no factors were given"
    assert all(values), "a factor has no values: no test would run"
    return values
