"""The verifier of MSCCL XML is checked by a machine that runs the files on numbers (msccl_machine.py)."""

import random
import re
import time
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from msccl_machine import RECEIVING, Machine, RunError, fault
from strategies import names

from crossreduce import ArgumentError, Chunk, Schedule, ScheduleError, Step
from crossreduce.export.msccl.verifier import verify_msccl_xml
from crossreduce.export.msccl.writer import to_msccl_xml
from crossreduce.planning import PLANNERS, one_device


def file(coll, chunks, *gpus, **attributes):
    """Write a file by hand. A GPU is (scratch chunks, threadblocks), a threadblock (send, recv, channel, steps).

    A step is a line such as "rrc i0 o0 2 <1.3 !": type, source, destination, count, what it waits for, "it signals".
    """
    sizes = {"allgather": (chunks // len(gpus), chunks), "reducescatter": (chunks, chunks // len(gpus))}
    inputs, outputs = sizes.get(coll, (chunks, chunks))
    head = {"name": "by hand", "proto": "Simple", "nchannels": 2, "nchunksperloop": chunks, "ngpus": len(gpus)}
    head |= {"coll": coll, "inplace": 1, "outofplace": 0, "minBytes": 0, "maxBytes": 0} | attributes
    lines = ["<algo " + " ".join(f'{key}="{value}"' for key, value in head.items() if value is not None) + ">"]
    for g, (scratch, *blocks) in enumerate(gpus):
        lines.append(f'<gpu id="{g}" i_chunks="{inputs}" o_chunks="{outputs}" s_chunks="{scratch}">')
        for t, (send, recv, channel, *steps) in enumerate(blocks):
            lines.append(f'<tb id="{t}" send="{send}" recv="{recv}" chan="{channel}">')
            for s, step in enumerate(steps):
                kind, src, dst, count, *more = step.split()
                waits = [word[1:].split(".") for word in more if word[0] == "<"] or [("-1", "-1")]
                lines.append(
                    f'<step s="{s}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" '
                    f'dstoff="{dst[1:]}" cnt="{count}" depid="{waits[0][0]}" deps="{waits[0][1]}" '
                    f'hasdep="{int("!" in more)}"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def fused_ring(n, **attributes):
    """The ring that NCCL itself runs: one threadblock a GPU, which passes on what it receives."""
    gpus = []
    for g in range(n):
        order = [(g - k) % n for k in range(n)]
        steps = [f"s i{g} i{g} 1"]
        steps += [f"rrs i{c} i{c} 1" for c in order[1 : n - 1]]
        steps += [f"rrcs i{order[n - 1]} i{order[n - 1]} 1"]
        steps += [f"rcs i{c} i{c} 1" for c in order[: n - 2]]
        steps += [f"r i{order[n - 2]} i{order[n - 2]} 1"]
        gpus.append((0, ((g + 1) % n, (g - 1) % n, 0, *steps)))
    return file("allreduce", n, *gpus, **attributes)


def one_step(n, **attributes):
    """The style of msccl-tools' allreduce_allpairs and RCCL's allreduce-1step files: everybody sends everything to
    everybody's scratch memory; threadblocks then share the additions, behind chains of nops."""
    gpus = []
    for g in range(n):
        peers = [p for p in range(n) if p != g]
        blocks = []
        for t in range(n):
            own = [t] if t == n - 1 else []  # the last one adds only
            steps = []
            if not own:
                steps += [f"s i0 s0 {n} !", f"r i0 s{t * n} {n} !"]
            waits = [f"{u}.{k}" for u in range(n - 1) for k in (0, 1) if u != t]
            steps += [f"nop i-1 o-1 0 <{wait}" for wait in waits[:-1]]
            steps += [f"re s{u * n + t} i{t} 1" + (f" <{waits[-1]}" if u == 0 and waits else "") for u in range(n - 1)]
            peer = -1 if own else peers[t]
            blocks.append((peer, peer, 0, *steps))
        gpus.append(((n - 1) * n, *blocks))
    return file("allreduce", n, *gpus, proto="LL", **attributes)


def apart():
    """An exchange of two GPUs whose sends, receives and additions each have a threadblock of their own."""
    gpus = [
        (
            2,
            (1 - g, -1, 0, "s i0 s0 2 !"),
            (-1, 1 - g, 0, "r i0 s0 2 !"),
            (-1, -1, 0, "nop i-1 o-1 0 <0.0", "re s0 i0 2 <1.0"),
        )
        for g in range(2)
    ]
    return file("allreduce", 2, *gpus)


def pairwise(n):
    """An all-to-all: everybody sends its chunk p to rank p."""
    gpus = [
        (
            0,
            (-1, -1, 0, f"cpy i{g} o{g} 1"),
            *((p, p, 0, f"s i{p} o{g} 1", f"r i{p} o{p} 1") for p in range(n) if p != g),
        )
        for g in range(n)
    ]
    return file("alltoall", n, *gpus, inplace=0, outofplace=1)


def scatter_gather(n, which):
    """A reduce-scatter or all-gather whose chunks go straight between their owners and all others."""
    everyone = tuple(range(n))
    if which == "reduce_scatter":
        chunks = tuple(Chunk(Fraction(1, n), everyone, (k,)) for k in everyone)
        steps = tuple(Step(k, k, everyone) for k in everyone)
    else:
        chunks = tuple(Chunk(Fraction(1, n), (k,), everyone) for k in everyone)
        steps = tuple(Step(k, dst, (k,)) for k in everyone for dst in everyone if dst != k)
    return Schedule(which, "direct", tuple(f"cuda:{k}" for k in everyone), chunks, (steps,))


def exported(planner, n, **options):
    return to_msccl_xml(PLANNERS[planner](names(n), **options))


BASES = {
    **{f"{planner} {n}": exported(planner, n) for planner in PLANNERS for n in (2, 3, 4)},
    "reduce": exported("hierarchical_copy", 4, destinations=["cpu:0"]),
    "broadcast": exported("ring", 3, sources=["cpu:0"]),
    "reduce_scatter": to_msccl_xml(scatter_gather(3, "reduce_scatter")),
    "all_gather": to_msccl_xml(scatter_gather(3, "all_gather")),
    "late own part": to_msccl_xml(one_device(names(4), root="cpu:3")),
    "fused ring": fused_ring(3),
    "one step": one_step(3),
    "apart": apart(),
    "all to all": pairwise(3),
}


@pytest.mark.parametrize("text", BASES.values(), ids=BASES)
def test_the_bases_are_right(text):
    """Every file that mutants are made of is accepted, and right in every execution that is tried."""
    verify_msccl_xml(text)
    assert fault(text, 0, 20, slots=8) is None


# ---- mutants


def steps_of(top):
    return [(block, step) for block in top.iter("tb") for step in block]


def renumber(block):
    for number, step in enumerate(block):
        step.set("s", str(number))


def drop_step(rng, top):
    block, step = rng.choice(steps_of(top))
    block.remove(step)
    renumber(block)


def swap_steps(rng, top):
    block = rng.choice([block for block in top.iter("tb") if len(block)])
    a, b = rng.randrange(len(block)), rng.randrange(len(block))
    block[a], block[b] = block[b], block[a]
    renumber(block)


def move_step(rng, top):
    block, step = rng.choice(steps_of(top))
    gpu = rng.choice([gpu for gpu in top if block in list(gpu)])
    other = rng.choice(list(gpu))
    block.remove(step)
    other.insert(rng.randrange(len(other) + 1), step)
    renumber(block)
    renumber(other)


def change_offset(rng, top):
    _, step = rng.choice(steps_of(top))
    end = rng.choice(["srcoff", "dstoff"])
    step.set(end, str(max(0, int(step.get(end)) + rng.choice([-2, -1, 1, 2]))))


def change_buffer(rng, top):
    _, step = rng.choice(steps_of(top))
    step.set(rng.choice(["srcbuf", "dstbuf"]), rng.choice("ios"))


def change_count(rng, top):
    _, step = rng.choice(steps_of(top))
    step.set("cnt", str(rng.choice([1, 2, 3])))


def change_type(rng, top):
    _, step = rng.choice(steps_of(top))
    step.set("type", rng.choice(["s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"]))


def swap_peers(rng, top):
    gpu = rng.choice(list(top))
    a, b = rng.choice(list(gpu)), rng.choice(list(gpu))
    way = rng.choice(["send", "recv", "chan"])
    a.attrib[way], b.attrib[way] = b.attrib[way], a.attrib[way]


def drop_dependency(rng, top):
    waiting = [step for _, step in steps_of(top) if step.get("depid") != "-1"]
    if waiting:
        step = rng.choice(waiting)
        step.set("depid", "-1")
        step.set("deps", "-1")


def change_dependency(rng, top):
    block, step = rng.choice(steps_of(top))
    gpu = next(gpu for gpu in top if block in list(gpu))
    number = rng.randrange(len(gpu))
    step.set("depid", str(number))
    step.set("deps", str(rng.randrange(len(gpu[number]) + 1)))


def toggle_signal(rng, top):
    _, step = rng.choice(steps_of(top))
    step.set("hasdep", "10"[int(step.get("hasdep"))])


def shrink_scratch(rng, top):
    gpu = rng.choice(list(top))
    gpu.set("s_chunks", str(max(0, int(gpu.get("s_chunks")) - 1)))


MUTATIONS = (
    drop_step,
    swap_steps,
    move_step,
    change_offset,
    change_buffer,
    change_count,
    change_type,
    swap_peers,
    drop_dependency,
    drop_dependency,
    change_dependency,
    toggle_signal,
    shrink_scratch,
)

RACE = re.compile(
    r"gpu (\d+), tb (\d+), step (\d+) \(\w+\): a race\. It (reads|writes) .* \((in place|out of place)\), "
    r"which tb (\d+), step (\d+) \(\w+\) (reads|writes)"
)


def witnessed(text, error, rng):
    """Say whether the machine can bring a file to where both accesses of a race can happen next."""
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
    """Return the verifier's answer, after making sure that the machine gives the same."""
    try:
        verify_msccl_xml(text, slots=slots)
    except ScheduleError as error:
        said = str(error)
        if "a race" in said:
            assert witnessed(text, said, random.Random(seed)), f"{said}\n{text}"
        else:
            assert fault(text, seed, 100, slots=slots) is not None, f"{said}\n{text}"
        return False
    found = fault(text, seed, 10, slots=slots)
    assert found is None, f"accepted, but {found}\n{text}"
    return True


@pytest.mark.parametrize("name", BASES)
def test_the_verifier_agrees_with_the_machine(name):
    """A mutant is accepted if and only if every execution that the machine tries is right, and no two threadblocks
    can be brought to touch the same memory at the same time, one of them writing.

    (So a race whose two orders happen to give the same result is refused, as it should be.)
    """
    rng = random.Random(name)
    answers = []
    for seed in range(60):
        top = ET.fromstring(BASES[name])
        for _ in range(rng.choice([1, 1, 1, 2])):
            rng.choice(MUTATIONS)(rng, top)
        answers.append(agree(ET.tostring(top, encoding="unicode"), rng.choice([1, 2, 8]), seed))
    assert answers.count(False) >= 20
    assert answers.count(True) >= 3
    assert len(BASES) * len(answers) >= 1000


# ---- what is said


def two(first, second, coll="allreduce", chunks=1, **attributes):
    """Write a file for two GPUs: for each its scratch chunks, and its threadblocks as one tuple of steps each.

    Threadblock 0 has the other GPU as both of its peers, further ones have none.
    """
    gpus = [
        (scratch, *((1 - g, 1 - g, 0, *steps) if not t else (-1, -1, 0, *steps) for t, steps in enumerate(blocks)))
        for g, (scratch, *blocks) in enumerate((first, second))
    ]
    return file(coll, chunks, *gpus, **attributes)


SWAP = (1, ("s i0 s0 1", "r i0 s0 1", "re s0 i0 1"))  # each sends its own, and adds what it gets
LATE = (1, ("s i0 s0 1 !", "r i0 s0 1 !"), ("re s0 i0 1 <0.1",))  # another threadblock adds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            two(SWAP, (1, ("s i0 s0 1", "r i0 s0 1"))),
            r"gpu 1: in the end chunk 0 of the input buffer .* lacks .* rank 0",
        ),
        (
            two(SWAP, (1, ("s i0 s0 1", "r i0 s0 1", "re s0 i0 1", "re s0 i0 1"))),
            r"gpu 1, tb 0, step 3 \(re\): in the end .* has the contribution of rank 0 more than once",
        ),
        (
            two(LATE, (1, ("s i0 s0 1 !", "r i0 s0 1 !"), ("re s0 i0 1 <0.0",))),
            r"gpu 1, tb 1, step 0 \(re\): (a race. It )?reads chunk 0 of the scratch buffer \(in place\), "
            r"(which tb 0, step 1 \(r\) writes|into which nothing)",
        ),
        (
            two((1, ("s i0 s0 1", "r i0 s0 1 !"), ("re s0 i0 1 <0.1",)), SWAP, coll="allreduce", nchannels=1),
            None,
        ),
        (
            two((1, ("r i0 s0 1", "s i0 s0 1")), (1, ("r i0 s0 1", "s i0 s0 1"))),
            r"a deadlock. gpu 0, tb 0, step 0 \(r\) waits for the message of gpu 1, tb 0, step 1 \(s\); "
            r"gpu 1, tb 0, step 0 \(r\) waits for the message of gpu 0, tb 0, step 1",
        ),
        (
            two((1, ("s i0 s0 1", "r i0 s0 1 <1.0"), ("cpy i0 s0 1 <0.1 !",)), SWAP),
            r"gpu 0, tb 1, step 0 \(cpy\): waits for tb 0, step 1, but that threadblock signals nothing",
        ),
        (
            two((1, ("s i0 s0 1", "r i0 s0 1 <1.0 !"), ("cpy i0 s0 1 <0.1 !",)), SWAP),
            r"a deadlock. gpu 0, tb 0, step 1 \(r\) waits for tb 1, step 0; gpu 0, tb 1, step 0 \(cpy\) waits for tb 0",
        ),
        (
            two((1, ("s i0 s0 1 <7.0", "r i0 s0 1")), SWAP),
            r"gpu 0, tb 0, step 0 \(s\): waits for tb 7, which gpu 0 does",
        ),
        (
            two((1, ("s i0 s0 1", "r i0 s0 1", "s i0 s0 1")), SWAP),
            r"gpu 0, tb 0: sends 2 times to gpu 1 .* receives 1 times",
        ),
        (
            two((2, ("s i0 s0 2", "r i0 s0 1")), SWAP, chunks=2),
            r"gpu 0, tb 0, step 0 \(s\): sends 2 chunks, which meet gpu 1, tb 0, step 1 \(r\) for 1",
        ),
        (
            file("allreduce", 1, (0, (1, -1, 0, "s i0 i0 1")), (0, (-1, -1, 0))),
            r"gpu 0, tb 0: no threadblock of gpu 1 receives from gpu 0 on channel 0",
        ),
        (
            file("allreduce", 1, (0, (-1, -1, 0)), (0, (-1, 0, 1, "r i0 i0 1"))),
            r"gpu 1, tb 0: no threadblock of gpu 0 sends to gpu 1 on channel 1",
        ),
        (
            file("allreduce", 1, (0, (1, -1, 0, "s i0 i0 1"), (1, -1, 0)), (0, (-1, 0, 0, "r i0 i0 1"))),
            r"gpu 0, tb 1: tb 0 has the same send peer 1 on channel 0",
        ),
        (two(SWAP, SWAP, nchannels=0), r"gpu 0, tb 0: channel 0 of 0 does not exist"),
        (
            two((0, ("s i0 s0 1", "r i0 s0 1")), SWAP),
            r"gpu 0, tb 0, step 1 \(r\): chunks 0 to 0 of the scratch .* has 0",
        ),
        (two((1, ("s i1 s0 1", "r i0 s0 1")), SWAP), r"step 0 \(s\): chunks 1 to 1 of the input buffer, which has 1"),
        (
            two((1, ("s s0 s0 1", "r i0 s0 1")), SWAP),
            r"step 0 \(s\): reads chunk 0 of the scratch .* nothing was written",
        ),
        (two((1, ("s i0 s0 1", "r i0 s0 1", "re i0 i1 1")), SWAP, chunks=2), r"lacks|combines different chunks"),
        (
            two((1, ("s i0 s0 1", "r i0 s0 1", "cpy i0 i1 2")), SWAP, chunks=3),
            r"step 2 \(cpy\): src and dst overlap without being the same",
        ),
        (
            two(SWAP, SWAP, inplace=0, outofplace=1),
            r"in the end chunk 0 of the output buffer \(out of place\) was never wri",
        ),
        (two(SWAP, SWAP, coll="alltoallv"), r"cannot be judged: alltoallv"),
        (
            two((0, ("s i0 i0 1", "r i0 i0 1")), (0, ("s i0 i0 1", "r i0 i0 1")), coll="reduce"),
            "no rank ends with the whole",
        ),
    ],
)
def test_what_is_wrong_is_named(text, words):
    """The algorithm, GPU, threadblock and step are named, and what is wrong there."""
    if words is None:
        verify_msccl_xml(text)
        return
    assert fault(text, 1, 30, slots=8) is not None or "cannot be judged" in words or "of 0 does not exist" in words
    with pytest.raises(ScheduleError, match=words) as caught:
        verify_msccl_xml(text)
    assert "by hand" in str(caught.value)


def test_a_race_is_named():
    """A race says which two steps touch what, and that nothing orders them."""
    late = (2, ("s i0 s0 1 !", "r i0 s0 1 !"), ("cpy i0 s1 1 <0.0", "re s0 i0 1 <0.1"))
    verify_msccl_xml(two(LATE, late))
    early = (2, ("s i0 s0 1 !", "r i0 s0 1 !"), ("cpy i0 s0 1", "re s0 i0 1 <0.1"))
    with pytest.raises(
        ScheduleError,
        match=r"gpu 1, tb \d, step \d \(\w+\): a race. It writes chunk 0 of the scratch buffer \(in place\), which "
        r"tb \d, step \d \(\w+\) writes, and nothing puts the two in order",
    ):
        verify_msccl_xml(two(LATE, early))


def test_a_write_waits_for_readers():
    """What another threadblock still reads must not be overwritten: a dependency on the reader is needed."""
    hasty = apart().replace('depid="0" deps="0"', 'depid="1" deps="0"')
    assert fault(hasty, 0, 30) is not None
    with pytest.raises(
        ScheduleError,
        match=r"tb 2, step 1 \(re\): a race. It writes chunk 0 of the input buffer \(in place\), which "
        r"tb 0, step 0 \(s\) reads",
    ):
        verify_msccl_xml(hasty)


def test_a_message_that_is_passed_on_orders_only_what_was_over():
    """A block that comes back round the GPUs chunk by chunk does not wait until all of it was sent."""
    gpus = (
        (0, (1, -1, 0, "s i0 i0 2"), (-1, 1, 0, "r i0 i1 2")),
        (2, (0, 0, 0, "rcs s0 s0 2")),
    )
    text = file("broadcast", 3, *gpus, proto="LL")
    machine = Machine(text, True)
    machine.run(random.Random(0), held={((0, 0), 0)})
    for _ in range(2):  # the first of the two chunks goes all the way round before the second one is read
        for place in ((0, 0), (1, 0), (0, 1)):
            if "go" in machine.events(place):
                machine.do(place, "go")
    assert machine.memory[0, "io", 2] != machine.value(0, 1)
    with pytest.raises(ScheduleError, match=r"tb 1, step 0 \(r\): a race. It writes chunk 1 of the input"):
        verify_msccl_xml(text, root=0)


def test_buffers_are_as_large_as_declared_and_no_larger_than_they_are():
    """A step stays within the chunks that its GPU declares, and within those that the message has."""
    text = two(SWAP, SWAP)
    for old, new in (('i_chunks="1"', 'i_chunks="0"'), ('nchunksperloop="1"', 'nchunksperloop="2"')):
        with pytest.raises(ScheduleError, match=r"input buffer, which has 0|lacks|was never written"):
            verify_msccl_xml(text.replace(old, new))
    far = two((1, ("s i1 s0 1", "r i0 s0 1", "re s0 i0 1")), SWAP).replace('i_chunks="1"', 'i_chunks="9"')
    with pytest.raises(ScheduleError, match=r"step 0 \(s\): chunks 1 to 1 of the input buffer, which has 1"):
        verify_msccl_xml(far)


def test_a_message_orders_writes_but_not_reads():
    """A step's own message comes after the sender's past, so what it writes is in order; what it reads may be read
    before the message is there, as LL does."""
    ends = [(-1, 1, 0), (1, -1, 1), (-1, -1, 0)]

    def gpu0(last):
        # tb 2 writes s0 and tb 1 tells GPU 1 so; GPU 1's answer reaches tb 0, which nothing else puts after tb 2.
        steps = [(last,), ("s s0 s0 1 <2.0",), ("cpy i0 s0 1 !",)]
        return (2, *((*end, *step) for end, step in zip(ends, steps, strict=True)))

    gpu1 = (1, (-1, 0, 1, "r i0 s0 1 !"), (0, -1, 0, "s i0 s0 1 <0.0"))
    for last, reads in (("rrc s0 s1 1", True), ("r i0 s0 1", False)):
        text = file("broadcast", 1, gpu0(last), gpu1)
        with pytest.raises(ScheduleError) as caught:
            verify_msccl_xml(text)
        assert ("a race" in str(caught.value)) == reads


# ---- files of others


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_style_of_msccl_tools_and_rccl(n):
    """Files as msccl-tools and RCCL have them are accepted: chains of nops, additions that run as one, scratch."""
    report = verify_msccl_xml(one_step(n))
    assert (report.coll, report.inplace, report.outofplace, report.slots) == ("allreduce", True, False, 8)
    assert not [note for note in report.notes if "refuse" in note]
    assert verify_msccl_xml(pairwise(n)).coll == "alltoall"


def test_the_attributes_that_msccl_tools_leaves_out():
    """Without outofplace, minBytes and maxBytes a file is judged by inplace alone; the report says who refuses it."""
    report = verify_msccl_xml(fused_ring(3, outofplace=None, minBytes=None, maxBytes=None))
    assert (report.inplace, report.outofplace) == (True, False)
    assert report.notes == (
        "msccl-executor-nccl refuses a file without the attribute outofplace, minBytes, maxBytes",
        "RCCL refuses a file without the attribute outofplace, minBytes, maxBytes",
    )


def test_slots():
    """A connection holds 2 sends under Simple and 8 under LL; the ring that passes on needs 2, one is a deadlock."""
    assert [verify_msccl_xml(fused_ring(4, proto=proto)).slots for proto in ("Simple", "LL", "LL128")] == [2, 8, 8]
    with pytest.raises(ScheduleError, match=r"a deadlock\. .* waits for one of 1 slots to gpu \d, tb 0; "):
        verify_msccl_xml(fused_ring(4), slots=1)


def test_large_steps_need_several_slots():
    """A step of several chunks takes a slot for each, unless the largest message shows that they fit into one."""
    both = (3, ("s i0 s0 3", "r i0 s0 3", "re s0 i0 3"))
    verify_msccl_xml(two(both, both, chunks=3, proto="LL"))
    with pytest.raises(ScheduleError, match="a deadlock"):
        verify_msccl_xml(two(both, both, chunks=3))
    small = two(both, both, chunks=3, maxBytes=3 << 18)  # 256 KiB a chunk, two of them a slot
    assert fault(small, 0, 5) is None
    verify_msccl_xml(small)
    with pytest.raises(ScheduleError, match="a deadlock"):
        verify_msccl_xml(two(both, both, chunks=3, maxBytes=9 << 20))


def test_roots():
    """The root of a reduce or broadcast is found, or checked if it is given; the report names it."""
    text = exported("one_device", 3, sources=["cpu:2"])
    report = verify_msccl_xml(text)
    assert (report.coll, report.root) == ("broadcast", 2)
    assert any("right for 2" in note for note in report.notes)
    assert verify_msccl_xml(text, root=2) == report
    with pytest.raises(ScheduleError):
        verify_msccl_xml(text, root=1)
    reduce = exported("ring", 3, destinations=["cpu:1"])
    assert verify_msccl_xml(reduce).root == 1
    with pytest.raises(ScheduleError, match=r"was never written|lacks"):
        verify_msccl_xml(reduce, root=0)
    for given, file_ in ((3, text), (-1, text), (0, exported("ring", 2))):
        with pytest.raises(ArgumentError, match="the root is a rank"):
            verify_msccl_xml(file_, root=given)
    with pytest.raises(ArgumentError, match="slots"):
        verify_msccl_xml(text, slots=0)


def test_only_the_root_has_an_output_in_a_reduce():
    """Out of place, a reduce may use the output buffer at the root only; elsewhere there may be none."""
    give = (0, (1, -1, 0, "cpy i0 o0 1", "s o0 o0 1"))
    take = (0, (-1, 0, 0, "rrc i0 o0 1"))
    verify_msccl_xml(file("reduce", 1, give, take))
    with pytest.raises(ScheduleError, match=r"gpu 0, tb 0, step 0 \(cpy\): uses the output .* only the root 1 has"):
        verify_msccl_xml(file("reduce", 1, give, take, inplace=0, outofplace=1))


def test_a_broadcast_reads_the_roots_input_only():
    """What other ranks have in their input is nobody's business: reading it is reading what was never written."""
    text = file(
        "broadcast",
        1,
        (0, (1, -1, 0, "s i0 o0 1"), (-1, 1, 0, "r i0 s0 1")),
        (1, (-1, 0, 0, "r i0 o0 1"), (0, -1, 0, "s i0 s0 1")),
    )
    text = text.replace('s_chunks="0"', 's_chunks="1"').replace(
        'inplace="1" outofplace="0"', 'inplace="0" outofplace="1"'
    )
    with pytest.raises(
        ScheduleError, match=r"gpu 1, tb 1, step 0 \(s\): reads chunk 0 of the input .* nothing was written"
    ):
        verify_msccl_xml(text, root=0)


def test_notes():
    """What the runtimes would refuse or do otherwise than it is written is noted, and judged as they do it."""
    swap = (2, ("s i0 s0 1 !", "r i0 s0 1 !"), ("nop i-1 o-1 0 <0.0", "cpy i0 s1 1", "re s0 i0 1 <0.1"))
    assert "refuse the file: after a waiting nop it must wait too" in verify_msccl_xml(two(LATE, swap)).notes[0]
    twenty = ("cpy i0 s1 1", "cpy i0 s2 1", *["re s1 s2 1"] * 20)
    assert verify_msccl_xml(two(SWAP, (3, (*SWAP[1], *twenty)))).notes == ()
    aside = ("cpy i0 s1 1", "cpy i0 s2 1", *["re s1 s2 1 !"] * 17, *["re s1 s2 1"] * 17)
    (note,) = verify_msccl_xml(two(SWAP, (3, (*SWAP[1], *aside)))).notes
    assert note == "gpu 1, tb 0, step 38: the runtimes join more than 16 re here, and overrun their list"
    (note,) = verify_msccl_xml('<?xml version="1.0" encoding="utf-8"?>\n' + two(SWAP, SWAP)).notes
    assert "cannot read an XML declaration" in note
    wide = verify_msccl_xml(two(SWAP, SWAP, nchannels=200))
    assert wide.notes == (
        "msccl-executor-nccl has 32 channels, the file needs 200",
        "RCCL has 128 channels, the file needs 200",
    )


def test_additions_in_a_row_run_as_one():
    """``re`` steps in a row on one destination are judged as the runtimes run them: all with the last one's cnt."""
    give = (0, (0, -1, 0, "s i0 s0 2"))
    for right, sums in (
        (True, ("re s0 i0 2 <1.0", "re s2 i0 2")),
        (False, ("re s0 i0 2 <1.0", "re s2 i0 1", "re s3 i1 1")),  # step by step this would be right as well
    ):
        adds = (-1, -1, 0, "nop i-1 o-1 0 <0.0", *sums)
        text = file("reduce", 2, (4, (-1, 1, 0, "r i0 s0 2 !"), (-1, 2, 0, "r i0 s2 2 !"), adds), give, give)
        assert (fault(text, 0, 5) is None) == right
        if right:
            verify_msccl_xml(text, root=0)
        else:
            with pytest.raises(ScheduleError, match=r"chunk 1 of the input .* lacks the contribution of rank 1"):
                verify_msccl_xml(text, root=0)


def test_an_input_that_is_overwritten_is_noted():
    """Out of place, callers expect their input to stay; a file that writes into it is right, with a note."""
    add = (1, ("s i0 s0 1", "r i0 s0 1", "re s0 i0 1", "cpy i0 o0 1"))
    (note,) = verify_msccl_xml(two(add, SWAP[:1] + add[1:], inplace=0, outofplace=1)).notes[:1]
    assert "gpu 0, tb 0, step 2 writes the input of an out-of-place call" in note


def test_the_report_in_words():
    """The report says what was proved, in three lines at most and its notes."""
    text = str(verify_msccl_xml(exported("ring", 4, sources=["cpu:0"])))
    assert text.splitlines()[:2] == [
        "broadcast at rank 0, in place and out of place: right.",
        "  4 GPUs, 1 channels, 4 chunks, 2 threadblocks a GPU, 28 steps, Simple",
    ]
    assert text.splitlines()[2].startswith("  note: the format has no root")


# ---- texts that are no such files

GOOD = fused_ring(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "MSCCL XML is text"),
        (b"<algo/>", "MSCCL XML is text"),
        ("", "no XML: no element found"),
        ("{}", "no XML: .*line 1"),
        (GOOD[:300], "no XML"),
        (GOOD + GOOD, "no XML: junk after"),
        ("\ud800", "no XML|no element"),
        ("<gpu/>", "the file has no element <gpu>"),
        (GOOD.replace("<gpu id", "<cpu id").replace("</gpu>", "</cpu>"), "<algo> has no element <cpu>"),
        (GOOD.replace("<step s", "<op s"), "line 4: <tb> has no element <op>"),
        (GOOD.replace("</tb>", "x</tb>"), "text between the elements"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>' + GOOD, "document types and entities are not read"),
        ('<!DOCTYPE algo SYSTEM "file:///etc/passwd">' + GOOD, "document types and entities are not read"),
        (GOOD.replace('name="by hand"', 'name="&b;"'), "undefined entity"),
        (GOOD.replace('ngpus="2"', ""), "lacks the attribute ngpus"),
        (GOOD.replace('ngpus="2"', 'ngpus="3"'), "the ids of <gpu> are 0, 1, 2"),
        (GOOD.replace('ngpus="2"', 'ngpus="999999999"'), "the ids of <gpu> are 0, 1, 2"),
        (GOOD.replace('<gpu id="1"', '<gpu id="0"'), "the ids of <gpu> are 0, 1, 2"),
        (GOOD.replace('<tb id="0"', '<tb id="1"'), "gpu 0: the ids of <tb> are 0, 1, 2"),
        (GOOD.replace('proto="Simple"', 'proto="simple"'), "unknown protocol"),
        (GOOD.replace('coll="allreduce"', 'coll="all_reduce"'), "unknown collective"),
        (GOOD.replace('inplace="1"', 'inplace="0"'), "neither in place nor out of place"),
        (GOOD.replace('inplace="1"', 'inplace="2"'), "inplace is a whole number"),
        (GOOD.replace('nchunksperloop="2"', 'nchunksperloop="0"'), "nchunksperloop is a whole number"),
        (GOOD.replace('nchunksperloop="2"', 'nchunksperloop="99999"'), "nchunksperloop is a whole number"),
        (GOOD.replace('nchunksperloop="2"', 'nchunksperloop="02"'), "nchunksperloop is a whole number"),
        (GOOD.replace("allreduce", "allgather").replace('loop="2"', 'loop="3"'), "spread evenly over the ranks"),
        (GOOD.replace('s="1" type', 's="2" type'), "gpu 0, tb 0, step 1: steps are numbered"),
        (GOOD.replace('type="s"', 'type="send"'), "step 0: unknown type"),
        (GOOD.replace('srcbuf="i"', 'srcbuf="x"'), "unknown buffer"),
        (GOOD.replace('srcoff="0"', 'srcoff="1e9"'), "srcoff is a whole number"),
        (GOOD.replace('cnt="1"', 'cnt="0"'), "cnt is a whole number"),
        (GOOD.replace('depid="-1"', 'depid="-2"'), "depid is a whole number"),
        (GOOD.replace('hasdep="0"', 'hasdep="yes"'), "hasdep is a whole number"),
        (GOOD.replace('send="1"', 'send="0"'), "gpu 0, tb 0: a GPU cannot send to itself"),
        (GOOD.replace('send="1"', 'send="2"'), "send is a whole number"),
        (GOOD.replace('send="1"', 'send="-1"'), r"step 0 \(s\): the threadblock has no peer for it"),
        (GOOD.replace(' chan="0"', ' chan="-1"'), "channel -1 of 2 does not exist"),
    ],
)
def test_texts_that_are_no_such_files(text, words):
    """What is malformed is refused with its place; nothing else is raised, whatever the text is."""
    with pytest.raises(ScheduleError, match=words):
        verify_msccl_xml(text)


def test_hostile_texts_end_soon():
    """Texts that are deep, long or ask for huge amounts are refused in well under a second or two."""
    start = time.perf_counter()
    deep = "<algo>" * 100_000
    steps = (
        '<step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="32768" depid="-1" deps="-1" hasdep="0"/>'
    )
    blocks = "".join(steps.replace('s="0"', f's="{k}"', 1) for k in range(1000))
    gpus = '<gpu id="0" i_chunks="32768" o_chunks="0" s_chunks="0"><tb id="0" send="1" recv="-1" chan="0">'
    gpus += (
        blocks
        + '</tb></gpu><gpu id="1" i_chunks="32768" o_chunks="0" s_chunks="0"><tb id="0" send="-1" recv="0" chan="0">'
    )
    gpus += blocks.replace('type="s"', 'type="r"') + "</tb></gpu>"
    work = re.sub(r"<gpu.*</gpu>", "", GOOD, flags=re.DOTALL).replace('loop="2"', 'loop="32768"')
    for text, words in (
        (deep, "has no element <algo>"),
        (" " * (1 << 26) + GOOD, "longer than"),
        (work.replace("</algo>", gpus + "</algo>"), "too large to judge"),
    ):
        with pytest.raises(ScheduleError, match=words):
            verify_msccl_xml(text)
    assert time.perf_counter() - start < 10


def big(gpus, blocks, steps):
    """A broadcast of many steps: each threadblock's chunks go round all GPUs, one after the other."""
    made = []
    for g in range(gpus):
        lists = []
        for t in range(blocks):
            send, recv = (g + 1 if g + 1 < gpus else -1), g - 1
            kind = "s" if recv < 0 else "r" if send < 0 else "rcs"
            lists.append((send, recv, t, *(f"{kind} i{t * steps + k} i{t * steps + k} 1 !" for k in range(steps))))
        made.append((0, *lists))
    return file("broadcast", blocks * steps, *made, nchannels=blocks, proto="LL")


def test_a_large_file_takes_seconds():
    """16 GPUs of 32 threadblocks of 64 steps are proved in a few seconds, also where all is tied together."""
    text = big(16, 32, 64)
    start = time.perf_counter()
    assert verify_msccl_xml(text).steps == 16 * 32 * 64
    seconds = time.perf_counter() - start
    print(f"16 x 32 x 64: {seconds:.1f} s")
    assert seconds < 30
