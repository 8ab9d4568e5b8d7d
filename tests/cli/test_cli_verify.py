"""``crossreduce verify``: right, wrong and unreadable files."""

import json

import pytest
from msccl_files import file

import crossreduce as cr
from crossreduce.export.formats.msccl.writer import to_msccl_xml
from crossreduce.export.formats.mscclpp import to_mscclpp_json
from crossreduce.export.formats.mscclpp.verifier import instructions

DGX = cr.Topology.machine("dgx-1v")
FIRST_VERSION = {"inplace": 0, "nchannels": 1, "outofplace": None, "minBytes": None, "maxBytes": None}
# As msccl-tools writes them: an all-gather of two ranks, out of place, without the attributes of later versions.
FOREIGN = file(
    "allgather",
    2,
    (0, (1, 1, 0, "s i0 o0 1", "r i0 o1 1"), (-1, -1, 0, "cpy i0 o0 1")),
    (0, (0, 0, 0, "s i0 o1 1", "r i0 o0 1"), (-1, -1, 0, "cpy i0 o1 1")),
    **FIRST_VERSION,
)


def right_files():
    """Yield the name and the text of right files, and how the output of ``verify`` begins."""
    yield "foreign.xml", FOREIGN, "allgather, out of place: right."
    for algorithm in ("ring", "forest"):
        schedule = cr.plan(DGX.subset(DGX.devices[:4]), algorithm=algorithm).schedule
        yield f"{algorithm}.xml", to_msccl_xml(schedule), "allreduce, in place and out of place: right."
        yield f"{algorithm}.json", schedule.to_json(), f"{schedule.head}: right."
        yield f"{algorithm}++.json", to_mscclpp_json(schedule), "allreduce, in place: right."


@pytest.mark.parametrize(("name", "text", "words"), list(right_files()), ids=lambda value: str(value)[:12])
def test_a_right_file_is_proved(printed, crossreduce, tmp_path, name, text, words):
    """A right file exits with 0 and prints what was proved, with and without a byte order mark. A truncated file exits
    with 2, since it cannot be read."""
    path = tmp_path / name
    path.write_text(text)
    assert printed("verify", path).startswith(words)
    facts = json.loads(printed("verify", path, "--json"))
    assert (facts["right"], facts["proved"][0].startswith(words)) == (True, True)
    path.write_text("\ufeff" + text, "utf-8")
    assert printed("verify", path).startswith(words)
    for end in range(0, len(text.rstrip()), len(text) // 12):
        path.write_text(text[:end])
        assert crossreduce("verify", path)[:2] == (2, ""), end


PLAN = to_mscclpp_json(cr.plan(DGX.subset(DGX.devices[:2]), algorithm="direct").schedule)
TWICE = (
    '{"format":"crossreduce.schedule/1","collective":"reduce","algorithm":"x","devices":["cpu:0","cpu:1"],'
    '"chunks":[["1",[0,1],[0]]],"rounds":[[[0,0,[0,1]]],[[0,0,[0,1]]]],"pieces":1}'
)
WRONG = {
    "a plan without waits": (PLAN.replace('"wait"', '"nop"'), "but gpu 1 waits 0 times"),
    "a copy is left out": (FOREIGN.replace('type="cpy"', 'type="nop"', 1), "was never written"),
    "outside of the buffer": (FOREIGN.replace('srcoff="0"', 'srcoff="9"', 1), "chunks 9 to 9 of the input buffer"),
    "a part is counted twice": (TWICE, "the contribution of device cpu:1 a second time"),
}


def test_a_wrong_file_is_rejected(crossreduce, tmp_path):
    """A file that can be read and is wrong exits with 1 and prints the fault on stderr."""
    path = tmp_path / "a.file"
    for fault, (text, words) in WRONG.items():
        path.write_text(text)
        code, out, error = crossreduce("verify", path)
        assert (code, out) == (1, ""), fault
        assert error.startswith(f"crossreduce: {path} is wrong: ")
        assert words in error
        code, out, error = crossreduce("verify", path, "--json")
        facts = json.loads(out)
        assert (code, facts["right"], words in facts["fault"], error) == (1, False, True, "")


UNREADABLE = {
    "empty": b"",
    "binary": b"\x89PNG\x00\xff",
    "another file": b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><algo/>',
    "deep XML": b"<algo>" * 100_000,
    "a topology": DGX.to_json().encode(),
    "a trace": b'{"traceEvents": []}',
    "a number of 10**6 digits": b'{"format":"crossreduce.schedule/1","pieces":' + b"9" * 10**6 + b"}",
    "too long": b"<" + b" " * (1 << 26),
}


def test_an_unreadable_file_is_rejected(crossreduce, tmp_path):
    """A file that is not a schedule exits with 2 and an error that names the file."""
    path = tmp_path / "a.xml"
    kinds = "files that can be verified: MSCCL XML (<algo>), MSCCL++ plans, and schedules in JSON (crossreduce export"
    for fault, content in UNREADABLE.items():
        path.write_bytes(content)
        code, out, error = crossreduce("verify", path)
        assert (code, out) == (2, ""), fault
        assert error.startswith(f"crossreduce: {path}")
        assert len(error) < 2000
        if fault in ("a topology", "a trace"):
            assert kinds in error


def test_the_function_takes_schedules_only():
    """``cr.verify`` of a file's name raises an error that recommends ``crossreduce verify FILE``."""
    with pytest.raises(cr.ScheduleError, match=r"(?s)this is not a Schedule.*'plan\.xml'.*crossreduce verify FILE"):
        cr.verify("plan.xml")


def test_missing_files_and_sizes(crossreduce, printed, tmp_path):
    """A missing file and a folder that is not a bundle exit with 2. The last line about an MSCCL++ plan names the sizes
    of messages for which it can be used."""
    missing = "cannot be read: No such file or directory."
    assert crossreduce("verify", tmp_path / "no") == (2, "", f"crossreduce: {tmp_path / 'no'} {missing}\n")
    code, out, error = crossreduce("verify", tmp_path)
    assert (code, out) == (2, "")
    assert error.startswith(f"crossreduce: {tmp_path / 'ranks.json'} {missing} A folder must be one that ")
    (tmp_path / "plan.json").write_text(PLAN)
    sizes = "  sizes: messages whose number of bytes is a multiple of 32"
    assert printed("verify", tmp_path / "plan.json").splitlines()[-1] == sizes


DAMAGED_GROUPS = [
    (lambda about: about["groups"][0].update(collective="reduce"), 1, "its collective is all_reduce, unlike in groups"),
    (lambda about: about["groups"][1]["ranks"].pop(), 1, "group_1.json is wrong: its ranks is 4, unlike"),
    (lambda about: about["groups"][1].update(bytes_multiple_of=3), 1, "its bytes_multiple_of is"),
    (lambda about: about["groups"][1].update(file="group_7.json"), 2, "group_7.json cannot be read"),
    (lambda about: about["groups"][1].update(file="../x.json"), 2, "'../x.json', which is not a file of a group"),
    (lambda about: about["groups"][1].pop("ranks"), 2, "groups.json is not the list of groups: it lacks 'ranks'"),
    (lambda about: about.update(groups=[]), 2, "it must list groups with files"),
    (lambda about: about.update(format="other"), 2, 'its format is not "crossreduce.groups/1"'),
]


def test_a_folder_of_groups_is_proved(printed, crossreduce, tmp_path):
    """``verify`` proves the files that ``groups --export`` wrote, and compares them with ``groups.json``. A file that
    differs from it exits with 1, and a malformed list with 2."""
    folder = tmp_path / "made"
    printed("groups", "hgx-h100", "0-3;4-7", "--export", folder)
    lines = printed("verify", folder).splitlines()
    assert lines[-1] == f"{folder}: the files of 2 groups are right."
    proved = [line for line in lines if line.startswith("group_")]
    assert proved == [f"group_{k}.json: allreduce, in place: right." for k in range(2)]
    about = (folder / "groups.json").read_text()
    for damage, code, words in DAMAGED_GROUPS:
        changed = json.loads(about)
        damage(changed)
        (folder / "groups.json").write_text(json.dumps(changed))
        found, _, error = crossreduce("verify", folder)
        assert (found, words in error) == (code, True), error


def test_groups_with_files_that_are_too_large_to_be_verified(printed, crossreduce, tmp_path, monkeypatch):
    """``verify`` proves all other files of the groups, names each that is too large, and exits with 2."""
    printed("groups", "hgx-h100", "0-1;2-4;5-7", "--export", tmp_path)
    monkeypatch.setattr(instructions, "MOST_INSTRUCTIONS", 1000)
    code, out, error = crossreduce("verify", tmp_path)
    proved = [line for line in out.splitlines() if line.startswith("group_")]
    assert (code, proved) == (2, [f"group_{k}.json: allreduce, in place: right." for k in (1, 2)])
    assert f"{tmp_path}: 2 of 3 files are right; 1 too large to be verified.\n{tmp_path / 'group_0.json'} was" in error
    report = json.loads(crossreduce("verify", tmp_path, "--json")[1])
    assert (report["right"], len(report["proved"])) == (None, 2)
