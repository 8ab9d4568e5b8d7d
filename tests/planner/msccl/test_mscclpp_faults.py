"""The verifier of MSCCL++ plans: the faults that it names, its notes and reports, sizes, malformed and large texts."""

import dataclasses
import itertools
import json
import tracemalloc

import pytest
from mscclpp_plans import (
    alike,
    all_to_all,
    exchanged,
    gathered_by_ports,
    met,
    packets,
    packets_by_ports,
    packets_scattered,
    pipelined,
    plan,
    stored,
    stored_packets,
    switched,
)  # fmt: skip
from mscclpp_values import operations
from strategies import names

from crossreduce import ArgumentError, ScheduleError
from crossreduce.export.formats.mscclpp import to_mscclpp_json, verify_mscclpp_json
from crossreduce.export.formats.mscclpp.verifier import instructions, memory
from crossreduce.export.formats.mscclpp.verifier.clocks import BlockClock
from crossreduce.export.formats.mscclpp.verifier.synchronisation import Channel
from crossreduce.planning import ring


@pytest.mark.parametrize("inplace", [True, False])
def test_roots_are_found(inplace):
    """The root of a reduce or broadcast is found, and a wrong one is refused."""
    for root, end in ((0, "destinations"), (2, "sources")):
        text = to_mscclpp_json(ring(names(3), **{end: [f"cpu:{root}"]}), inplace=inplace)
        report = verify_mscclpp_json(text)
        assert report.root == root
        assert f"the executor uses the plan for every root, but it is right only for {root}" in str(report)
        assert verify_mscclpp_json(text, root=root) == report
        with pytest.raises(ScheduleError, match=r"lacks the contribution|never written"):
            verify_mscclpp_json(text, root=1)


# In texts of threadblocks, {g} is the rank of the GPU, {p} the rank of the other GPU, and {P} all other ranks.
SYNC = "signal {P}; wait {P}; nop; "
END = "; nop; signal {P}; wait {P}"
ADD = SYNC + "rre i0 {p}.i0 > o0"  # each GPU adds the input of the other one


def reduced(*blocks, chunks=1, scratch=0, **fields):
    """Return an all-reduce of two GPUs that run the same threadblocks."""
    return alike("allreduce", (chunks, chunks), 2, scratch, *blocks, **fields)


SEM = "sem_acquire 0; sem_release 0"
PUT = SYNC + "put i0 > {p}.s0; nop; signal {p}; wait {p}; nop; re i0 s0 > o0"
GET = SYNC + "get {p}.i%s > o%s; copy i{g} > o{g}" + END
TWICE = ((2, "ppkt i0 > 1.s0; ppkt i0 > 1.s0; repkt i0 s1 > o0"), (2, "ppkt i0 > 0.s1; repkt i0 s0 > o0"))
NO_NOP = reduced("signal {p}; wait {p}; rre i0 {p}.i0 > o0" + END)
OTHERS = reduced(SYNC + "rre i0+2 {p}.i0+2 > o0+2; copy o1 > o0" + END, chunks=2)
SWAPPED = alike("alltoall", (2, 2), 2, 0, GET % ("{g}", "{p}"))
LATE = gathered_by_ports(2, end="nop")
EARLY = alike("allgather", (1, 2), 2, 0, "put i0 > {p}.o{g}; copy i0 > o{g}" + END)
FAULTS = [
    (NO_NOP, r"gpu \d, tb 0, op 2 \(rre\): a race\. It reads .* input buffer of gpu \d .*, which the user of gpu"),
    (reduced(PUT.replace("; nop; signal", "; signal"), scratch=1), r"op 7 \(re\): a race\. .*, op 3 \(put\) writes,"),
    (reduced(PUT.replace("nop; signal", "nop; rlxsignal"), scratch=1), r"op 8 \(re\): a race\. .* two are not ordered"),
    (OTHERS, r"op 4 \(copy\): a race\. It reads .* of the output buffer of gpu . .*, which gpu ., tb 0, op 3 \(rre\)"),
    (reduced(ADD), r"a race\. It reads .*, and nothing ensures that it does so before gpu 0 ends the call"),
    (EARLY, r"op 0 \(put\): a race\. It writes .* output buffer of gpu 1 .*, which the user of gpu 1 between two"),
    (packets(2, use_double_scratch_buffer=False), r"a race\. It writes .* scratch .* gpu 1 \(call 2, .*, tb 0, op 1"),
    (
        plan("allreduce", (1, 1), *TWICE, protocol="LL", use_double_scratch_buffer=True),
        r"op 1 \(ppkt\): a race\. It writes .*, whose packets of this call may not have been read",
    ),
    (LATE, r"gpu 0, tb 0, op 3 \(put\): a race\. It reads bytes .* of the input buffer of gpu 0 \(call 2, .*\), and"),
    (reduced(ADD + END, "signal {p}; wait {p}"), r"tb 1, op 0 \(signal\): a race\. It signals on memory channel 0"),
    (reduced(SEM, SEM, semaphores=[1]), r"a race\. It acquires semaphore 0, as .*, and nothing determines which"),
    (reduced(ADD + END + "; signal {p}"), "gpu 0 signals gpu 1 3 times .* but gpu 1 waits 2 times"),
    (
        reduced("wait {p}; signal {p}; nop; rre i0 {p}.i0 > o0" + END),
        r"a deadlock\. gpu 0, tb 0, op 0 \(wait\) waits for a signal on memory channel 0 from gpu 1 to gpu 0; ",
    ),
    (packets(2).replace('"ppkt"', '"put"'), r"a deadlock\. gpu 0, tb 0, op 1 \(repkt\) waits for packets in bytes"),
    (reduced(ADD + END, "sem_acquire 0", semaphores=[1]), "semaphore 0 is released 0 times and acquired 1 times"),
    (reduced(ADD + "; barrier 0 3" + END, "barrier 0 3"), r"barrier 0 must meet (.|\n)*num_threadblocks \[3\]"),
    (reduced(SYNC + "rre i0 {p}.i0 {p}.i0 > o0" + END), r"op 3 \(rre\): at the end .* contribution of rank 1 more"),
    (reduced("copy i0 > o0"), r"gpu 0, tb 0, op 0 \(copy\): at the end bytes .* lacks the contribution of rank 1"),
    (
        reduced(SYNC + "rre i0 {p}.i0 > o1; rre i1 {p}.i1 > o0" + END, chunks=2),
        r"at the end bytes .* contains byte \d+ of the buffer instead of byte 0",
    ),
    (reduced(SYNC + "rre i0 {p}.i1 > o0; rre i1 {p}.i1 > o1" + END, chunks=2), "at the end .* combines different"),
    (SWAPPED, r"of the output buffer of gpu 0 .* (was never written|contains byte|has the contribution)"),
    (reduced("re i0 s0 > o0", scratch=1), r"reads bytes 0 to \d+ of the scratch .* gpu 0 .*, which was never written"),
    (reduced("re i0 i1 > o0"), r"op 0 \(re\): accesses bytes (\d+) to \d+ of the input .* gpu 0, which has \1 bytes"),
    (reduced("put i0 > {p}.s0"), r"op 0 \(put\): accesses .* of the scratch buffer of gpu 1, which has 0 bytes"),
    (
        reduced(SYNC + "pipeline 32 2 [rre i0 {p}.i0 > o0]" + END),
        r"op 3 \(pipeline\), iteration \d, op 0 \(rre\): accesses bytes .* of the input buffer of gpu 0, which has",
    ),
]


@pytest.mark.parametrize(("text", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_faults_are_named(text, words):
    """The error states the plan, the operation at fault, the bytes and the fault."""
    with pytest.raises(ScheduleError, match=words) as caught:
        verify_mscclpp_json(text)
    assert 'plan "custom"' in str(caught.value)


def test_get_swaps_the_offsets_of_the_two_gpus():
    """A get is right if its offsets are equal, or if they are swapped on purpose, as the executor swaps them."""
    text = alike("alltoall", (2, 2), 2, 0, GET % ("{p}", "{g}"))
    assert verify_mscclpp_json(text).notes == ()
    verify_mscclpp_json(reduced(SYNC + "get {p}.i0 > s0; nop; re i0 s0 > o0" + END, scratch=1))


def test_threads_that_process_the_same_words_need_no_nop():
    """No nop is needed before an operation that reads what the same threads wrote. The threads of two operations are
    the same if the ranges begin a multiple of 1024 words apart."""
    text = reduced(SYNC + "rre i0 {p}.i0 > o0; rre i1 {p}.i1 > o1; copy o1 > o1" + END, chunks=2)
    verify_mscclpp_json(text)
    wide = reduced(SYNC + "rre i0+2 {p}.i0+2 > o0+2; copy o1 > o1" + END, chunks=2)  # chunk 1 is in the middle
    with pytest.raises(ScheduleError, match=r"op 4 \(copy\): a race"):
        verify_mscclpp_json(wide)
    words = 1024 * 16  # bytes: a word for each thread
    verify_mscclpp_json(wide, nbytes=2 * words)
    with pytest.raises(ScheduleError, match=r"op 4 \(copy\): a race"):
        verify_mscclpp_json(wide, nbytes=3 * words)


def test_all_releases_are_known_when_all_are_acquired():
    """A threadblock that acquires a semaphore as often as it is released is ordered after all releases. After fewer
    acquires, it is not known which threadblocks have released the semaphore, so no order is proved."""
    # Two threadblocks are started by semaphores 0 and 1, and release semaphore 2 at their ends.
    blocks = [f"sem_acquire {k}; nop; rre i{k} {{p}}.i{k} > o{k}; nop; sem_release 2" for k in range(2)]
    begin = SYNC + "sem_release 0 1; sem_acquire 2; sem_acquire 2; nop; signal {P}; wait {P}"
    verify_mscclpp_json(reduced(begin, *blocks, semaphores=[0, 0, 0], chunks=2))
    early = SYNC + "sem_release 0 1; sem_acquire 2; nop; signal {P}; wait {P}; sem_acquire 2"
    with pytest.raises(ScheduleError, match=r"nothing ensures that it does so before gpu 0 ends the call"):
        verify_mscclpp_json(reduced(early, *blocks, semaphores=[0, 0, 0], chunks=2))


def test_in_place_parts_are_found_as_the_executor_finds_them():
    """In place, an access to another GPU's input is moved by the offset of the accessing GPU's own part. Accesses to
    the output, and the reads of port channels, are not moved."""
    put = SYNC + "put i0 > {p}.%s" + END
    port = "@signal {P}; @wait {P}; nop; @put %s > {p}.o{g}; @signal {p}; @wait {p}; @flush {p}"
    for text in (put % "o{g}", put % "i0", port % "o{g}"):  # the other GPU's "i0", at the own offset, is the right part
        verify_mscclpp_json(alike("allgather", (1, 2), 2, 0, text, inplace=True))
    with pytest.raises(ScheduleError, match=r"gpu 0, .*contains byte|lacks|never written"):
        verify_mscclpp_json(alike("allgather", (1, 2), 2, 0, port % "i0", inplace=True))


RIGHT = {
    "packets": packets(2),
    "packets, scattered": packets_scattered(2),
    "packets, one scratch buffer": packets_scattered(2, use_double_scratch_buffer=False),
    "packets, three threadblocks": packets_scattered(2, apart=True),
    "packets, ports": packets_by_ports(),
    "exchanged": exchanged(3),
    "ports": gathered_by_ports(2),
    "pipelined": pipelined(),
    "barriers": met(),
    "switch": switched(2),
    "switch store": stored(2),
    "switch store, packets": stored_packets(2),
    "all to all": all_to_all(2),
}


def is_refused(text):
    """Return whether the verifier refuses a plan."""
    try:
        verify_mscclpp_json(text)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_plans_in_the_styles_of_other_tools(text):
    """Right plans are proved. A plan without one of its operations, or without one channel of an operation, is refused,
    except that some nops are not needed."""
    verify_mscclpp_json(text)
    for number in range(len(operations(json.loads(text)))):
        less = json.loads(text)
        ops, k = operations(less)[number]
        if len(ops[k].get("channel_ids", ())) > 1 and "src_buff" not in ops[k]:
            ops[k]["channel_ids"].pop()
            name = ops[k]["name"]
        else:
            name = ops.pop(k)["name"]
        assert is_refused(json.dumps(less)) or name == "nop"


def test_two_scratch_buffers_are_for_packets():
    """With two scratch buffers, a put writes into the first one in every call, but an addition reads the call's own."""
    verify_mscclpp_json(reduced(PUT, scratch=1))
    words = r"op 8 \(re\): reads bytes .* scratch .* \(call 2, .*\), which was never written"
    with pytest.raises(ScheduleError, match=words):
        verify_mscclpp_json(reduced(PUT, use_double_scratch_buffer=True, scratch=1))


def test_pipelines_are_proved_for_several_numbers_of_iterations():
    """A plan is proved for chunks of less than 1, of 1, 2 and 3, and of between 2 and 3 units of its pipeline, if these
    are within the plan's limits. Relaxed signals between iterations are a race."""
    sizes = verify_mscclpp_json(pipelined(unit=64)).nbytes
    assert {64, 128, 192} <= set(sizes)
    assert any(128 < size < 192 for size in sizes)
    assert min(sizes) < 64
    report = verify_mscclpp_json(pipelined(unit=64, min_message_size=4096, max_message_size=8192))
    assert all(4096 <= size <= 8192 for size in report.nbytes)
    assert report.sizes == "messages whose number of bytes is a multiple of 16, at least 4096, at most 8192"
    late = pipelined(unit=64).replace('"name": "nop"}, {"name": "signal"', '"name": "nop"}, {"name": "rlxsignal"')
    with pytest.raises(ScheduleError, match=r"op 2 \(pipeline\), iteration \d, op 2 \(re\): a race"):
        verify_mscclpp_json(late)


def test_reused_scratch_memory_is_proved_or_noted():
    """A plan with reuse_resources is also proved for chunks that use their share of the scratch buffer repeatedly. A
    plan that is wrong for them has a note with the largest size for which it is proved."""
    share = 1 << 26  # bytes of scratch memory for the plan's only chunk
    text = pipelined(unit=1 << 22, reuse_resources=True)
    with pytest.raises(ScheduleError, match=r"iteration 16, op 2 \(re\): accesses bytes \d+ to \d+ of the scratch"):
        verify_mscclpp_json(text, nbytes=2 * share + 16)
    report = verify_mscclpp_json(text)
    assert [note for note in report.notes if f"not proved for messages of more than {share} bytes" in note]
    assert verify_mscclpp_json(pipelined(unit=1 << 22, reuse_resources=True, max_message_size=share)).notes == ()


NOTES = [
    (reduced(SYNC + "nop; " * 62 + "rre i0 {p}.i0 > o0" + END), "64 operations per threadblock, gpu 0, tb 0 has 69"),
    (reduced(ADD + END, *["nop"] * 99), "100 threadblocks of a GPU must run at the same time, 1 per multiprocessor"),
    (switched(2), "glres: switch channels run on NVIDIA GPUs with NVLink switches, from H100 on"),
    (gathered_by_ports(2), "the plan needs its flushes, but flushes do nothing (the executor's handleFlush"),
    (packets(2), "other plans of the process also change which half they use"),
    (met(), "chunks of messages of less than 32 bytes have fewer words than a group has threadblocks"),
    (exchanged(2).replace('"rre"', '"rre", "reduce_op": "max"'), "the executor adds; it does not read reduce_op (max)"),
    (exchanged(2, buffer_alignment=8), "only chunks of multiples of 16 bytes are right"),
    (gathered_by_ports(2, put="@pwsf PUTS", end="nop"), "pwsf: the executor passes an address instead of the source"),
    (reduced(ADD + "; barrier 20 1" + END), "the executor allows 16 barriers of a GPU, the plan has 21"),
]


@pytest.mark.parametrize(("text", "words"), NOTES, ids=[words for _, words in NOTES])
def test_notes(text, words):
    """A plan that exceeds limits of the executor, or meets its faults, is proved, and has a note."""
    assert words in str(verify_mscclpp_json(text))


def test_small_groups_are_wrong():
    """If a chunk has fewer words than a group has threadblocks, the executor divides it wrongly, and the plan fails."""
    with pytest.raises(ScheduleError, match=r"never written|lacks|accesses bytes"):
        verify_mscclpp_json(met(), nbytes=16)
    assert verify_mscclpp_json(met(), nbytes=32).nbytes == (32,)


def test_the_report():
    """The report as text has the proved collective, a line of counts, the sizes, and at most 32 notes."""
    report = verify_mscclpp_json(all_to_all(3))
    assert str(report).splitlines() == [
        "alltoall, out of place: right.",
        "  3 GPUs, 3 chunks, 1 threadblocks per GPU, 24 operations, Simple",
        "  proved with messages of 48, 96, 192, 240 bytes",
    ]
    assert report.sizes.endswith("a multiple of 48; IT IS NOT A POWER OF TWO: the executor raises an error for others")
    assert verify_mscclpp_json(stored(2)).sizes == "messages whose number of bytes is a multiple of 32"
    many = dataclasses.replace(report, notes=tuple(f"fact {k}" for k in range(1000)))
    assert str(many).splitlines()[-2:] == ["  note: fact 31", "  ... and 968 further notes"]


BROADCAST = to_mscclpp_json(ring(names(2), sources=["cpu:0"]))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (exchanged(2), {"nbytes": 20}, r"does not run for a message(.|\n)*20 (.|\n)*multiple of 16 bytes; "),
        (exchanged(2), {"nbytes": 0}, "does not run for a message of this size"),
        (exchanged(2), {"nbytes": 16.0}, "nbytes must be an integer"),
        (exchanged(2), {"root": 0}, "the plan's collective, allreduce, has no root"),
        (BROADCAST, {"root": 2}, "must be a rank of the plan"),
        (exchanged(2, min_message_size=32, max_message_size=64), {"nbytes": 80}, "is for messages from 32 to 64"),
    ],
)
def test_arguments_are_checked(text, options, words):
    """An invalid size or root is an ArgumentError."""
    with pytest.raises(ArgumentError, match=words):
        verify_mscclpp_json(text, **options)


def edited(*path, value=None, text=None):
    """Return a plan with one field replaced, or removed if the value is ``None``."""
    content = json.loads(text or exchanged(2))
    where = content
    for key in path[:-1]:
        where = where[key]
    if value is None:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return json.dumps(content)


OP = ("gpus", 0, "threadblocks", 0, "ops")
REMOTE = ("gpus", 0, "remote_buffers", 0, "access_channel_types")
NESTED = '{"name": "pipeline", "iter_context": {}, "ops": []}, '
MALFORMED = [
    ('{"gpus": [}', "it is not JSON at line 1, column 11"),
    ('{"gpus":' + "[" * 100_000, "it is nested too deeply"),
    (None, "must be a str"),
    (edited("name"), "plan: the field name is missing"),
    (edited("gpus", value=[]), r'plan "custom": the plan must have GPUs'),
    (edited("protocol", value="LL128"), "unknown protocol(.|\n)*'LL128'(.|\n)*one of Simple, LL"),
    (edited("gpus", 1, "id", value=5), r"gpu 1: GPUs must be listed in the order of their ids(.|\n)*id=5"),
    (edited("inplace", value=1), "inplace must be true or false"),
    (edited(*OP, 0, "name", value="glre"), r"op 0: MSCCL\+\+'s executor has no such operation(.|\n)*'glre'(.|\n)*one"),
    (edited(*OP, 3, "dst_buff", value=[]), r"op 3 \(rre\): unexpected kinds of dst_buff(.|\n)*none"),
    (edited(*OP, 0, "channel_ids", value=[7]), "channel_ids must be numbers of memory channels of the tb"),
    (edited(*OP, 0, "channel_type", value="none"), r"\(rlxsignal\): the operation needs memory or port channels"),
    (edited(*OP, 3, "src_buff", 1, "buffer_id", value=9), "buffer_id must be an integer from 0 to 2"),
    (edited(*OP, 3, "src_buff", 0, "type", value="x"), "unknown type(.|\n)*one of i, o, s"),
    (edited(*REMOTE, value=["port"]), "remote buffer 0 is not declared for access through memory channels"),
    (edited("buffer_alignment", value=True), "buffer_alignment must be an integer from 1"),
    (pipelined().replace('{"name": "put"', NESTED + '{"name": "put"'), "a pipeline must not contain a pipeline"),
    (pipelined().replace('"unit_size": 64', '"unit_size": 0'), "unit_size must be an integer from 1"),
    (exchanged(2, max_message_size=8), "no message has a valid size(.|\n)*multiples of 16 bytes"),
    (edited("gpus", 1, "input_chunks", value=2), "all GPUs must have buffers of the same size"),
    (all_to_all(2).replace('"alltoall"', '"allgather"'), "wrong numbers of chunks for allgather of 2 GPUs"),
    (exchanged(2).replace('"allreduce"', '"alltoall"'), "the same number of chunks in alltoall"),
    (edited("collective", value="sendrecv"), "cannot be verified(.|\n)*'sendrecv'(.|\n)*allgather, allreduce, all"),
]


@pytest.mark.parametrize(("text", "words"), MALFORMED, ids=[words for _, words in MALFORMED])
def test_malformed_plans_are_refused(text, words):
    """The error states the place and the field, the given value, and the allowed ones."""
    with pytest.raises(ScheduleError, match=words) as caught:
        verify_mscclpp_json(text)
    assert len(str(caught.value)) < 1200


COPIES = "; ".join(f"copy i{k}+1000 > o{k}+1000" for k in range(400))
LARGE = [
    ('{"gpus": "' + "x" * (1 << 26) + '"}', "the plan is too large to be read"),
    ('{"gpus": [' + "{}," * (1 << 21) + "{}]}", "the plan is too large to be read(.|\n)*'{'"),
    (pipelined(unit=16, min_message_size=1 << 15), "the plan is too large to be verified"),
    (reduced(COPIES, chunks=4096), "the plan is too large to be verified"),
]


@pytest.mark.parametrize(("text", "words"), LARGE, ids=["characters", "objects", "iterations", "cells"])
def test_large_plans_are_refused_in_bounded_memory(text, words, monkeypatch):
    """Plans with too many characters, objects, iterations or cells are refused. It takes less than 100 MB, or
    6.25 MB for iterations and cells, of which a sixteenth is allowed here."""
    for module, name in ((instructions, "MOST_INSTRUCTIONS"), (memory, "MOST_CUTS"), (memory, "MOST_CELLS")):
        monkeypatch.setattr(module, name, getattr(module, name) >> 4)
    most = 100_000_000 if len(text) > 1 << 20 else 100_000_000 >> 4
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=words):
            verify_mscclpp_json(text)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_a_transfer_is_over_only_for_threads_that_come_after_its_post():
    """A flush lasts until the transfers that were posted before it are over. A flush that is not ordered after a post
    may come before it, also if another thread has already waited for the transfer."""
    numbers, transfer = itertools.count(), 1 << 100
    first, second = BlockClock(0, numbers), BlockClock(1, numbers)
    channel = Channel("a port channel", is_port=True, notes=[])
    channel.post(first, 0, "put", transfer)
    posted = first.clock_of(0)
    channel.flush(first, 0)
    assert first.clock_of(0).ended & transfer
    channel.flush(second, 0)
    assert not second.clock_of(0).ended & transfer
    second.extend(0, posted)  # now it comes after the post
    channel.flush(second, 0)
    assert second.clock_of(0).ended & transfer


def test_a_long_deadlock_has_a_short_message():
    """The message of a deadlock names at most 8 of the threadblocks that wait."""
    blocks = [f"sem_acquire {k}; sem_release {(k + 1) % 100}" for k in range(100)]
    with pytest.raises(ScheduleError, match=r"a deadlock\. .*; \.\.\. \(200 threadblocks wait\)\.") as error:
        verify_mscclpp_json(reduced(*blocks, semaphores=[0] * 100))
    assert len(str(error.value)) < 1500
