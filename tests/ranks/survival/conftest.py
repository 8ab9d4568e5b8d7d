"""Fixtures of tests in which ranks of ``crossreduce.processes`` meet."""

import pytest
from free_port import free_port


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Remove the variables that a launcher of the tests has set."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSSREDUCE_KEY", "TORCHELASTIC_USE_AGENT_STORE")
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"
