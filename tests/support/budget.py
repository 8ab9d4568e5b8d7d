"""How much the tests draw: one function, scaled by one variable.

``CROSSREDUCE_TEST_BUDGET`` is the share of the full budget, 0.2 by default. ``scripts/nightly`` sets 1. Below 1 every
run draws the same examples, so that a failure repeats.
"""

import os

from hypothesis import settings

SHARE = float(os.environ.get("CROSSREDUCE_TEST_BUDGET", "0.2"))


def examples(full, **options):
    """Return hypothesis' settings for a test that draws ``full`` examples with the full budget, and at least 3."""
    return settings(max_examples=max(3, round(full * SHARE)), **options)
