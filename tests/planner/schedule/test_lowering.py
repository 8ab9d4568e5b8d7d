"""The lowering: a program computes what its schedule computes, and so do its fused form and its parts for each device.

The schedules are those of all planners, and those of 1,000 random ones that happen to be right, as ``oracle.right``
finds by running them: custom steps in any order, with copies of copies, needless steps, swaps within a round and values
that several steps read.
"""

import dataclasses
import functools
import itertools
import random
from collections import Counter, defaultdict, deque
from fractions import Fraction

import oracle
import pytest
from planned import planned_for
from random_schedules import random_schedule
from strategies import ALGORITHMS, names
from test_verify import custom

from crossreduce import Chunk, Route, Schedule, ScheduleError, Step, Topology
from crossreduce.lowering import element_ranges, fuse, lower
from crossreduce.planning import PLANNERS, direct, one_device, ring
from crossreduce.planning.algorithms.scatter_and_gather import all_gather, reduce_scatter


@functools.cache
def schedules():
    """Return schedules that are right, by name."""
    made = {}
    for algorithm, n in itertools.product(ALGORITHMS, (1, 2, 3, 4, 5, 8)):
        planner, all_ = PLANNERS[algorithm], names(n)
        made[f"{algorithm} {n}"] = planner(all_)
        made[f"{algorithm} {n} packs"] = planner(all_, packs=3, first=1)
        made[f"{algorithm} {n} part"] = planner(all_, all_[: max(1, n - 1)], all_[n // 2 :])
    for n in (2, 3, 8):
        made[f"reduce_scatter {n}"] = reduce_scatter(direct(names(n)))
        made[f"all_gather {n}"] = all_gather(made[f"reduce_scatter {n}"])
    random_ones = {f"chance {seed}": random_schedule(random.Random(seed)) for seed in range(1_000)}
    right = {name: schedule for name, schedule in random_ones.items() if oracle.right(schedule)}
    assert len(right) > 150
    return made | right


def programs():
    return [(name, schedule, lower(schedule)) for name, schedule in schedules().items()]


def chunks():
    return [(name, chunk) for name, _, program in programs() for chunk in program.chunks]


def contributions(chunk):
    """Return distinct numbers whose sums tell how often each source contributes."""
    return [(max(chunk.sources) + 2) ** source for source in chunk.sources]


def values(chunk):
    """Return the value of each source and instruction of a chunk, as a number (see ``contributions``)."""
    numbers = contributions(chunk)
    for instruction in chunk.instructions:
        numbers.append(sum(numbers[operand] for operand in instruction.operands))
    return numbers


def test_instructions_compute_every_destinations_sum():
    """Each destination's result contains every source once, and is on this device. Each made value is used."""
    for name, schedule, program in programs():
        assert [chunk[:3] for chunk in program.chunks] == list(schedule.chunks), name
    for name, chunk in chunks():
        assert {values(chunk)[result] for result in chunk.results} == {sum(contributions(chunk))}, name
        assert tuple(chunk.devices[result] for result in chunk.results) == chunk.destinations, name
        read = {*chunk.results, *(operand for i in chunk.instructions for operand in i.operands)}
        assert read.issuperset(range(len(chunk.sources), len(chunk.devices))), name


def test_final_instructions_complete_the_sum():
    """An instruction is final if and only if it combines operands into the full sum. Each result depends on exactly one
    final instruction. ``kinds`` marks every value as input, partial or final."""
    for name, chunk in chunks():
        inputs, numbers = contributions(chunk), values(chunk)
        final_count = [0] * len(inputs)  # for each value, the number of final instructions that it depends on
        for value, i in enumerate(chunk.instructions, start=len(inputs)):
            assert i.final == (len(i.operands) > 1 and numbers[value] == sum(inputs)), name
            final_count.append(i.final + sum(final_count[operand] for operand in i.operands))
        due = 1 if len(inputs) > 1 else 0  # a single input is the result
        assert all(final_count[result] == due for result in chunk.results), name
        kinds = ["final" if x == sum(inputs) else "input" if x in inputs else "partial" for x in numbers]
        assert list(chunk.kinds) == kinds, name


def test_last_uses_are_the_last_readers():
    """``last_uses`` lists each operand once, at the last instruction that reads it. It lists no results."""
    for name, chunk in chunks():
        due = {}
        for k, i in enumerate(chunk.instructions):
            due.update({operand: k for operand in i.operands if operand not in chunk.results})
        listed = [(v, k) for k, i in enumerate(chunk.instructions) for v in i.last_uses]
        assert sorted(listed) == sorted(due.items()), name


def test_donated_memory_is_not_read_again():
    """Results are right if each combination is written over its donated operand, in shared memory.

    A final value may be of another dtype than the accumulator, so its memory is never taken over.
    """
    donated = 0
    for name, chunk in chunks():
        cells = [[x] for x in contributions(chunk)]
        inputs, finals = list(cells), []
        for i in chunk.instructions:
            total = sum(cells[operand][0] for operand in i.operands)
            if len(i.operands) == 1:
                cells.append(cells[i.operands[0]])
            elif i.donated < 0:
                cells.append([total])
            else:
                assert i.donated in (0, 1), name
                cell = cells[i.operands[i.donated]]
                assert not any(cell is x for x in inputs + finals), name
                cell[0] = total
                cells.append(cell)
                donated += 1
            finals += cells[-1:] if i.final else []
        assert [x[0] for x in inputs] == contributions(chunk), name
        assert all(cells[result][0] == sum(contributions(chunk)) for result in chunk.results), name
    assert donated > 300
    schedule = custom(3, [(0, (0, 1))], [(1, (0,))], [(0, (0, 2))], [(1, (1, 2)), (2, (0,))])
    instructions = lower(schedule).chunks[0].instructions  # a partial sum is donated to the last combination only
    combinations = [(i.operands, i.donated) for i in instructions if len(i.operands) > 1]
    assert combinations == [((0, 1), -1), ((3, 2), -1), ((4, 2), 0)]


def expressions(chunk):
    """Return the expression of each result: nested pairs, as left-to-right combination makes them."""
    found = list(range(len(chunk.sources)))
    for i in chunk.instructions:
        found.append(functools.reduce(lambda a, b: (a, b), [found[operand] for operand in i.operands]))
    return [found[result] for result in chunk.results]


def fused_expressions(program):
    """Run a fused program on its slots and return the expression of each result."""
    slots = [None] * program.slots

    def read(operand):
        assert operand >= 0 or slots[~operand] is not None
        return operand if operand >= 0 else slots[~operand]

    for slot, first, *more in program.folds:
        assert all(operand != ~slot for operand in more)  # the first operand replaces the slot
        slots[slot] = functools.reduce(lambda a, b: (a, b), map(read, more), read(first))
    return [read(operand) for operand in program.results]


def test_fused_programs_compute_equal_values_once():
    """Equal combinations are computed once, and a chain of combinations becomes one fold. Combinations of the same
    values in different orders stay separate."""
    for n in (2, 4, 8):
        assert len(fuse(lower(PLANNERS["one_shot"](names(n))).chunks[0]).folds) == 1
        doubling = fuse(lower(PLANNERS["recursive_doubling"](names(n))).chunks[0])
        assert sum(len(operands) - 1 for _, *operands in doubling.folds) == n - 1  # the number of additions
    ring_of_4 = fuse(lower(ring(names(4))).chunks[0])
    assert ring_of_4 == (1, ((0, 0, 1, 2, 3),), (~0, ~0, ~0, ~0))  # ~0: each result is slot 0
    forwards, backwards, copied = Step(0, 3, (0, 1, 2)), Step(0, 4, (2, 1, 0)), Step(0, 5, (4,))
    chunk = Chunk(Fraction(1), (0, 1, 2), (3, 4, 5))
    schedule = Schedule("reduce", "custom", names(6), (chunk,), ((forwards, backwards), (copied,)))
    assert fuse(lower(schedule).chunks[0]) == (2, ((0, 0, 1, 2), (1, 2, 1, 0)), (~0, ~1, ~1))


def check_minimal(chunk):
    """Assert that a fused program computes its chunk's expressions in order, with no needless value or fold."""
    made, due = fuse(chunk), expressions(chunk)
    for count in (None, *range(1, len(due))):
        assert fused_expressions(fuse(chunk, count)) == due[:count]
    # ``folds``: for each operand of each fold, the number of the fold that computed it, or ``None`` for an input.
    holder, folds = {}, []
    for number, (slot, *operands) in enumerate(made.folds):
        folds.append([holder[~x] if x < 0 else None for x in operands])
        holder[slot] = number
    last = [holder[~x] for x in made.results if x < 0]
    reads = Counter([*last, *(x for row in folds for x in row if x is not None)])
    assert all(reads[number] for number in range(len(folds))), "a value that nothing reads"
    assert all(row[0] is None or reads[row[0]] > 1 for row in folds), "a chain in two folds"


def test_fused_programs_of_planners_are_minimal():
    """The fused program of every planned or random chunk, and of a forest's, is right and has no needless folds."""
    machine = Topology.machine("dgx-1v")
    forest = planned_for(machine, "forest", machine.devices, machine.devices, 1 << 20)
    for _, chunk in [*chunks(), *(("forest", chunk) for chunk in lower(forest).chunks)]:
        check_minimal(chunk)


def run_messages(program):
    """Run the programs of all devices, in another order at each stage. Return the results by chunk and device."""
    everything = [program.on(device) for device in range(len(program.devices))]
    memories = [{} for _ in everything]
    for c, chunk in enumerate(program.chunks):
        for source, x in zip(chunk.sources, contributions(chunk), strict=True):
            memories[source][c] = x
    for r in range(program.round_count):
        wires = defaultdict(deque)  # the messages between two devices, in order
        order = random.Random(r).sample(range(len(everything)), len(everything))
        for device in order:
            stage, memory = everything[device].stages[r], memories[device]
            for value, dst in stage.sends:
                wires[device, dst].append((everything[device].values[value], memory[value]))
        for device in order:
            stage, memory = everything[device].stages[r], memories[device]
            for value, src in stage.receives:
                kind, memory[value] = wires[src, device].popleft()
                assert kind == everything[device].values[value]
            for made, operands, final in stage.combinations:
                assert everything[device].values[made].final == final
                memory[made] = sum(memory[operand] for operand in operands)
        assert not any(wires.values())
    return {
        (c, device): memories[device][value]
        for device, part in enumerate(everything)
        for c, value in enumerate(part.results)
        if value >= 0
    }


def test_devices_that_exchange_messages_get_every_sum():
    """Each device's own program, with messages in order, leaves the full sum on every destination and only there."""
    for name, _, program in programs():
        due = {
            (c, dst): sum(contributions(chunk)) for c, chunk in enumerate(program.chunks) for dst in chunk.destinations
        }
        assert run_messages(program) == due, name


def test_transfers_are_the_reads_of_other_devices():
    """Each operand on another device is one transfer, which is final if it carries a full sum."""
    for name, _, program in programs():
        due = Counter()
        for c, chunk in enumerate(program.chunks):
            numbers, places = values(chunk), chunk.devices
            reads = ((i, operand) for i in chunk.instructions for operand in i.operands)
            for i, operand in reads:
                if places[operand] != i.device:
                    due[c, places[operand], i.device, numbers[operand] == sum(contributions(chunk))] += 1
        transfers = [transfer for transfers in program.transfers for transfer in transfers]
        assert Counter((t.chunk, t.src, t.dst, t.final) for t in transfers) == due, name


def test_routes_and_pieces_survive():
    """A program keeps the number of pieces. Each transfer keeps its route for its round, or else for all rounds."""
    schedule = one_device(names(3)).cut_into(7)
    for_all_rounds, for_round_1 = Route(0, 1, 0, ("switch",)), Route(0, 0, 1, ("other",), 1)
    unused = Route(0, 0, 1, ("unused",), 0)  # round 0 has no transfer from device 0 to device 1
    program = lower(dataclasses.replace(schedule, routes=(for_all_rounds, for_round_1, unused)))
    assert program.pieces == 7
    through = {(t.src, t.dst): t.through for transfers in program.transfers for t in transfers}
    assert through == {(1, 0): ("switch",), (2, 0): None, (0, 1): ("other",), (0, 2): None}


def test_element_ranges_tile_the_buffer():
    """The ranges of a buffer follow each other and cover the buffer. None is empty, unless the buffer is empty."""
    for name, schedule, program in programs():
        for size in (1, 2, 5, 40):
            ranges = element_ranges(program, size)
            assert [0, *(stop for *_, stop in ranges)] == [*(start for _, start, _ in ranges), size], name
            assert all((start, stop) == schedule.spans(size)[c] and stop > start for c, start, stop in ranges), name
        assert element_ranges(program, 0) == ((0, 0, 0),)


def test_wrong_schedules_are_not_lowered():
    """``lower`` raises the error of ``verify``, each time. Equal schedules have one program. ``require_uniform``
    refuses a program whose chunks have different destinations."""
    wrong = custom(2, [(0, (0, 1))])
    for _ in range(2):
        with pytest.raises(ScheduleError, match="contribution of device cpu:0 is lost"):
            lower(wrong)
    assert lower(ring(names(3))) is lower(ring(names(3)))
    with pytest.raises(ScheduleError, match=r"same sources and destinations[\s\S]*reduce_scatter by direct, 3 chunks"):
        lower(reduce_scatter(direct(names(3)))).require_uniform()
