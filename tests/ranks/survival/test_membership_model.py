"""The model check of agreements among ranks that may die. ``membership_model.py`` has the model and the properties.

The deliberate faults in ``scripts/faults.jsonl`` show that a protocol without one of its rules violates a property.
"""

from random import Random

import pytest
from budget import count
from membership_model import SCENARIOS, Model, Scenario, rounds

SLOW = [name for name, (scenario, states) in SCENARIOS.items() if len(scenario.hosts) > 2 and states > 17_000]


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in SCENARIOS])
def test_all_runs_have_the_properties(name):
    """Every state that a scenario can reach has the properties of ``membership_model``. ``states``: their number."""
    scenario, states = SCENARIOS[name]
    assert Model(scenario).check() == states


HOSTS = [(4,), (2, 2), (3, 1), (1, 2), (1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 1, 1, 1)]


@pytest.mark.parametrize("numbers", [2, 3])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_random_runs_have_the_properties(hosts, numbers):
    """Long random runs with many ballots, some agreements, and late or dying ranks have the properties, too."""
    size = sum(hosts)
    events = {"most": 9, "crashes": size - 1, "late": (size - 1,), "numbers": numbers, "proposals": "any"}
    Model(Scenario(hosts, rounds(range(size), 3), **events)).wander(Random(0), walks=count(150), length=120)
