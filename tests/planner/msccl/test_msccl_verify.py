"""The verifier of MSCCL XML agrees with a simulated machine that runs the files on numbers (msccl_machine.py):
in random orders, and small files in all orders (every_order.py)."""

import random
import xml.etree.ElementTree as ET

import pytest
from budget import count
from every_order import file_faults
from exports import exported, rotated
from msccl_files import LATE, SWAP, apart, file, fused_ring, one_step, pairwise, two
from msccl_machine import fault
from msccl_machine import modes as modes_of
from strategies import names

from crossreduce import ScheduleError
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import PLANNERS, one_device

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
    assert fault(text, seed=0, tries=20, slots=8) is None


def steps_of(top):
    return [(block, step) for block in top.iter("tb") for step in block]


# Twice as many files lose a wait as have any other change.
CHANGES = ["drop", "swap", "move", "offset", "buffer", "count", "type", "peers", "drop wait", "drop wait", "wait"]
CHANGES += ["signal", "scratch"]


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


def agree(text, slots, seed):
    """Return whether the verifier accepts a file, and check that random executions on the machine confirm it."""
    try:
        verify_msccl_xml(text, slots=slots)
    except ScheduleError as error:
        reason = str(error)
        # A race is refused even if both of its orders give the same result.
        assert "a race" in reason or fault(text, seed, tries=100, slots=slots) is not None, f"{reason}\n{text}"
        return False
    found = fault(text, seed, tries=10, slots=slots)
    assert found is None, f"accepted, but {found}\n{text}"
    return True


@pytest.mark.parametrize("name", BASES)
def test_the_verifier_agrees_with_the_machine(name):
    """A randomly changed file that the verifier accepts is right in random executions. A changed file that it refuses
    for another reason than a race is wrong in one of them. Both happen."""
    rng = random.Random(name)
    accepted = []
    for seed in range(count(100)):
        top = ET.fromstring(BASES[name])
        for _ in range(rng.choice([1, 1, 1, 2])):
            change(rng, top)
        accepted.append(agree(ET.tostring(top, encoding="unicode"), slots=rng.choice([1, 2, 8]), seed=seed))
    assert accepted.count(False) >= len(accepted) // 3
    assert accepted.count(True) >= 1


def drawn(rng):
    """Return a random file of two or three GPUs, whose messages match, with threadblocks that wait for each other."""
    n = rng.choice([2, 2, 3])
    gpus = [[] for _ in range(n)]  # threadblocks: [send, recv, channel, steps]; a step: [type, src, dst, count, *words]

    def end(gpu, which, peer, channel):
        """Return a threadblock for one end of a connection, perhaps one that has the other end of another one."""
        free = [block for block in gpus[gpu] if block[which] < 0 and block[2] == channel]
        if not free or (len(gpus[gpu]) < 3 and rng.random() < 0.5):
            gpus[gpu].append([-1, -1, channel, []])
            free = gpus[gpu][-1:]
        block = rng.choice(free)
        block[which] = peer
        return block[3]

    def spot():
        return rng.choice("iiis") + rng.choice("01")

    links = [(a, b, channel) for a in range(n) for b in range(n) if a != b for channel in (0, 1)]
    ends = [(end(a, 0, b, c), end(b, 1, a, c)) for a, b, c in rng.sample(links, rng.randint(1, 4))]
    for _ in range(rng.randint(1, 5)):
        sends, receives = rng.choice(ends)
        sends.insert(rng.randint(0, len(sends)), ["s", spot(), spot(), "1"])
        receives.insert(rng.randint(0, len(receives)), [rng.choice(["r", "r", "rrc"]), spot(), spot(), "1"])
    for block in (block for blocks in gpus for block in blocks):
        steps = block[3]
        for k in reversed(range(len(steps) - 1)):
            if steps[k][0] in ("r", "rrc") and steps[k + 1][0] == "s" and rng.random() < 0.4:
                steps[k : k + 2] = [[rng.choice(["rcs", "rrs", "rrcs"]), spot(), spot(), "1"]]
        for _ in range(rng.choice([0, 0, 1, 2])):
            steps.insert(rng.randint(0, len(steps)), [rng.choice(["cpy", "re"]), spot(), spot(), "1"])
    for blocks in gpus:
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            waiting, awaited = rng.choice(blocks or [[0, 0, 0, []]]), rng.choice(blocks or [[0, 0, 0, []]])
            if waiting[3] and awaited[3]:
                step, number = rng.choice(waiting[3]), rng.randrange(len(awaited[3]))
                step[4:] = [*(word for word in step[4:] if word == "!"), f"<{blocks.index(awaited)}.{number}"]
                if rng.random() < 0.9 and "!" not in awaited[3][number]:
                    awaited[3][number].append("!")
    made = [
        (2, *((send, recv, channel, *map(" ".join, steps)) for send, recv, channel, steps in each)) for each in gpus
    ]
    return file("allreduce", 2, *made)


def judged(text, slots):
    """Return the verdict of the verifier: "right", "race", "deadlock" or "wrong"."""
    try:
        verify_msccl_xml(text, slots=slots)
    except ScheduleError as error:
        return next((word for word in ("deadlock", "race") if f" a {word}" in str(error)), "wrong")
    return "right"


SMALL = {
    **{f"{planner} 2": exported(planner, 2) for planner in ("ring", "direct", "one_device", "recursive_doubling")},
    "ring to cpu:1": exported("ring", 2, destinations=["cpu:1"]),
    "fused ring": fused_ring(3),
    "one step": one_step(2),
    "apart": apart(),
    "swap": two(SWAP, LATE),
    "drawn": None,
}


@pytest.mark.parametrize("name", SMALL)
def test_the_verdict_holds_in_every_order(name):
    """The verifier accepts a small file if and only if no order of its steps has a race, a deadlock or a wrong result,
    and the fault that it names is one of some order: for random files, and random changes of right ones."""
    rng, verdicts = random.Random(name), []
    for _ in range(count(600) if name == "drawn" else count(100)):
        text = drawn(rng) if name == "drawn" else SMALL[name]
        if name != "drawn":
            top = ET.fromstring(text)
            for _ in range(rng.choice([1, 1, 2])):
                change(rng, top)
            text = ET.tostring(top, encoding="unicode")
        slots = rng.choice([1, 2, 8])
        verdict = judged(text, slots)
        modes = [file_faults(text, slots, inplace, root=1 if "cpu:1" in name else 0) for inplace in modes_of(text)]
        if None in modes:
            continue
        found = set().union(*modes)
        several = any(int(step.get("cnt")) > 1 for _, step in steps_of(ET.fromstring(text)))
        agrees = not found if verdict == "right" else verdict in found or (verdict == "wrong" and found)
        # A chunk of a message is received when it was sent; the verifier waits for the end of the step.
        assert agrees or (verdict == "race" and several), f"{verdict}, but {found}\n{text}"
        verdicts.append(verdict)
    assert ({"deadlock", "race", "wrong"} if name == "drawn" else {"wrong"}) <= {*verdicts}
