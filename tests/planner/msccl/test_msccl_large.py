"""MSCCL XML of any size: time, memory and messages are bounded."""

import dataclasses
import tracemalloc

import pytest

from crossreduce import ScheduleError
from crossreduce.export.formats.msccl.verifier import verify_msccl_xml
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.planning import ring

HEAD = '<algo name="x" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="7" coll="allreduce" inplace="1">'
LARGE = {
    "attributes": (
        lambda: "<algo" + "".join(f' a{k}=""' for k in range(1_000_000)) + "/>",
        "a tag or comment is longer than",
    ),
    "attributes with brackets": (lambda: "<algo" + ' a=">"' * 1_000_000 + "/>", "a tag or comment is longer than"),
    "65 attributes": (
        lambda: "<algo" + "".join(f' a{k}=""' for k in range(65)) + "/>",
        "too large to be read.*\n.*65 attrib",
    ),
    "names": (
        lambda: "<algo" + "".join(f' {chr(97 + k) * 2000}=""' for k in range(20)) + "/>",
        "lacks the attribute ngpus",
    ),
    "elements": (
        lambda: HEAD + '<gpu id="0"/>' * 1_000_000 + "</algo>",
        "too large to be read.*\n.*element 262145, <gpu>",
    ),
    "ids": (lambda: HEAD + "".join(f'<gpu id="{k}"/>' for k in range(100_000)) + "</algo>", "there must be 7 <gpu>"),
    "a comment": (lambda: f"<!--{'a ' * 1_000_000}--><algo/>", "a tag or comment is longer than 65536 bytes"),
    "words": (lambda: "a " * 10_000_000, "this is not XML"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_files_are_refused_in_bounded_time_and_memory(name):
    """A file with a million attributes or elements is refused, with a short message and less memory than 400 MB."""
    made, words = LARGE[name]
    text = made()
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=words) as error:
            verify_msccl_xml(text)
        assert tracemalloc.get_traced_memory()[1] < 400_000_000
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 600


def test_a_long_tag_is_read_wherever_it_starts():
    """A tag of up to 65536 bytes is read at any position in the file."""
    valid = to_msccl_xml(ring(["cuda:0", "cuda:1"])).replace('name="', 'name="' + "é" * 30_000, 1)
    for spaces in (0, 1, 5_000, 40_000, 65_000, 65_536, 70_001):
        assert verify_msccl_xml(" " * spaces + valid).ngpus == 2


def test_a_report_has_a_limited_number_of_notes():
    """The text of a report has at most 32 notes, and says how many there are besides."""
    report = verify_msccl_xml(to_msccl_xml(ring(["cuda:0", "cuda:1"])))
    many = dataclasses.replace(report, notes=tuple(f"fact {k}" for k in range(1000)))
    assert str(many).splitlines()[-2:] == ["  note: fact 31", "  ... and 968 further notes"]


def waiting(blocks, depends):
    """Return a file in which the one step of each threadblock waits for the threadblock that ``depends`` returns."""
    steps = "".join(
        f'<tb id="{k}" send="-1" recv="-1" chan="0"><step s="0" type="cpy" srcbuf="i" srcoff="{k}" dstbuf="o" '
        f'dstoff="{k}" cnt="1" depid="{depends(k)}" deps="{min(depends(k), 0)}" hasdep="1"/></tb>'
        for k in range(blocks)
    )
    sizes = f'i_chunks="{blocks}" o_chunks="{blocks}" s_chunks="0"'
    head = HEAD.replace('ngpus="7"', 'ngpus="1"').replace('nchunksperloop="1"', f'nchunksperloop="{blocks}"')
    return head.replace('inplace="1"', 'inplace="0"') + f'<gpu id="0" {sizes}>{steps}</gpu></algo>'


def test_a_long_deadlock_has_a_short_message():
    """The message of a deadlock names at most 32 of the steps that wait for each other."""
    assert verify_msccl_xml(waiting(100, lambda k: k - 1)).steps == 100
    with pytest.raises(ScheduleError, match=r"a deadlock\. .*; \.\.\. \(1000 waits in all\)\.") as error:
        verify_msccl_xml(waiting(1000, lambda k: (k + 1) % 1000))
    assert len(str(error.value)) < 3000
