"""How much the tests draw: one function, scaled by one variable.

``CROSSREDUCE_TEST_BUDGET`` is the share of the full budget, 0.2 by default. ``scripts/nightly`` sets 1. Below 1 every
run draws the same examples, so that a failure repeats.
"""

import os

from hypothesis import settings

SHARE = float(os.environ.get("CROSSREDUCE_TEST_BUDGET", "0.2"))


def count(full, least=3):
    """Return how much a test repeats or draws if it does so ``full`` times with the full budget."""
    return max(least, round(full * SHARE))


def some(cases):
    """Return every seventh case by default, all with the full budget: 7 divides the length of no usual inner loop."""
    return list(cases)[:: max(1, round(1.4 / SHARE))] if SHARE < 1 else list(cases)


def examples(full, **options):
    """Return hypothesis' settings for a test that draws ``full`` examples with the full budget, and at least 3."""
    return settings(max_examples=count(full), **options)
