"""Linear programs, solved in floating point by HiGHS, or to any number of digits by iterative refinement.

Input: a ``Rows``. Output: an approximate solution and its dual. The results are not proved: the caller checks them.

In iterative refinement, the exact violations of a solution (in fractions) are multiplied by a large factor. HiGHS
solves the program for the correction, which is then divided by the factor and added. Each round adds about ten digits.
So the limits of a program may differ by more orders of magnitude than floating point can represent.

Source: Gleixner, Steffy & Wolter, Iterative refinement for linear programming, INFORMS J. Computing 28(3), 2016;
Huangfu & Hall, Parallelizing the dual revised simplex method, Math. Prog. Comp. 10, 2018 (HiGHS).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import frexp, gcd, inf, lcm
from typing import Any, Final, NamedTuple

_FAR: Final = float(1 << 40)  # a scaled limit or cost beyond this is so far that one correction cannot reach it
_LEAST_GAIN: Final = 4  # the refinement ends if HiGHS fails with this gain or a smaller one
_MOST_ROUNDS: Final = 200  # of corrections
_PIVOTS: Final = 50  # pivots of the simplex method per row and column; without a limit, HiGHS may cycle for ever
_TOLERANCES: Final = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}

Row = tuple[Sequence[int], Sequence[int | Fraction]]  # columns, and their coefficients


class Rows(NamedTuple):
    """A linear program: maximise the sum of some of the variables, all of which are 0 or more."""

    columns: int  # the number of variables
    objective: int  # the number of variables in the maximised sum, which are the first ones
    upper: list[Row]  # the sum of coefficient x variable is at most the limit
    limits: list[Fraction]  # for each row of ``upper``, 0 or more
    equal: list[Row]  # the sum of coefficient x variable is 0


class Solution(NamedTuple):
    """An approximate solution. ``solve`` returns it in floats, ``refine`` in fractions."""

    values: list[Any]  # of the variables
    prices: list[Any]  # the dual variables of ``Rows.upper``
    shifts: list[Any]  # the dual variables of ``Rows.equal``


def solve(rows: Rows) -> Solution:
    """Return the solution of HiGHS in floating point.

    >>> solve(Rows(2, 2, [((0,), (1,)), ((0, 1), (1, 2))], [Fraction(1), Fraction(4)], [])).values
    [1.0, 1.5]
    """
    import numpy as np
    from scipy.optimize import linprog

    objective = np.zeros(rows.columns)
    objective[: rows.objective] = -1.0
    fixed = {"A_eq": _matrix(rows.equal, rows.columns), "b_eq": np.zeros(len(rows.equal))} if rows.equal else {}
    limits = [float(limit) for limit in rows.limits]
    result = linprog(objective, A_ub=_matrix(rows.upper, rows.columns), b_ub=limits, **fixed, method="highs-ds")
    assert result.status == 0, result.message  # every program has an optimum: links limit it, and 0 is feasible
    shifts = [-value for value in result.eqlin.marginals.tolist()] if rows.equal else []
    return Solution(result.x.tolist(), [-value for value in result.ineqlin.marginals.tolist()], shifts)


def _matrix(rows: Sequence[Row], columns: int) -> Any:
    import numpy as np
    from scipy.sparse import csr_array

    starts = np.cumsum([0, *(len(row) for row, _ in rows)])
    where = [column for row, _ in rows for column in row]
    values = [float(value) for _, row in rows for value in row]
    return csr_array((values, where, starts), shape=(len(rows), columns))


def refine(rows: Rows, bits: int, gain: int = 30) -> Solution:
    """Return a solution in fractions, with errors of about 2**-bits, or larger ones if HiGHS fails.

    Each round multiplies the scaling factors by at most 2**gain. If HiGHS fails, it repeats the round with half a gain.

    >>> narrow = Fraction(1, 10**30)
    >>> solution = refine(Rows(2, 2, [((0,), (1,)), ((1, 0), (3, -1))], [narrow, Fraction(0)], []), 200)
    >>> [value.limit_denominator(10**40) / narrow for value in solution.values]
    [Fraction(1, 1), Fraction(1, 3)]
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack, vstack

    n, m = rows.columns, len(rows.upper)
    all_rows = [*rows.upper, *rows.equal]
    limits = [*rows.limits, *[Fraction(0)] * len(rows.equal)]
    # Each row is multiplied by a power of 2, so that the largest and the smallest coefficient are equally far from 1.
    factors = [_row_factor(values) for _, values in all_rows]
    scaled = [(columns, [a * f for a in values]) for (columns, values), f in zip(all_rows, factors, strict=True)]
    slack = vstack([eye_array(m), _matrix([((), ())] * len(rows.equal), m)]) if rows.equal else eye_array(m)
    matrix = hstack([_matrix(scaled, n), slack]).tocsr()
    x, y = [Fraction(0)] * n, [Fraction(0)] * len(all_rows)
    primal = dual = 0  # the factors of the primal and the dual program are 2**primal and 2**dual
    step = 0  # by which the exponents may grow; so in the first round both factors are 1
    for _ in range(_MOST_ROUNDS):
        gaps = [
            limit - sum((a * x[c] for c, a in zip(columns, values, strict=True)), Fraction(0))
            for (columns, values), limit in zip(all_rows, limits, strict=True)
        ]
        costs = [Fraction(int(j < rows.objective)) for j in range(n)]
        for (columns, values), price in zip(all_rows, y, strict=True):
            if price:
                for c, a in zip(columns, values, strict=True):
                    costs[c] -= a * price
        violation = max([-v for v in x] + [-gap for gap in gaps[:m]] + [abs(gap) for gap in gaps[m:]])
        reduced = costs + [-price for price in y[:m]]
        before = primal, dual
        primal = _next_factor(primal, step, violation)
        lower = [_scale_up(-v, primal) for v in x]
        lower += [_scale_up(-gap * f, primal) for gap, f in zip(gaps[:m], factors[:m], strict=True)]
        # The reduced cost of a variable must not be above 0, and it must be 0 if the variable is far from its limit.
        far = [abs(cost) for cost, low in zip(reduced, lower, strict=True) if low <= -_FAR]
        dual = _next_factor(dual, step, max(reduced + far))
        objective = [-_scale_up(cost, dual) for cost in costs]
        objective += [_scale_up(price / f, dual) for price, f in zip(y[:m], factors[:m], strict=True)]
        needed = [0.0] * m + [_scale_up(gap * f, primal) for gap, f in zip(gaps[m:], factors[m:], strict=True)]
        result = linprog(
            np.minimum(objective, _FAR),
            A_eq=matrix,
            b_eq=needed,
            bounds=[(low if low > -_FAR else -inf, inf) for low in lower],
            method="highs-ds",
            options=_TOLERANCES | {"maxiter": _PIVOTS * sum(matrix.shape)},
        )
        if result.status:
            if step <= _LEAST_GAIN:
                break
            step //= 2
            primal, dual = before
            continue
        step = gain
        x = [v + _scale_down(z, primal) for v, z in zip(x, result.x.tolist()[:n], strict=True)]
        y = [v - f * _scale_down(z, dual) for v, z, f in zip(y, result.eqlin.marginals.tolist(), factors, strict=True)]
        if min(primal, dual) >= bits:
            break
    return Solution(x, y[:m], y[m:])


def _row_factor(values: Sequence[int | Fraction]) -> Fraction:
    """Return the power of 2 by which a row with these coefficients is multiplied."""
    exponents = [frexp(abs(float(value)))[1] for value in values if value]
    return Fraction(2) ** (1 - (max(exponents) + min(exponents)) // 2) if exponents else Fraction(1)


def _next_factor(exponent: int, step: int, violation: Fraction) -> int:
    """Return the exponent e of the next scaling factor 2**e, 0 or more and at most ``exponent + step``.

    The scaled violation, ``violation * 2**e``, is at most 1 if e is above 0.
    """
    most = exponent + step
    if violation <= 0:
        return most
    return min(most, max(0, violation.denominator.bit_length() - violation.numerator.bit_length() - 1))


def _scale_up(value: Fraction, exponent: int) -> float:
    """Return ``value * 2**exponent`` as a float, or plus or minus infinity if the product is too large."""
    try:
        return (value.numerator << exponent) / value.denominator
    except OverflowError:
        return inf if value > 0 else -inf


def _scale_down(value: float, exponent: int) -> Fraction:
    """Return ``value / 2**exponent``, exactly."""
    numerator, denominator = value.as_integer_ratio()
    return Fraction(numerator, denominator << exponent)


def common_unit(values: Iterable[Fraction]) -> Fraction:
    """Return the greatest number of which all values are integer multiples."""
    nonzero = [value for value in values if value]
    scale = lcm(*(value.denominator for value in nonzero))
    return Fraction(gcd(*(int(value * scale) for value in nonzero)), scale)
