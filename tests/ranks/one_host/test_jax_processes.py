"""Collectives of JAX programs in jobs of several processes on this machine: values, groups, order, and how they end.

Each test starts a job whose processes check their own results: see ``jax_cases``.
"""

import jax_job
import pytest

pytestmark = pytest.mark.usefixtures("jax_")


def test_results_are_right_and_have_the_same_bits_in_all_processes():
    """Reductions of every op and dtype, several leaves, exact sums; donated arguments, in place; gathers, scatters and
    exchanges, over axes in any order, also empty; gradients, and vmap; independent calls in any order."""
    bits = jax_job.passed(jax_job.run("order,donated,moves,gradients,reductions", 2, 2, limit_s=300))
    assert bits[0] == bits[1]


def test_axes_span_some_processes_or_some_devices():
    """Groups of devices in one process, of all processes, of two of three, and with other numbers of devices."""
    jax_job.passed(jax_job.run("meshes", 3, 2))


def test_independent_calls_pair_up_in_any_order():
    """Independent reductions, twins of one inner function, loops, and programs in flight get their own values."""
    jax_job.passed(jax_job.run("order", 3, 1))


@pytest.mark.parametrize(("threads", "programs"), [(6, 60), (3, 31)])
def test_many_programs_are_in_flight(monkeypatch, threads, programs):
    """XLA holds back the 33rd program of a device, in a thread. So it needs two threads per device for more of them.
    A warning says so if there are fewer."""
    monkeypatch.setenv("PJRT_NPROC", str(threads))
    results = jax_job.run("in_flight", 2, 3, arguments=[programs])
    jax_job.passed(results)
    assert all(("Set PJRT_NPROC=6 before JAX starts" in text) == (threads < 6) for _, text in results), results


@pytest.mark.parametrize("then", ["end", "shut down"])
def test_a_dead_process_is_named_and_the_others_end(then):
    """When a process is killed, the others get an error that names it, and end, although JAX waits in vain for it.
    Process 0, which runs JAX's coordination service, ends last: JAX aborts a process that the service leaves."""
    results = jax_job.run("dies", 3, 1, arguments=["2", then])
    assert [code for code, _ in results] == [0, 0, -9], results
    assert all(text.count("rank 2 died during") == 2 for _, text in results[:2]), results


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_process_that_ends_by_itself_is_named_and_all_end(leaver):
    """When the program of a process ends, the others get an error that says so, and all end, none before its time."""
    results = jax_job.run("leaves", 3, 1, arguments=[leaver])
    assert [code for code, _ in results] == [int(rank == leaver) for rank in range(3)], results
    assert all(f"rank {leaver} left during" in results[rank][1] for rank in {0, 1, 2} - {leaver}), results


@pytest.mark.parametrize(("victim", "how"), [(2, "died"), (1, "left")])
def test_a_process_that_ends_before_its_first_collective_is_named(monkeypatch, victim, how):
    """A process is killed, or ends, while the others begin to form the group. They do not wait for the time limit."""
    monkeypatch.setenv("CROSSREDUCE_JAX_TIMEOUT", "60")
    results = jax_job.run("absent", 3, 1, arguments=[victim, how])
    assert [code for code, _ in results] == [(-9 if how == "died" else 1) * (rank == victim) for rank in range(3)], (
        results
    )
    assert all(f"rank {victim} {how} before its first" in results[rank][1] for rank in {0, 1, 2} - {victim}), results


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_programs", ["different collectives", "float32[1, 7]", "process 1: all_reduce sum of float32[1, 5]"]),
        ("other_meshes", ["different collectives", "devices of processes 0, 1,", "devices of processes 1, 0,"]),
        ("other_versions", ["different versions", "rank 1: 0.0.1"]),
    ],
)
def test_processes_that_differ_are_named(case, words):
    """Other programs, meshes or versions of the library are an error on all processes that says which."""
    results = jax_job.run(case, 2, 1)
    jax_job.passed(results)
    for _, text in results:
        assert all(word in text for word in words), text


def test_a_device_that_does_not_arrive_is_named(monkeypatch):
    """If a device of a process takes another branch, its process says so, and the others name the process."""
    monkeypatch.setenv("CROSSREDUCE_JAX_TIMEOUT", "3")
    results = jax_job.run("missing_device", 2, 2)
    jax_job.passed(results)
    assert "position 0 of process 0 did not arrive" in results[0][1], results
    assert "did not begin to form" in results[1][1] or "rank 0" in results[1][1], results
