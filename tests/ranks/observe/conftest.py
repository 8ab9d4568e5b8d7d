"""Fixtures for tests of traces: recorded traces, and the command that shows them."""

import pytest
from traced_ranks import TWO_HOSTS, across_hosts, some_calls, traced


@pytest.fixture
def trace(crossreduce):
    """Return a function that runs ``crossreduce trace`` and returns its exit code, stdout and stderr."""
    return lambda *args: crossreduce("trace", *args)


@pytest.fixture(scope="session")
def of_two(tmp_path_factory):
    """Return the folder with the trace of ``some_calls`` on two ranks."""
    folder = tmp_path_factory.mktemp("trace")
    traced(2, some_calls, folder)
    return folder


@pytest.fixture(scope="session")
def of_hosts(tmp_path_factory):
    """Return the folder with the trace of ``across_hosts``: ranks 0 to 2 on one host, ranks 3 and 4 on another."""
    folder = tmp_path_factory.mktemp("hosts")
    traced(5, across_hosts, folder, environment=TWO_HOSTS)
    return folder
