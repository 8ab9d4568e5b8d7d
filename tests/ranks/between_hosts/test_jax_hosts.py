"""Collectives of JAX programs in a job of two simulated hosts, with two processes on each."""

import jax_job
import namespaces
import pytest

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("jax_")]


@pytest.mark.parametrize("case", ["reductions", "order", "moves"])
def test_processes_of_two_hosts_compute_the_same(case):
    """The values are right, all processes have the same bits, and independent calls pair up."""
    with namespaces.hosts(2) as bed:
        results = jax_job.run(
            case, 4, 1, 150, bed.addresses[0], lambda command, rank, **how: bed.run(rank // 2, command, **how)
        )
        last = jax_job.passed(results)
    assert case != "reductions" or len(set(last)) == 1, last


def test_a_dead_process_of_another_host_is_named():
    """When a process of the second host is killed, the others get an error that names it, and end."""
    with namespaces.hosts(2) as bed:
        results = jax_job.run(
            "dies",
            4,
            1,
            100,
            bed.addresses[0],
            lambda command, rank, **how: bed.run(rank // 2, command, **how),
            arguments=["3"],
        )
    assert [code for code, _ in results] == [0, 0, 0, -9], results
    assert all("rank 3 died" in text for _, text in results[:3]), results
