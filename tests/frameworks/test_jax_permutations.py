"""The permutations that a schedule compiles to, run here on Python numbers: every planner, and many topologies."""

from collections import Counter

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from planned import planned

import crossreduce as cr
from crossreduce.engines.jax.permutations import compile_permutations
from crossreduce.lowering import lower
from crossreduce.planning import PLANNERS


def run(compiled, combine, start):
    """Run a compiled program on every device; return for each stack and device the rows of its result.

    A stack has the chunks of one size, one per row. Device d starts with ``start(chunk, d)`` in the row of a chunk.
    ``None`` replaces a row that a device did not receive, and a combination with it.
    """
    n = compiled.devices
    stacks = [[[[start(chunk, device) for chunk in chunks] for device in range(n)]] for chunks in compiled.stacks]

    def take(stack, places, device):
        found = []
        for block, row in places:
            rows = stacks[stack][block][device]
            found.append(rows[row] if rows is not None and row < len(rows) else None)
        return found

    for permutations, combinations in compiled.by_round:
        received = []
        for pairs, sent in permutations:
            assert all(most == 1 for side in (0, 1) for most in Counter(pair[side] for pair in pairs).values())
            sources = {dst: src for src, dst in pairs}
            received.append(
                [
                    [take(s, table[sources[d]], sources[d]) if d in sources else None for d in range(n)]
                    for s, table in enumerate(sent)
                ]
            )
        for blocks in received:  # only after all permutations of the round have sent their rows
            for stack, rows in zip(stacks, blocks, strict=True):
                stack.append(rows)
        for stack, operands in combinations:
            block = []
            for device in range(n):
                columns = zip(*(take(stack, table[device], device) for table in operands), strict=True)
                block.append([None if None in column else combine(column) for column in columns])
            stacks[stack].append(block)
    return [[take(s, table[device], device) for device in range(n)] for s, table in enumerate(compiled.results)]


def check(schedule):
    """Check that a compiled schedule adds every contribution once, and that the rounds have as few permutations
    as possible: the largest number of devices that one device sends to, or receives from."""
    program, n = lower(schedule), len(schedule.devices)
    compiled = compile_permutations(program)

    def digit(chunk, device):
        return (n + 1) ** (n * chunk + device)

    for chunks, devices in zip(compiled.stacks, run(compiled, sum, digit), strict=True):
        assert devices == [[sum(digit(chunk, device) for device in range(n)) for chunk in chunks]] * n
        assert len({schedule.chunks[chunk].share for chunk in chunks}) == 1
    assert sorted(chunk for chunks in compiled.stacks for chunk in chunks) == list(range(len(schedule.chunks)))
    partners = 0
    for transfers in program.transfers:
        pairs = {(transfer.src, transfer.dst) for transfer in transfers}
        partners += max((max(Counter(pair[side] for pair in pairs).values()) for side in (0, 1)) if pairs else [0])
    assert compiled.permutation_count == partners


@given(st.integers(1, 12), st.sampled_from(sorted(PLANNERS)), st.integers(1, 5), st.integers(0, 12))
def test_every_planners_schedule(n, algorithm, packs, first):
    """The program of every planner for equal links is correct and takes the fewest permutations."""
    names = strategies.names(n)
    check(planned(algorithm, names, names, packs, first))


@given(st.data())
def test_plans_for_any_topology(data):
    """On any topology, with uneven shares and routes, a plan's program is right and takes the fewest permutations."""
    topology = data.draw(strategies.wired(strategies.names(data.draw(st.integers(2, 6))), both_ways=False))
    algorithm = data.draw(st.sampled_from(["forest", "hierarchical_copy", "auto"]))
    check(cr.plan(topology, "all_reduce", data.draw(st.sampled_from([8, 1 << 26])), algorithm).schedule)


@pytest.mark.parametrize("algorithm", sorted(PLANNERS))
@pytest.mark.parametrize("n", [2, 3, 6, 8])
def test_every_device_combines_in_the_same_order(n, algorithm):
    """All devices compute the same expression, so even the payloads of NaN agree; one_shot keeps the sources' order."""
    names = strategies.names(n)
    compiled = compile_permutations(lower(planned(algorithm, names, names, 1)))

    def expression(operands):
        return "(" + "+".join(operands) + ")"

    for devices in run(compiled, expression, lambda _, device: str(device)):
        for rows in zip(*devices, strict=True):
            assert len(set(rows)) == 1
    if algorithm == "one_shot":
        assert devices[0] == ["(" + "+".join(map(str, range(n))) + ")"]


def test_other_collectives_are_rejected():
    """A broadcast cannot be compiled for mesh axes, nor can a reduction to some of the devices."""
    names = strategies.names(3)
    for sources, destinations in ((names[:1], names), (names, names[:1])):
        program = lower(planned("one_device", sources, destinations))
        with pytest.raises(cr.ScheduleError, match="must be a source and a destination of every chunk"):
            compile_permutations(program)
