"""The verifier of MSCCL XML: the faults that it names, its notes and reports, files of other tools, malformed texts."""

import dataclasses
import random
import tracemalloc

import pytest
from exports import exported
from msccl_files import LATE, SWAP, apart, file, fused_ring, one_step, pairwise, two
from msccl_machine import Machine, fault

from crossreduce import ArgumentError, ScheduleError
from crossreduce.export.formats.msccl import format as formats
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml


def send(*steps, scratch=1):
    """Return a GPU that exchanges its input, and then runs more steps in the same threadblock."""
    return scratch, ("s i0 s0 1", "r i0 s0 1", *steps)


FIRST = (1, ("r i0 s0 1", "s i0 s0 1"))  # receives before it sends
SENDER, RECEIVER = (1, -1, 0, "s i0 i0 1"), (-1, 0, 0, "r i0 i0 1")
RACE = (2, ("s i0 s0 1 !", "r i0 s0 1 !"), ("cpy i0 s0 1", "re s0 i0 1 <0.1"))  # two threadblocks write s0
HASTY = (1, ("s i0 s0 1 !", "r i0 s0 1 !"), ("re s0 i0 1 <0.0",))  # adds before the receive is done


def copies(more):
    """Return a GPU whose second threadblock copies, and waits for a step of the first one, which ends with ``more``."""
    return 1, ("s i0 s0 1", "r i0 s0 1 <1.0" + more), ("cpy i0 s0 1 <0.1 !",)


FAULTS = [
    (two(SWAP, send()), r"gpu 1: at the end chunk 0 of the input buffer .* lacks .* rank 0"),
    (two(SWAP, send("re s0 i0 1", "re s0 i0 1")), r"gpu 1, tb 0, step 3 \(re\): at the end .* rank 0 more than once"),
    (two(LATE, HASTY), r"gpu 1, tb 1, step 0 \(re\): (a race. It )?reads chunk 0 of the scratch .*, which (tb 0|was)"),
    (
        two(FIRST, FIRST),
        r"a deadlock. gpu 0, tb 0, step 0 \(r\) waits for the message of gpu 1, tb 0, step 1 \(s\); "
        r"gpu 1, tb 0, step 0 \(r\) waits for the message of gpu 0, tb 0, step 1",
    ),
    (two(copies(""), SWAP), r"step 0 \(cpy\): waits for tb 0, step 1, but no step of that threadblock signals"),
    (
        two(copies(" !"), SWAP),
        r"a deadlock. gpu 0, tb 0, step 1 \(r\) waits for tb 1, step 0; gpu 0, tb 1, step 0 \(cpy\)",
    ),
    (two((1, ("s i0 s0 1 <7.0", "r i0 s0 1")), SWAP), r"tb 0, step 0 \(s\): waits for tb 7, which gpu 0 does"),
    (two(send("s i0 s0 1"), SWAP), r"gpu 0, tb 0: sends 2 times to gpu 1 .* receives 1 times"),
    (two((2, ("s i0 s0 2", "r i0 s0 1")), SWAP, chunks=2), r"sends 2 chunks, but gpu 1, tb 0, step 1 \(r\) receives 1"),
    (file("allreduce", 1, (0, SENDER), (0, (-1, -1, 0))), "no threadblock of gpu 1 receives from gpu 0 on channel 0"),
    (file("allreduce", 1, (0, (-1, -1, 0)), (0, RECEIVER)), "no threadblock of gpu 0 sends to gpu 1 on channel 0"),
    (file("allreduce", 1, (0, SENDER, (1, -1, 0)), (0, RECEIVER)), "tb 0 has the same send peer 1 on channel 0"),
    (two(SWAP, SWAP, nchannels=0), r"gpu 0, tb 0: channel 0 does not exist, nchannels=0"),
    (two(send(scratch=0), SWAP), r"gpu 0, tb 0, step 1 \(r\): accesses chunks 0 to 0 of the scratch .* has 0"),
    (two((1, ("s i1 s0 1", "r i0 s0 1")), SWAP), r"step 0 \(s\): accesses chunks 1 to 1 of the input .* which has 1"),
    (two((1, ("s s0 s0 1", "r i0 s0 1")), SWAP), r"step 0 \(s\): reads chunk 0 of the scratch .* never written"),
    (two(send("re i0 i1 1"), SWAP, chunks=2), r"lacks|combines different parts"),
    (two(send("cpy i0 i1 2"), SWAP, chunks=3), r"step 2 \(cpy\): src and dst overlap, but are not the same"),
    (two(SWAP, SWAP, inplace=0, outofplace=1), r"at the end chunk 0 of the output .*out of place\) was never written"),
    (two(SWAP, SWAP, coll="alltoallv"), "cannot be verified"),
    (two(send(), send(), coll="reduce"), "no rank has the complete sum"),
    # A write to memory that another threadblock writes, and one to memory that another threadblock reads.
    (
        two(LATE, RACE),
        r"a race. It writes chunk 0 of the scratch buffer \(in place\), which tb .* writes, and the two are",
    ),
    (
        apart().replace('depid="0" deps="0"', 'depid="1" deps="0"'),
        r"tb 2, step 1 \(re\): a race. It writes chunk 0 of the input .*, which tb 0, step 0 \(s\) reads",
    ),
]


@pytest.mark.parametrize(("text", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_faults_are_named(text, words):
    """The error states the algorithm's name, the fault, and its GPU, threadblock and step, if it is in one."""
    # The machine does not show these three faults.
    unseen = ("cannot be verified" in words, "nchannels=0" in words, "writes, and the two" in words)
    assert fault(text, seed=1, tries=30, slots=8) is not None or any(unseen)
    with pytest.raises(ScheduleError, match=words) as caught:
        verify_msccl_xml(text)
    assert "custom" in str(caught.value)


def test_a_forwarded_message_orders_only_completed_steps():
    """A message is forwarded chunk by chunk, so its first chunks may return before its sender has read the last ones.
    So it is a race to receive the returned message into the memory that is sent."""
    gpus = ((0, (1, -1, 0, "s i0 i0 2"), (-1, 1, 0, "r i0 i1 2")), (2, (0, 0, 0, "rcs s0 s0 2")))
    text = file("broadcast", 3, *gpus, proto="LL")
    machine = Machine(text, inplace=True)
    machine.run(random.Random(0), held={((0, 0), 0)})
    for _ in range(2):  # the first of the two chunks returns before the second one is read
        for place in ((0, 0), (1, 0), (0, 1)):
            if "go" in machine.events(place):
                machine.do(place, "go")
    assert machine.memory[0, "io", 2, 0] != machine.value(0, 1)
    with pytest.raises(ScheduleError, match=r"tb 1, step 0 \(r\): a race. It writes chunk 1 of the input"):
        verify_msccl_xml(text, root=0)


def test_a_message_orders_writes_but_not_reads():
    """The writes of a receiving step come after all steps that the sender had done. Its reads need not, since LL reads
    local data before it waits for the message. So a step that reads what such a step wrote is a race."""
    ends = [(-1, 1, 0), (1, -1, 1), (-1, -1, 0)]  # the peers and the channel of each threadblock of GPU 0

    def gpu0(last):
        # tb 2 writes s0, tb 1 then sends to GPU 1, and GPU 1 to tb 0. No other chain orders tb 0 after tb 2.
        steps = [(last,), ("s s0 s0 1 <2.0",), ("cpy i0 s0 1 !",)]
        return (2, *((*end, *step) for end, step in zip(ends, steps, strict=True)))

    gpu1 = (1, (-1, 0, 1, "r i0 s0 1 !"), (0, -1, 0, "s i0 s0 1 <0.0"))
    for last, reads in (("rrc s0 s1 1", True), ("r i0 s0 1", False)):
        text = file("broadcast", 1, gpu0(last), gpu1)
        with pytest.raises(ScheduleError) as caught:
            verify_msccl_xml(text)
        assert ("a race" in str(caught.value)) == reads


def test_the_style_of_msccl_tools_and_rccl():
    """Files in the style of msccl-tools and RCCL are accepted: chains of nops, fused additions, scratch memory. A file
    without outofplace is only for the calls that inplace names. The report names runtimes that refuse such a file."""
    for n in (2, 3, 8):
        report = verify_msccl_xml(one_step(n))
        assert (report.coll, report.inplace, report.outofplace, report.slots) == ("allreduce", True, False, 8)
        assert not [note for note in report.notes if "refuse" in note]
        assert verify_msccl_xml(pairwise(n)).coll == "alltoall"
    report = verify_msccl_xml(fused_ring(3, outofplace=None, minBytes=None, maxBytes=None))
    assert (report.inplace, report.outofplace) == (True, False)
    assert report.notes == tuple(
        f"{runtime} refuses a file without the attribute outofplace, minBytes, maxBytes" for runtime in ALL[:2]
    )


ALL = ("msccl-executor-nccl", "RCCL", "microsoft/msccl")


@pytest.mark.parametrize(
    ("steps", "blocks", "names"), [(64, 1, ()), (65, 1, ALL[:2]), (257, 1, ALL), (1, 65, ("RCCL",)), (1, 217, ALL[1:])]
)
def test_notes_name_the_runtime_whose_limit_a_file_breaks(steps, blocks, names):
    """Each runtime has its own limits of steps and threadblocks. A note on a limit begins with the runtime's name."""
    copies = [(-1, -1, 0, f"cpy i0 s{k} 1") for k in range(1, blocks)]
    sender = (1, -1, 0, *["cpy i0 s0 1"] * (steps - 1), "s i0 o0 1")
    text = file("broadcast", 1, (blocks, sender, *copies), (0, (-1, 0, 0, "r i0 i0 1")))
    limits = [note for note in verify_msccl_xml(text).notes if " has " in note]
    assert tuple(note.partition(" has ")[0] for note in limits) == names


def test_slots():
    """A connection has 2 slots under Simple and 8 under LL. A forwarding ring needs 2, and has a deadlock with 1. A
    step of several chunks needs a slot for each, or fewer slots if maxBytes shows that several chunks fit into one."""
    assert [verify_msccl_xml(fused_ring(4, proto=proto)).slots for proto in ("Simple", "LL", "LL128")] == [2, 8, 8]
    with pytest.raises(ScheduleError, match=r"a deadlock\. .* waits for one of 1 slots to gpu \d, tb 0; "):
        verify_msccl_xml(fused_ring(4), slots=1)
    both = (3, ("s i0 s0 3", "r i0 s0 3", "re s0 i0 3"))
    verify_msccl_xml(two(both, both, chunks=3, proto="LL"))
    small = two(both, both, chunks=3, maxBytes=3 << 18)  # 256 KiB per chunk, two chunks per slot
    assert fault(small, seed=0, tries=5) is None
    verify_msccl_xml(small)
    for options in ({}, {"maxBytes": 9 << 20}):
        with pytest.raises(ScheduleError, match="a deadlock"):
            verify_msccl_xml(two(both, both, chunks=3, **options))


def test_roots():
    """The root of a reduce or broadcast is found, or checked if it is given, and is in the report."""
    text = exported("one_device", 3, sources=["cpu:2"])
    report = verify_msccl_xml(text)
    assert (report.coll, report.root) == ("broadcast", 2)
    assert any("right only for 2" in note for note in report.notes)
    assert verify_msccl_xml(text, root=2) == report
    with pytest.raises(ScheduleError, match="which was never written"):
        verify_msccl_xml(text, root=1)
    reduce = exported("ring", 3, destinations=["cpu:1"])
    assert verify_msccl_xml(reduce).root == 1
    with pytest.raises(ScheduleError, match=r"was never written|lacks"):
        verify_msccl_xml(reduce, root=0)
    rank, none = "the root must be a rank of the file", "the file's collective, allreduce, has no root"
    for given, file_, words in ((3, text, rank), (-1, text, rank), (0, exported("ring", 2), none)):
        with pytest.raises(ArgumentError, match=words):
            verify_msccl_xml(file_, root=given)
    with pytest.raises(ArgumentError, match="slots"):
        verify_msccl_xml(text, slots=0)


def test_buffers_that_only_the_root_has():
    """Out of place, a reduce must use no output but the root's, and a broadcast must use no input but the root's."""
    give, take = (0, (1, -1, 0, "cpy i0 o0 1", "s o0 o0 1")), (0, (-1, 0, 0, "rrc i0 o0 1"))
    verify_msccl_xml(file("reduce", 1, give, take))
    with pytest.raises(ScheduleError, match=r"gpu 0, tb 0, step 0 \(cpy\): uses the output .* only the root 1 has"):
        verify_msccl_xml(file("reduce", 1, give, take, inplace=0, outofplace=1))
    gpus = (
        (1, (1, -1, 0, "s i0 o0 1"), (-1, 1, 0, "r i0 s0 1")),
        (1, (-1, 0, 0, "r i0 o0 1"), (0, -1, 0, "s i0 s0 1")),
    )
    with pytest.raises(ScheduleError, match=r"gpu 1, tb 1, step 0 \(s\): reads chunk 0 of the input .* never written"):
        verify_msccl_xml(file("broadcast", 1, *gpus, inplace=0, outofplace=1), root=0)


def test_notes():
    """The report has notes on what the runtimes refuse, or run in another way than the file states."""
    swap = (2, ("s i0 s0 1 !", "r i0 s0 1 !"), ("nop i-1 o-1 0 <0.0", "cpy i0 s1 1", "re s0 i0 1 <0.1"))
    assert "refuse the file: after a nop that waits, it must wait, too" in verify_msccl_xml(two(LATE, swap)).notes[0]
    twenty = ("cpy i0 s1 1", "cpy i0 s2 1", *["re s1 s2 1"] * 20)
    assert verify_msccl_xml(two(SWAP, (3, (*SWAP[1], *twenty)))).notes == ()
    aside = ("cpy i0 s1 1", "cpy i0 s2 1", *["re s1 s2 1 !"] * 17, *["re s1 s2 1"] * 17)
    (note,) = verify_msccl_xml(two(SWAP, (3, (*SWAP[1], *aside)))).notes
    assert note == "gpu 1, tb 0, step 38: the runtimes fuse more than 16 re here, and write beyond their list"
    (note,) = verify_msccl_xml('<?xml version="1.0" encoding="utf-8"?>\n' + two(SWAP, SWAP)).notes
    assert "cannot read an XML declaration" in note
    add = (1, ("s i0 s0 1", "r i0 s0 1", "re s0 i0 1", "cpy i0 o0 1"))
    (note,) = verify_msccl_xml(two(add, SWAP[:1] + add[1:], inplace=0, outofplace=1)).notes[:1]
    assert "gpu 0, tb 0, step 2 writes the input of an out-of-place call" in note


def test_adjacent_additions_are_fused():
    """The verifier fuses adjacent ``re`` steps with one destination as the runtimes do: all get the cnt of the last."""
    give = (0, (0, -1, 0, "s i0 s0 2"))
    for right, sums in (
        (True, ("re s0 i0 2 <1.0", "re s2 i0 2")),
        (False, ("re s0 i0 2 <1.0", "re s2 i0 1", "re s3 i1 1")),  # correct if the runtimes did not fuse the steps
    ):
        adds = (-1, -1, 0, "nop i-1 o-1 0 <0.0", *sums)
        text = file("reduce", 2, (4, (-1, 1, 0, "r i0 s0 2 !"), (-1, 2, 0, "r i0 s2 2 !"), adds), give, give)
        assert (fault(text, 0, 5) is None) == right
        if right:
            verify_msccl_xml(text, root=0)
        else:
            with pytest.raises(ScheduleError, match=r"chunk 1 of the input .* lacks the contribution of rank 1"):
                verify_msccl_xml(text, root=0)


def test_elements_that_the_runtimes_skip():
    """Elements that the runtimes do not know are skipped with a note, and faults behind them are found. The largest
    number of bytes is that of the runtimes' type."""
    copy = '<copy i="0"><step s="0"/><gpu id="7"/></copy>'
    strange = two(SWAP, SWAP, minBytes=0, maxBytes=2**63 - 1).replace("<tb ", copy + "<tb ").replace("<gpu", "<x/><gpu")
    notes = verify_msccl_xml(strange).notes
    assert "line 2: the runtimes skip the element <x> in <algo>, and 1 others like it" in notes
    assert "line 3: the runtimes skip the element <copy> in <gpu>, and 1 others like it" in notes
    with pytest.raises(ScheduleError, match=r"a deadlock. gpu 0, tb 0, step 0 \(r\) waits"):
        verify_msccl_xml(two(FIRST, FIRST).replace("<tb ", copy + "<tb "))


def test_the_report_in_words():
    """The report as text has the proved facts in two lines, at most 32 notes, and the number of omitted notes."""
    report = verify_msccl_xml(exported("ring", 4, sources=["cpu:0"]))
    assert str(report).splitlines()[:2] == [
        "broadcast at rank 0, in place and out of place: right.",
        "  4 GPUs, 1 channels, 4 chunks, 2 threadblocks per GPU, 28 steps, Simple",
    ]
    assert str(report).splitlines()[2].startswith("  note: the format does not store a root")
    many = dataclasses.replace(report, notes=tuple(f"fact {k}" for k in range(1000)))
    assert str(many).splitlines()[-2:] == ["  note: fact 31", "  ... and 968 further notes"]


GOOD = fused_ring(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "MSCCL XML must be a str"),
        ("", "not XML: no element found"),
        ("{}", "not XML: .*line 1"),
        (GOOD.replace("<gpu id", "<cpu id").replace("</gpu>", "</cpu>"), "there must be 2 <gpu> elements"),
        (GOOD.replace("<step s", "<op s"), r"\(in place\) lacks"),
        ("<cpu>" + GOOD + "</cpu>", "line 1: the file must not contain an element <cpu>"),
        (GOOD.replace('"/>\n', '"><a/></step>\n'), "line 4: <step> must not contain an element <a>"),
        (GOOD.replace('maxBytes="0"', f'maxBytes="{2**63}"'), f"from 0 to {2**63 - 1}"),
        (GOOD.replace('nchannels="2"', f'nchannels="{2**31}"'), f"nchannels must be an integer from 0 to {2**31 - 1}"),
        (GOOD.replace("</tb>", "x</tb>"), "unexpected text between elements"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>' + GOOD, "the file must not contain a DOCTYPE or entities"),
        (GOOD.replace('name="custom"', 'name="&b;"'), "undefined entity"),
        (GOOD.replace('ngpus="2"', ""), "lacks the attribute ngpus"),
        (GOOD.replace('ngpus="2"', 'ngpus="3"'), "there must be 3 <gpu> elements with the ids 0, 1, 2"),
        (GOOD.replace('<tb id="0"', '<tb id="1"'), "gpu 0: there must be 1 <tb> elements with the ids 0, 1, 2"),
        (GOOD.replace('proto="Simple"', 'proto="simple"'), "unknown protocol"),
        (GOOD.replace('coll="allreduce"', 'coll="all_reduce"'), "unknown collective"),
        (GOOD.replace('inplace="1"', 'inplace="0"'), "neither for calls in place nor out of place"),
        (GOOD.replace('nchunksperloop="2"', 'nchunksperloop="99999"'), "nchunksperloop must be an integer"),
        (GOOD.replace("allreduce", "allgather").replace('loop="2"', 'loop="3"'), "the same number of chunks in allg"),
        (GOOD.replace('s="1" type', 's="2" type'), "gpu 0, tb 0, step 1: steps must be numbered"),
        (GOOD.replace('type="s"', 'type="send"'), "step 0: unknown type"),
        (GOOD.replace('srcbuf="i"', 'srcbuf="x"'), "unknown buffer"),
        (GOOD.replace('srcoff="0"', 'srcoff="1e9"'), "srcoff must be an integer"),
        (GOOD.replace('send="1"', 'send="0"'), "gpu 0, tb 0: a GPU cannot send to itself"),
        (GOOD.replace('send="1"', 'send="-1"'), r"step 0 \(s\): the threadblock lacks a peer that it needs"),
        (GOOD.replace(' chan="0"', ' chan="-1"'), "channel -1 does not exist, nchannels=2"),
    ],
)
def test_malformed_texts_are_refused(text, words):
    """A malformed text raises a ScheduleError that states the fault."""
    with pytest.raises(ScheduleError, match=words):
        verify_msccl_xml(text)


HEAD = '<algo name="x" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="7" coll="allreduce" inplace="1">'


def much_work():
    """Return a file of two GPUs with a thousand steps of 32,768 chunks each."""
    steps = {kind: [f"{kind} i0 i0 32768"] * 1000 for kind in "sr"}
    return file("allreduce", 32768, (0, (1, -1, 0, *steps["s"])), (0, (-1, 0, 0, *steps["r"])))


LARGE = {
    "deep": (lambda: "<algo>" * 100_000, "not XML: no element found"),
    "long": (lambda: " " * (1 << 26) + GOOD, "longer than"),
    "work": (much_work, "too large to be verified"),
    "attributes": (lambda: "<algo" + ' a=">"' * 1_000_000 + "/>", "a tag or comment is longer than 65536 bytes"),
    "65 attributes": (lambda: "<algo" + "".join(f' a{k}=""' for k in range(65)) + "/>", "too large to be read.*\n.*65"),
    "elements": (lambda: HEAD + '<gpu id="0"/>' * 20_000 + "</algo>", "too large.*\n.*element 16385, <gpu>"),
    "ids": (lambda: HEAD + "".join(f'<gpu id="{k}"/>' for k in range(10_000)) + "</algo>", "there must be 7 <gpu>"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_files_are_refused_in_bounded_memory(name, monkeypatch):
    """Deep and long texts, and files of very many attributes, elements or chunks, are refused with less than 400 MB, or
    25 MB for elements, of which a sixteenth is allowed here."""
    most = 400_000_000
    if name == "elements":
        most >>= 4
        monkeypatch.setattr(formats, "MOST_ELEMENTS", formats.MOST_ELEMENTS >> 4)
    text, words = LARGE[name][0](), LARGE[name][1]
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=words) as error:
            verify_msccl_xml(text)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 600


def test_a_long_tag_is_read_wherever_it_starts():
    """A tag of up to 65536 bytes is read at any position in the file."""
    valid = GOOD.replace('name="', 'name="' + "é" * 30_000, 1)
    for spaces in (0, 1, 5_000, 40_000, 65_000, 65_536, 70_001):
        assert verify_msccl_xml(" " * spaces + valid).ngpus == 2


def waiting(blocks, depends):
    """Return a file of one GPU whose threadblocks have one step each. The step of threadblock k waits for threadblock
    ``depends(k)``, if this is not negative."""
    steps = [f"cpy i{k} o{k} 1 !" + f" <{depends(k)}.0" * (depends(k) >= 0) for k in range(blocks)]
    return file("allreduce", blocks, (0, *((-1, -1, 0, step) for step in steps)), inplace=0, outofplace=1)


def test_a_long_deadlock_has_a_short_message():
    """The message of a deadlock names at most 32 of the steps that wait for each other."""
    assert verify_msccl_xml(waiting(100, lambda k: k - 1)).steps == 100
    with pytest.raises(ScheduleError, match=r"a deadlock\. .*; \.\.\. \(1000 waits in all\)\.") as error:
        verify_msccl_xml(waiting(1000, lambda k: (k + 1) % 1000))
    assert len(str(error.value)) < 3000
