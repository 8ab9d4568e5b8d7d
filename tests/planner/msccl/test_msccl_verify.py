"""The verifier of MSCCL XML agrees with a simulated machine that runs the files on numbers (msccl_machine.py)."""

import random
import re
import xml.etree.ElementTree as ET

import pytest
from budget import count
from exports import rotated
from msccl_files import apart, fused_ring, one_step, pairwise
from msccl_machine import RECEIVING, Machine, RunError, fault
from strategies import names

from crossreduce import ScheduleError
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import PLANNERS, one_device


def exported(planner, n, **options):
    return to_msccl_xml(PLANNERS[planner](names(n), **options))


BASES = {
    **{f"{planner} 3": exported(planner, 3) for planner in PLANNERS},
    **{f"{planner} {n}": exported(planner, n) for planner in ("ring", "direct") for n in (2, 4)},
    "reduce": exported("hierarchical_copy", 4, destinations=["cpu:0"]),
    "broadcast": exported("ring", 3, sources=["cpu:0"]),
    "reduce_scatter": to_msccl_xml(rotated("reduce_scatter")),
    "all_gather": to_msccl_xml(rotated("all_gather")),
    "late own part": to_msccl_xml(one_device(names(4), root="cpu:3")),
    "fused ring": fused_ring(3),
    "one step": one_step(3),
    "apart": apart(),
    "all to all": pairwise(3),
}


@pytest.mark.parametrize("text", BASES.values(), ids=BASES)
def test_the_bases_are_right(text):
    """Every file that is mutated below is accepted, and right in random executions."""
    verify_msccl_xml(text)
    assert fault(text, 0, 20, slots=8) is None


def steps_of(top):
    return [(block, step) for block in top.iter("tb") for step in block]


CHANGES = (
    "drop", "swap", "move", "offset", "buffer", "count", "type", "peers", "drop wait", "drop wait", "wait", "signal",
    "scratch",
)  # fmt: skip


def change(rng, top):
    """Change a random step, threadblock or GPU of a file in one random way."""
    kind = rng.choice(CHANGES)
    block, step = rng.choice(steps_of(top))
    gpu = next(gpu for gpu in top if block in list(gpu))
    other = rng.choice(list(gpu))
    if kind == "drop":
        block.remove(step)
    elif kind == "swap":
        a, b = rng.randrange(len(block)), rng.randrange(len(block))
        block[a], block[b] = block[b], block[a]
    elif kind == "move":
        block.remove(step)
        other.insert(rng.randrange(len(other) + 1), step)
    elif kind == "offset":
        end = rng.choice(["srcoff", "dstoff"])
        step.set(end, str(max(0, int(step.get(end)) + rng.choice([-2, -1, 1, 2]))))
    elif kind == "buffer":
        step.set(rng.choice(["srcbuf", "dstbuf"]), rng.choice("ios"))
    elif kind == "count":
        step.set("cnt", str(rng.choice([1, 2, 3])))
    elif kind == "type":
        step.set("type", rng.choice(["s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"]))
    elif kind == "peers":
        key = rng.choice(["send", "recv", "chan"])
        block.attrib[key], other.attrib[key] = other.attrib[key], block.attrib[key]
    elif kind == "drop wait":
        waiting = [step for _, step in steps_of(top) if step.get("depid") != "-1"] or [step]
        rng.choice(waiting).attrib |= {"depid": "-1", "deps": "-1"}
    elif kind == "wait":
        step.attrib |= {"depid": other.get("id"), "deps": str(rng.randrange(len(other) + 1))}
    elif kind == "signal":
        step.set("hasdep", "10"[int(step.get("hasdep"))])
    else:
        gpu.set("s_chunks", str(max(0, int(gpu.get("s_chunks")) - 1)))
    for each in (block, other):
        for number, step in enumerate(each):
            step.set("s", str(number))


RACE = re.compile(
    r"gpu (\d+), tb (\d+), step (\d+) \(\w+\): a race\. It (reads|writes) .* \((in place|out of place)\), "
    r"which tb (\d+), step (\d+) \(\w+\) (reads|writes)"
)


def witnessed(text, error, rng):
    """Return whether the machine can reach a state in which both accesses of a race are possible."""
    gpu, block, step, does, mode, other, far, did = RACE.search(error).groups()
    machine = Machine(text, mode == "in place")
    sides = []
    for t, s, access in ((block, step, does), (other, far, did)):
        place = int(gpu), int(t)
        (at,) = [k for k, sent in enumerate(machine.programs[place]) if int(s) in sent.steps]
        sides.append((place, at, access))
    try:
        machine.run(rng, held={(place, at) for place, at, _ in sides})
    except RunError:
        return True
    touched = []
    for place, at, access in sides:
        now = machine.programs[place][at]
        if machine.at[place] != at or not machine.ready(place):
            return False
        if access == "writes" and now.type in RECEIVING and not machine.queues[machine.owner[place, "recv"]]:
            return False
        cells = set(machine.cells(place, now.dst)) if access == "writes" or now.type == "re" else set()
        if access == "reads":
            cells |= {cell for offset in now.adds for cell in machine.cells(place, now.src, offset)}
        touched.append(cells)
    return bool(touched[0] & touched[1]) and "writes" in (does, did)


def agree(text, slots, seed):
    """Return whether the verifier accepts a file, and check that the machine confirms it."""
    try:
        verify_msccl_xml(text, slots=slots)
    except ScheduleError as error:
        reason = str(error)
        if "a race" in reason:
            assert witnessed(text, reason, random.Random(seed)), f"{reason}\n{text}"
        else:
            assert fault(text, seed, 100, slots=slots) is not None, f"{reason}\n{text}"
        return False
    found = fault(text, seed, 10, slots=slots)
    assert found is None, f"accepted, but {found}\n{text}"
    return True


@pytest.mark.parametrize("name", BASES)
def test_the_verifier_agrees_with_the_machine(name):
    """A mutant is accepted if and only if random executions are right and no state allows two conflicting accesses.

    So a race is refused even if both of its orders give the same result.
    """
    rng = random.Random(name)
    answers = []
    for seed in range(count(100)):
        top = ET.fromstring(BASES[name])
        for _ in range(rng.choice([1, 1, 1, 2])):
            change(rng, top)
        answers.append(agree(ET.tostring(top, encoding="unicode"), rng.choice([1, 2, 8]), seed))
    assert answers.count(False) >= len(answers) // 3
    assert answers.count(True) >= 1
