"""``crossreduce verify``: right, wrong and unreadable files."""

import pytest

import crossreduce as cr
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json

DGX = cr.Topology.machine("dgx-1v")
# Output of msccl-tools: an all-gather of two ranks, out of place, without the attributes of later versions.
FOREIGN = """\
<algo name="custom" nchannels="1" nchunksperloop="2" proto="Simple" ngpus="2" coll="allgather" inplace="0">
  <gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="2" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def forms():
    """Yield right files: MSCCL XML of this library and of msccl-tools, MSCCL++ plans, and schedules in JSON."""
    yield "foreign.xml", FOREIGN, "allgather, out of place: right."
    for algorithm in ("ring", "forest"):
        schedule = cr.plan(DGX.subset(DGX.devices[:4]), algorithm=algorithm).schedule
        yield f"{algorithm}.xml", to_msccl_xml(schedule), "allreduce, in place and out of place: right."
        yield f"{algorithm}.json", schedule.to_json(), f"{schedule.head}: right."
        yield f"{algorithm}++.json", to_mscclpp_json(schedule), "allreduce, in place: right."


@pytest.mark.parametrize(("name", "text", "words"), list(forms()), ids=lambda value: str(value)[:12])
def test_a_right_file_is_proved(printed, crossreduce, tmp_path, name, text, words):
    """A right file exits with 0 and prints the proved facts, with and without a byte order mark. A truncated one exits
    with 2: it is neither proved nor called wrong."""
    path = tmp_path / name
    path.write_text(text)
    assert printed("verify", path).startswith(words)
    path.write_text("\ufeff" + text, "utf-8")
    assert printed("verify", path).startswith(words)
    for end in range(0, len(text.rstrip()), len(text) // 12):
        path.write_text(text[:end])
        assert crossreduce("verify", path)[:2] == (2, ""), end


PLAN = to_mscclpp_json(cr.plan(DGX.subset(DGX.devices[:2]), algorithm="direct").schedule)
WRONG = {
    "a plan without waits": (PLAN.replace('"wait"', '"nop"'), "but gpu 1 waits 0 times"),
    "a plan without nops": (PLAN.replace('"nop"', '"rlxwait", "channel_ids": [], "channel_type": "memory"'), "a race"),
    "a plan with another offset": (PLAN.replace('"index": 1', '"index": 9', 1), "accesses bytes"),
    "a copy is left out": (FOREIGN.replace('type="cpy"', 'type="nop"', 1), "was never written"),
    "a chunk lands elsewhere": (FOREIGN.replace('dstoff="1" cnt', 'dstoff="0" cnt', 1), "a race"),
    "no send": (FOREIGN.replace('type="s"', 'type="nop"', 1), "sends 0 times to gpu 1"),
    "outside of the buffer": (FOREIGN.replace('srcoff="0"', 'srcoff="9"', 1), "chunks 9 to 9 of the input buffer"),
    "a device gets nothing": (
        '{"format":"crossreduce.schedule/1","collective":"broadcast","algorithm":"x","devices":["cpu:0","cpu:1"],'
        '"chunks":[["1",[0],[0,1]]],"rounds":[],"pieces":1}',
        "cpu:1",
    ),
    "a part is counted twice": (
        '{"format":"crossreduce.schedule/1","collective":"reduce","algorithm":"x","devices":["cpu:0","cpu:1"],'
        '"chunks":[["1",[0,1],[0]]],"rounds":[[[0,0,[0,1]]],[[0,0,[0,1]]]],"pieces":1}',
        "the contribution of device cpu:1 a second time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_rejected(crossreduce, tmp_path, fault):
    """A file that can be read and is wrong exits with 1 and prints the fault on stderr."""
    text, words = WRONG[fault]
    path = tmp_path / "a.file"
    path.write_text(text)
    code, out, error = crossreduce("verify", path)
    assert (code, out) == (1, "")
    assert error.startswith(f"crossreduce: {path} is wrong: ")
    assert words in error


BOMB = '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><algo name="&b;"/>'
UNREADABLE = {
    "empty": b"",
    "blank": b" \n\t ",
    "binary": b"\x89PNG\x00\xff",
    "text": b"all is well",
    "entities": BOMB.encode(),
    "another file": b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><algo/>',
    "deep XML": b"<algo>" * 100_000,
    "deep JSON": b'{"a":' * 100_000,
    "a huge number": FOREIGN.replace('ngpus="2"', 'ngpus="99999999999999999"').encode(),
    "NCCL's": b'<system version="1"><cpu numaid="0"/></system>',
    "a topology": DGX.to_json().encode(),
    "a trace": b'{"traceEvents": []}',
    "a graph": b"<graphs/>",
    "another collective": FOREIGN.replace("allgather", "custom").encode(),
    "a number of 10**6 digits": b'{"format":"crossreduce.schedule/1","pieces":' + b"9" * 10**6 + b"}",
    "two roots": (FOREIGN + FOREIGN).encode(),
    "UTF-16": FOREIGN.encode("utf-16"),
    "too long": b"<" + b" " * (1 << 26),
    "a plan without GPUs": b'{"name": "x", "collective": "allreduce", "protocol": "LL", "gpus": []}',
    "a plan for sendrecv": PLAN.replace("allreduce", "sendrecv").encode(),
    "a plan with another operation": PLAN.replace('"put"', '"gstorepkt"').encode(),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_an_unreadable_file_is_rejected(crossreduce, tmp_path, fault):
    """A file that is not a schedule exits with 2 and an error that names the file."""
    path = tmp_path / "a.xml"
    path.write_bytes(UNREADABLE[fault])
    code, out, error = crossreduce("verify", path)
    assert (code, out) == (2, "")
    assert error.startswith(f"crossreduce: {path}")
    assert len(error) < 2000
    if fault in ("a topology", "a trace", "a graph"):
        assert (
            "files that can be verified: MSCCL XML (<algo>), MSCCL++ plans, and schedules in JSON (crossreduce export"
            in error
        )


def test_the_function_takes_schedules_only():
    """``cr.verify`` of a file's name raises an error that recommends ``crossreduce verify FILE``."""
    match = r"this is not a Schedule(.|\n)*'plan\.xml'(.|\n)*crossreduce verify FILE"
    with pytest.raises(cr.ScheduleError, match=match):
        cr.verify("plan.xml")


def test_missing_files_and_sizes(crossreduce, printed, tmp_path):
    """A folder that is not a bundle and a missing file exit with 2. For an MSCCL++ plan, the last line tells which
    messages the executor accepts."""
    missing = "cannot be read: No such file or directory."
    assert crossreduce("verify", tmp_path / "no") == (2, "", f"crossreduce: {tmp_path / 'no'} {missing}\n")
    folder = f"crossreduce: {tmp_path / 'ranks.json'} {missing} A folder must be one of crossreduce bundle.\n"
    assert crossreduce("verify", tmp_path) == (2, "", folder)
    (tmp_path / "plan.json").write_text(PLAN)
    sizes = "  sizes: messages whose number of bytes is a multiple of 32"
    assert printed("verify", tmp_path / "plan.json").splitlines()[-1] == sizes
