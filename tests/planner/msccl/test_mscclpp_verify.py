"""The verifier of MSCCL++ plans agrees with a machine that runs them thread by thread (mscclpp_threads.py)."""

import copy
import json
import random
import re

import pytest
from budget import count
from mscclpp_plans import (
    all_to_all,
    exchanged,
    gathered_by_ports,
    met,
    packets,
    packets_by_ports,
    packets_scattered,
    pipelined,
    stored,
    switched,
)
from mscclpp_threads import fault, operations
from strategies import names

from crossreduce import ScheduleError
from crossreduce.export.formats.mscclpp import to_mscclpp_json, verify_mscclpp_json
from crossreduce.planning import PLANNERS


def exported(planner, n, *, inplace=True, **options):
    return json.dumps(json.loads(to_mscclpp_json(PLANNERS[planner](names(n), **options), inplace=inplace)))


BASES = {
    "direct 2": exported("direct", 2),
    "ring 3": exported("ring", 3, inplace=False),
    "one_device 3": exported("one_device", 3),
    "recursive_doubling 2": exported("recursive_doubling", 2, inplace=False),
    "reduce": exported("ring", 3, destinations=["cpu:0"]),
    "broadcast": exported("one_device", 3, sources=["cpu:0"], inplace=False),
    "packets": packets(2),
    "packets, scattered": packets_scattered(2),
    "packets, one buffer": packets_scattered(2, use_double_scratch_buffer=False),
    "packets, threadblocks": packets_scattered(2, apart=True),
    "packets, ports": packets_by_ports(),
    "exchanged": exchanged(3),
    "ports": gathered_by_ports(2),
    "pipelined": pipelined(),
    "barriers": met(),
    "switch": switched(2),
    "switch store": stored(2),
    "all to all": all_to_all(2),
}
ROOTS = {"reduce": 0, "broadcast": 0}


@pytest.mark.parametrize("name", BASES)
def test_the_bases_are_right(name):
    """Every plan that is mutated below is proved, and right in random executions."""
    report = verify_mscclpp_json(BASES[name])
    assert report.root == ROOTS.get(name)
    for chunk in (32, 96):
        assert fault(BASES[name], 0, 4, chunk, root=report.root) is None


CHANGES = (
    "drop", "drop channel", "swap", "swap neighbours", "index", "buffer", "target", "nop", "repeat", "channel",
    "source",
)  # fmt: skip


def change(content, rng):
    """Change one random operation of a plan in one random way, if it can be changed so."""
    ops, k = rng.choice(operations(content))
    kind, op = rng.choice(CHANGES), ops[k]
    spans, ids = op.get("src_buff", []) + op.get("dst_buff", []), op.get("channel_ids", [])
    local, remote = ([span for span in spans if key in span] for key in ("type", "buffer_id"))
    if kind == "drop":
        del ops[k]
    elif kind == "drop channel" and len(ids) > 1 and "src_buff" not in op:
        ids.pop(rng.randrange(len(ids)))
    elif kind in ("swap", "swap neighbours"):
        other = rng.randrange(len(ops)) if kind == "swap" else max(k - 1, 0)
        ops[k], ops[other] = ops[other], ops[k]
    elif kind == "index" and spans:
        span = rng.choice(spans)
        span["index"] = max(0, span["index"] + rng.choice([-1, 1]))
    elif kind == "buffer" and local:
        rng.choice(local)["type"] = rng.choice("ios")
    elif kind == "target" and remote:
        span = rng.choice(remote)
        span["buffer_id"] = max(0, span["buffer_id"] + rng.choice([-1, 1]))
    elif kind == "nop":
        ops[k] = {"name": "nop"}
    elif kind == "repeat":
        ops.insert(k, copy.deepcopy(op))
    elif kind == "channel" and ids:
        ids[rng.randrange(len(ids))] = rng.randrange(2)
    elif kind == "source" and op["name"] in ("re", "rre", "repkt", "respkt") and len(op["src_buff"]) > 1:
        op["src_buff"].pop()


PLACE = re.compile(r"gpu (\d+), tb (\d+), op (\d+)")


def confirmed(text, error, seed, root):
    """Return whether the machine finds a fault of a plan, with the operations that an error names run late."""
    content = json.loads(text)
    size = re.search(r"messages of (\d+) bytes", error)
    gpu = content["gpus"][0]
    count = gpu["output_chunks" if content["collective"] == "allgather" else "input_chunks"]
    chunk = int(size[1]) // count if size else 32
    held = [(int(g), int(t), {int(k)}) for g, t, k in PLACE.findall(error)]
    for k in range(90):
        late = held[k % len(held)] if held and k % 3 else None
        if fault(text, seed + k, 1, max(chunk, 16), root=root, held=late) is not None:
            return True
    return False


def is_proved(text, root):
    try:
        verify_mscclpp_json(text, root=root)
    except ScheduleError:
        return False
    return True


def agrees(text, seed, root):
    """Return whether the verifier accepts a plan (``None``: it cannot be read), after the machine confirmed it."""
    try:
        report = verify_mscclpp_json(text, root=root)
    except ScheduleError as error:
        reason = str(error)
        if re.search(r"must be numbers of|must be an integer|unexpected kinds", reason):
            return None
        if "rlx" in text and is_proved(text.replace("rlx", ""), root):
            return False  # only the order of memory is missing, which the machine does not show
        assert confirmed(text, reason, seed, root), f"{reason}\n{text}"
        return False
    for nbytes in report.nbytes[1::2]:
        found = fault(text, seed, 2, nbytes // report.chunks, root=root)
        assert found is None, f"accepted, but {found}\n{text}"
    return True


def mutant(name, seed):
    rng = random.Random(f"{name} {seed}")
    content = json.loads(BASES[name])
    changes = rng.choice([1, 1, 1, 2])
    while changes > 0 or json.dumps(content) == BASES[name]:
        change(content, rng)
        changes -= 1
    return json.dumps(content)


@pytest.mark.parametrize("name", BASES)
def test_the_verifier_agrees_with_the_machine(name):
    """A mutant is proved if and only if random executions are right and no two conflicting accesses are possible at
    the same time."""
    answers = [agrees(mutant(name, seed), seed, ROOTS.get(name)) for seed in range(count(30))]
    assert answers.count(False) >= len(answers) // 4
