"""The differences between the formats MSCCL XML and MSCCL++: text, limits, and arguments."""

import json
import re

import pytest
from budget import examples
from exports import shares
from hypothesis import given
from hypothesis import strategies as st
from msccl_machine import fault
from strategies import algorithms, names

from crossreduce import ArgumentError, PlanError, Schedule
from crossreduce.export.formats.msccl.format import read_msccl_xml
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json
from crossreduce.planning import PLANNERS, direct, one_device, one_shot, recursive_doubling, ring


def test_exchanges_of_single_chunks_need_no_scratch_memory():
    """A message that fits into a slot is sent before the sum overwrites its memory, so no scratch memory is needed."""
    for schedule in (recursive_doubling(names(2)), recursive_doubling(names(8)), one_shot(names(2))):
        text = to_msccl_xml(schedule, outofplace=False)
        assert {gpu.sizes["s"] for gpu in read_msccl_xml(text).gpus} == {0}
        assert "cpy" not in text


# What the runtimes' parsers read: one blank before each attribute, double quotes, no escapes, one element per line.
LINE = re.compile(r' *<(/?)(algo|gpu|tb|step)((?: [A-Za-z_]+="[A-Za-z0-9_.:+/@-]*")*)(/?)>')
HEAD = "name proto nchannels nchunksperloop ngpus coll inplace outofplace minBytes maxBytes"


@given(algorithms, st.integers(2, 5), st.integers(1, 3))
@examples(20)
def test_the_runtimes_can_read_the_text(algorithm, n, packs):
    """The text has one element per line, all ten attributes of ``<algo>``, and no prolog, tabs, escapes or comments.
    Only steps have no children, and all steps have the same number of attributes."""
    text = to_msccl_xml(PLANNERS[algorithm](names(n), packs=packs), min_bytes=1024, max_bytes=1 << 20, proto="LL")
    lines = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(lines)
    algo = dict(re.findall(r'(\w+)="([^"]*)"', lines[0][3]))
    assert list(algo) == HEAD.split()
    assert (algo["proto"], algo["minBytes"], algo["maxBytes"]) == ("LL", "1024", "1048576")
    assert {line[2] for line in lines if line[4]} <= {"step"}  # line[4]: the "/" of an element without children
    assert len({line[3].count("=") for line in lines if line[2] == "step"}) == 1


def test_the_number_of_channels():
    """By default, chunks are spread over so many channels that no threadblock has more than 64 steps. ``channels`` sets
    the number. No two threadblocks of a GPU have the same channel and peers."""
    for packs, channels in ((1, 1), (4, 1), (5, 2)):
        algo = read_msccl_xml(to_msccl_xml(ring(names(8), packs=packs)))
        assert algo.channels == channels
        assert max(len(block.steps) for gpu in algo.gpus for block in gpu.threadblocks) <= 64
    algo = read_msccl_xml(to_msccl_xml(direct(names(4)), channels=4))
    assert algo.channels == 4
    for gpu in algo.gpus:
        used = [(block.channel, block.send, block.recv) for block in gpu.threadblocks]
        assert {channel for channel, *_ in used} == {0, 1, 2, 3}
        assert len(set(used)) == len(used)


def test_large_blocks_are_split():
    """A chunk of more than 71 units (equal parts of the buffer) is moved by several steps of at most 71 units."""
    text = to_msccl_xml(shares("199/201", "2/201"))  # chunks of 199 units and of 2 units
    counts = [step.chunks for block in read_msccl_xml(text).gpus[0].threadblocks for step in block.steps]
    assert counts == [71, 71, 57, 2] * 2
    assert fault(text, seed=0, tries=2, slots=1) is None


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        (shares("1/40000", "39999/40000"), {}, "need 40000 equal chunks, but the runtimes count up to 32768"),
        (direct(names(24)), {"channels": 2}, "RCCL has 64 threadblocks per GPU, gpu 0 needs 70"),
        (direct(names(34)), {"runtime": "msccl", "channels": 1}, "32 ranks to send to on a channel, gpu 0 needs 33"),
        (ring(names(4)), {"channels": 33}, "msccl-executor-nccl has 32 channels, the file needs 33"),
        (ring(names(4)), {"channels": 129, "runtime": "rccl"}, "RCCL has 128 channels, the file needs 129"),
        (ring(names(8), packs=5), {"channels": 1}, "has 64 steps per threadblock, gpu 0 needs 70"),
        (ring(names(2)), {"channels": 0}, "channels must be at least 1"),
        (ring(names(2)), {"min_bytes": "1M"}, "min_bytes must be an integer"),
        (ring(names(2)), {"min_bytes": 2, "max_bytes": 1}, "max_bytes must not be below min_bytes"),
        (ring(names(2)), {"proto": "simple"}, "unknown protocol"),
        (ring(names(2)), {"runtime": "nccl"}, "unknown runtime"),
        (ring(names(2)), {"inplace": False, "outofplace": False}, "in place, calls out of place, or both"),
        *((ring(names(2)), {"name": name}, "1 to 200 plain characters") for name in ('a"b', "x" * 256, 3)),
        (
            one_device(names(4), ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
            {},
            "a source or a destination.*\n.*cpu:2, cpu:3\n.*a machine without in_network",
        ),
    ],
)
def test_the_limits_and_arguments_of_msccl(schedule, options, text):
    """The error states which limit or rule the schedule or an argument breaks."""
    with pytest.raises((PlanError, ArgumentError), match=text):
        to_msccl_xml(schedule, **options)


def test_names_and_runtimes():
    """Only the limits of the given runtime must hold. A given name is used unchanged. In the default name, "_" replaces
    characters that the runtimes cannot read."""
    schedule = direct(names(24))
    with pytest.raises(PlanError, match=r'RCCL has 64 threadblocks(.*\n)+.*runtime="msccl"'):
        to_msccl_xml(schedule, channels=2)
    notes = verify_msccl_xml(to_msccl_xml(schedule, channels=2, runtime="msccl")).notes
    assert notes == ("RCCL has 64 threadblocks per GPU, gpu 0 needs 70",)
    assert '<algo name="mine-1" ' in to_msccl_xml(ring(names(2)), name="mine-1")
    for algorithm, name in (('my "ring" & <eye>', "my__ring_____eye__2"), ("x" * 300, "x" * 190)):
        named = Schedule("all_reduce", algorithm, *shares("1")._parts[2:])
        assert f'<algo name="allreduce_{name}" ' in to_msccl_xml(named)


def test_exchanges_put_before_they_wait():
    """In an exchange every device puts its own value before it waits for other values, so that the puts overlap."""
    for schedule in (recursive_doubling(names(2)), one_shot(names(5))):
        for gpu in json.loads(to_mscclpp_json(schedule))["gpus"]:
            ops = [op["name"] for op in gpu["threadblocks"][0]["ops"] if op["name"] != "nop"]
            assert ops == ["signal", "wait", "res" if len(schedule.devices) > 2 else "put", "signal", "wait", "re"]


def test_arguments_are_in_the_plan():
    """The plan has the fields that the executor reads, with the arguments."""
    text = to_mscclpp_json(ring(names(2)), name="mine", threads=512, min_bytes=1 << 10, max_bytes=1 << 20)
    content = json.loads(text)
    del content["gpus"]
    assert content == {
        "name": "mine", "collective": "allreduce", "protocol": "Simple", "inplace": True, "reuse_resources": False,
        "num_threads_per_block": 512, "use_double_scratch_buffer": False, "buffer_alignment": 16,
        "min_message_size": 1 << 10, "max_message_size": 1 << 20,
    }  # fmt: skip
    assert json.loads(to_mscclpp_json(ring(names(2))))["name"] == "allreduce_ring_2"
    for number, count in ((None, 12), (5, 5), (80, 12)):  # each of 12 chunks has a threadblock, if they are not limited
        content = json.loads(to_mscclpp_json(ring(names(4), packs=3), threadblocks=number))
        assert [len(gpu["threadblocks"]) for gpu in content["gpus"]] == [count] * 4


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        (ring(names(8), packs=4), {"threadblocks": 2}, "64 operations per threadblock, but cpu:0 needs"),
        (direct(names(18)), {}, "16 channels per threadblock, but cpu:0 needs at least 17"),
        (ring(names(2)), {"threadblocks": 0}, "threadblocks, the number per GPU, must be 1 to 320"),
        (ring(names(2)), {"threadblocks": 81, "threads": 1024}, "must be 1 to 80"),
        (ring(names(2)), {"threads": 100}, "threads must be a multiple of 32 up to 1024"),
        (ring(names(2)), {"min_bytes": 2, "max_bytes": 1}, "0 <= min_bytes <= max_bytes"),
    ],
)
def test_the_limits_and_arguments_of_mscclpp(schedule, options, text):
    """The error states which limit or rule the schedule or the option breaks."""
    with pytest.raises((PlanError, ArgumentError), match=text):
        to_mscclpp_json(schedule, **options)
