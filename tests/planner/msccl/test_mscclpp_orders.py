"""The verifier of MSCCL++ plans agrees with an executor that runs small plans in all orders (every_order.py)."""

import json
import random

import pytest
from budget import count
from every_order import NotModelledError, plan_faults
from mscclpp_plans import alike, all_to_all, gathered_by_ports, pipelined, plan
from mscclpp_values import operations
from strategies import names

from crossreduce import ScheduleError
from crossreduce.export.formats.mscclpp import to_mscclpp_json, verify_mscclpp_json
from crossreduce.planning import direct, one_device, ring

SYNC, END = "signal {P}; wait {P}; nop; ", "; nop; signal {P}; wait {P}"
PUT = "signal {p}; wait {p}; nop; put i0 > {p}.s0; nop; signal {p}; wait {p}; nop; re i0 s0 > o0"


def reduced(*blocks, **fields):
    return alike("allreduce", (1, 1), 2, fields.pop("scratch", 0), *blocks, **fields)


BASES = {
    "read": reduced(SYNC + "rre i0 {p}.i0 > o0" + END),
    "put": reduced(PUT, scratch=1),
    "three": alike("allgather", (1, 3), 3, 0, SYNC + "put i0 > {p}.o{g}; copy i0 > o{g}" + END),
    "semaphores": reduced(
        SYNC + "sem_release 0; sem_acquire 1; nop; signal {P}; wait {P}",
        "sem_acquire 0; nop; rre i0 {p}.i0 > o0; nop; sem_release 1",
        semaphores=[0, 0],
    ),
    "barriers": reduced(
        SYNC + "barrier 0 2; barrier 0 2; signal {P}; wait {P}", "barrier 0 2; rre i0 {p}.i0 > o0; barrier 0 2"
    ),
    "ports": gathered_by_ports(2),
    "pipeline": pipelined(unit=16),
    "all to all": all_to_all(2),
    "ring": to_mscclpp_json(ring(names(2))),
    "ring, out of place": to_mscclpp_json(ring(names(2)), inplace=False),
    "broadcast": to_mscclpp_json(ring(names(3), sources=["cpu:0"])),
    "direct": to_mscclpp_json(direct(names(2))),
    "one device": to_mscclpp_json(one_device(names(3), root="cpu:0")),
}


def small(text):
    """Return the bytes of a message whose chunks have one word."""
    content = json.loads(text)
    gpu = content["gpus"][0]
    return 16 * gpu["output_chunks" if content["collective"] == "allgather" else "input_chunks"]


def judged(text):
    """Return the verdict of the verifier: "right", "race", "deadlock" or "wrong"."""
    root = {"root": 0} if json.loads(text)["collective"] in ("broadcast", "reduce") else {}
    try:
        verify_mscclpp_json(text, nbytes=small(text), **root)
    except ScheduleError as error:
        return next((word for word in ("deadlock", "race") if f" a {word}" in str(error)), "wrong")
    return "right"


def compare(text):
    """Return the verdict, after a check that some order has its fault; "" if the executor does not model the plan."""
    verdict = judged(text)
    try:
        found = plan_faults(text)
    except NotModelledError:
        return ""
    if found is None:
        return ""
    agrees = not found if verdict == "right" else verdict in found or (verdict == "wrong" and found)
    assert agrees, f"{verdict}, but {found}\n{text}"
    return verdict


@pytest.mark.parametrize("text", BASES.values(), ids=BASES)
def test_the_bases_are_right(text):
    """Every plan that is changed below is accepted, and right in all orders."""
    assert compare(text) == "right"


def change(rng, content):
    """Change one random operation of a plan, or two."""
    ops, k = rng.choice(operations(content))
    others, j = rng.choice(operations(content))
    kind = rng.choice(["drop", "drop", "swap", "move", "nop", "copy", "channel", "semaphore", "kind", "index"])
    if kind == "drop":
        ops.pop(k)
    elif kind == "swap":
        j = rng.randrange(len(ops))
        ops[k], ops[j] = ops[j], ops[k]
    elif kind == "move" and ops[k]["name"] != "pipeline":
        op = ops.pop(k)
        others.insert(j, op)
    elif kind == "nop":
        ops.insert(k, {"name": "nop"})
    elif kind == "copy" and ops[k]["name"] != "pipeline":
        others.insert(j, json.loads(json.dumps(ops[k])))
    elif kind == "channel" and len(ops[k].get("channel_ids", ())) > 1:
        ops[k]["channel_ids"].pop(rng.randrange(2))
    elif kind == "semaphore":
        for gpu in content["gpus"]:
            for semaphore in gpu["semaphores"]:
                semaphore["init_value"] = rng.choice([0, 0, 1])
    elif kind == "kind" and ops[k]["name"] in ("signal", "wait", "sem_acquire", "sem_release"):
        pairs = {"signal": "wait", "wait": "signal", "sem_acquire": "sem_release", "sem_release": "sem_acquire"}
        ops[k]["name"] = pairs[ops[k]["name"]]
    elif kind == "index":
        for span in rng.sample(spans := [*ops[k].get("src_buff", ()), *ops[k].get("dst_buff", ())], min(1, len(spans))):
            span["index"] = max(0, span["index"] + rng.choice([-1, 1]))


@pytest.mark.parametrize("name", BASES)
def test_the_verdict_holds_in_every_order(name):
    """The verifier accepts a changed plan if and only if no order has a race, a deadlock, a wrong result or a signal
    that is left over; and the fault that it names is one of some order."""
    rng, verdicts = random.Random(name), []
    for _ in range(count(150)):
        content = json.loads(BASES[name])
        for _ in range(rng.choice([1, 1, 2, 3])):
            change(rng, content)
        verdicts.append(compare(json.dumps(content)))
    assert len([verdict for verdict in verdicts if verdict]) >= len(verdicts) // 2


def drawn(rng):
    """Return a random plan whose signals and waits, and releases and acquires, are paired."""
    n, blocks = rng.choice([2, 2, 3]), rng.choice([1, 1, 2])
    lists = {(g, t): [] for g in range(n) for t in range(blocks)}
    # A channel belongs to one threadblock at each end, as the verifier demands.
    owner = {(g, p): rng.randrange(blocks) for g in range(n) for p in range(n)}
    for _ in range(rng.randint(1, 6)):
        a, b = rng.sample(range(n), 2)
        for ops, op in ((lists[a, owner[a, b]], f"signal {b}"), (lists[b, owner[b, a]], f"wait {a}")):
            ops.insert(rng.randint(0, len(ops)), op)
    for _ in range(rng.choice([0, 1, 2, 3]) if blocks > 1 else 0):
        t = rng.randrange(2)  # on GPU 0, threadblock t releases semaphore t for the other one
        for ops, op in ((lists[0, t], f"sem_release {t}"), (lists[0, 1 - t], f"sem_acquire {t}")):
            ops.insert(rng.randint(0, len(ops)), op)
    for _ in range(rng.choice([0, 0, 1, 2])):
        (g, _), ops = rng.choice([*lists.items()])
        p = rng.choice([p for p in range(n) if p != g])
        ops.insert(rng.randint(0, len(ops)), rng.choice([f"put i0 > {p}.s{g}", "copy i0 > o0", f"rre i0 {p}.i0 > o0"]))
    for ops in lists.values():
        for k in reversed(range(len(ops) + 1)):
            if rng.random() < 0.6:
                ops.insert(k, "nop")
    gpus = [(n, *("; ".join(lists[g, t]) for t in range(blocks))) for g in range(n)]
    return plan("allreduce", (1, 1), *gpus, semaphores=[0, 0])


def test_random_plans():
    """As above, for random plans of paired signals, waits, releases and acquires: most have a deadlock or not by the
    order of their operations alone."""
    rng = random.Random(45)
    verdicts = [compare(drawn(rng)) for _ in range(count(1500))]
    assert {"deadlock", "race", "wrong"} <= {*verdicts}
    assert verdicts.count("deadlock") > len(verdicts) // 10
