"""Weighted means: components are multiplied by their weights, and their sum is divided by the sum of the weights.

Input: a validated value, and weights. Output: a validated value of the replicas whose weights are not 0, whose mean is
the weighted mean. It then takes the path of every mean.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError, shown
from ..frameworks import Framework, Sparse
from ..ops import MOST_WHOLE, Numbers, ReduceOp, Weights, read_weights, require_mean
from .cross_device_ops import CrossDeviceOps
from .validation import Checked


def weights_of_call(weights: Any, replicas: int, op: ReduceOp, ops: CrossDeviceOps) -> Weights:
    """Return the weights of a call.

    Raises:
      ArgumentError: the weights are invalid, or the op is not a mean.
      UnsupportedError: the op is a custom one, which would not use them.
    """
    require_mean(op)
    if not ops.supports_weights:
        problem = "only the ops of this library, without accumulation_fn, compute weighted means."
        raise UnsupportedError.of(problem, shown(ops), 'cross_device_ops=AllReduceCrossDeviceOps("auto")')
    return read_weights(weights, replicas)


def weighted(value: Checked, weights: Weights, exact: bool) -> Checked:
    """Return the components that have weights, multiplied by them.

    If ``exact``, floats are not multiplied: the kernel counts each component as often as its weight states.

    Raises:
      UnsupportedError: the weighted mean cannot be exact.
    """
    kept, facts = weights.kept, value.facts
    values, devices = (tuple(row[k] for k in kept) for row in (value.values, value.devices))
    numbers = facts.numbers._replace(divisor=len(kept))
    facts = facts._replace(arrays=[facts.arrays[k] for k in kept], numbers=numbers)
    if weights.are_equal:
        return Checked.from_facts(values, devices, facts)
    factors, total = weights.factors, weights.total
    if exact:
        if facts.sparse or not weights.whole:
            problem = "an exact weighted mean needs dense arrays, and weights in the ratio of whole numbers"
            given = "sparse arrays" if facts.sparse else f"weights in the ratio {shown(factors)}"
            remedy = "numbers of samples as weights; or exact=False"
            raise UnsupportedError.of(f"{problem} with a sum of at most {MOST_WHOLE}.", given, remedy)
        factors, total = tuple(map(float, weights.whole)), sum(weights.whole)
        numbers = numbers._replace(divisor=total).exactly()
        if numbers.exact:
            facts = facts._replace(numbers=numbers._replace(weights=weights.whole))
            return Checked.from_facts(values, devices, facts)
    scaled = [_scaled(facts.framework, x, numbers, by) for x, by in zip(facts.arrays, factors, strict=True)]
    spec = facts.spec._replace(dtype=numbers.accumulator)
    numbers = numbers._replace(dtype=numbers.accumulator, divisor=total)
    return Checked.from_facts(values, devices, facts._replace(arrays=scaled, spec=spec, numbers=numbers))


def _scaled(framework: Framework, x: Any, numbers: Numbers, factor: float) -> Any:
    """Return a new array: ``x`` in the accumulator's dtype, times a factor."""
    if isinstance(x, Sparse):
        return x._replace(values=_scaled(framework, x.values, numbers, factor))
    wide = numbers._replace(result=numbers.accumulator, divisor=1)
    product = framework.times(framework.finish(x, wide), factor)
    return framework.finish(product, wide._replace(dtype=wide.accumulator))
