"""Reading traces: malformed and truncated files, and the clocks of several hosts."""

import os
import stat
import struct
import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from trace_events import read_events
from traced_ranks import CALLS, copied, only_group

from crossreduce import Topology
from crossreduce.observe.traces import calls as trace_calls
from crossreduce.observe.traces import clocks, recording
from crossreduce.observe.traces.calls import CallPart, read_directory
from crossreduce.observe.traces.clocks import ClockShift, align
from crossreduce.observe.traces.format import RECORD, Facts, Phase, needed_nbytes, read_trace
from crossreduce.observe.traces.summary import summarize


def rows_of(path):
    """Return the records of a file, and the notes about it."""
    content = read_trace(path)
    return [row for part in content.records for row in RECORD.iter_unpack(part)], content.notes


def test_a_truncated_file_is_read_to_its_end(of_two, tmp_path, trace):
    """The records before the cut of a truncated file are read, and a note says how many are missing."""
    first, second = copied(of_two, tmp_path / "cut")
    whole, _ = rows_of(first)
    first.write_bytes(first.read_bytes()[: -RECORD.size * 10 - 5])  # within the eleventh last record
    assert rows_of(first) == (whole[:-11], (f"it is truncated: 11 of {len(whole)} records are missing",))
    second.write_bytes(second.read_bytes()[:4100])  # within the texts
    code, _, err = trace(tmp_path / "cut", "-o", tmp_path / "o.json")
    assert code == 0
    assert "truncated before its first record" in err
    assert "has no file of rank 1." in err
    read_events((tmp_path / "o.json").read_text())


def test_malformed_files_are_notes(of_two, tmp_path):
    """A file with random bytes in its header or records is read, or left out with a note. No error is raised."""
    draw = np.random.default_rng(0)
    _, second = copied(of_two, tmp_path / "bad")
    data = second.read_bytes()
    for _ in range(200):  # half of the positions are in the header
        bad = bytearray(data)
        at = int(draw.integers(8, 400)) if draw.integers(2) else int(draw.integers(8, len(bad)))
        bad[at : at + 8] = draw.bytes(8)
        second.write_bytes(bad)
        found = read_directory(tmp_path / "bad")
        assert sum(len(group.ranks) for run in found.runs for group in run) in (1, 2)


def test_corrupt_sizes_need_no_memory(of_two, tmp_path):
    """Headers with too many records, and arrays of impossible size, cause notes or errors, and need little memory."""
    first, second = copied(of_two, tmp_path / "bad")
    data, whole = bytearray(second.read_bytes()), len(rows_of(second)[0])
    for capacity, count in ((1 << 28, 1 << 28), (1 << 36, 1 << 62)):
        struct.pack_into("=2Q", data, 40, capacity, count)
        second.write_bytes(data)
        tracemalloc.start()
        found, notes = rows_of(second)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(found) in (whole, whole - 1)
        assert "is truncated" in notes[0]
        assert peak < 4 << 20
    for capacity, count in ((0, 5), (1 << 60, 5)):
        struct.pack_into("=2Q", data, 40, capacity, count)
        second.write_bytes(data)
        with pytest.raises(ValueError, match="header is malformed"):
            read_trace(second)
    struct.pack_into("=4Q", data, 16, 1000, 1 << 25, 1 << 24, 5)  # 16 MiB of texts
    second.write_bytes(data + bytes(1 << 25))
    with pytest.raises(ValueError, match="header is malformed"):
        read_trace(second)
    os.truncate(first, 0)
    os.truncate(first, 40 << 30)  # 40 GiB of zeros
    with pytest.raises(ValueError, match="not a trace"):
        read_trace(first)
    for digits in (1, 18, 19, 4000, 5000):
        nbytes = trace_calls.array_nbytes(f"all_reduce sum float32[{'9' * digits}]", 2)
        assert nbytes == (36 if digits == 1 else None)


def replace_facts(data, **fields):
    """Replace fields of the JSON in the header of a file's ``data``."""
    (length,) = struct.unpack_from("=Q", data, 8)
    facts = Facts.decode(bytes(data[112 : 112 + length]))._replace(**fields).encode()
    assert len(facts) <= struct.unpack_from("=Q", data, 16)[0] - 112
    struct.pack_into("=Q", data, 8, len(facts))
    data[112 : 112 + len(facts)] = facts


def test_the_newest_records_of_a_large_file_are_read(of_two, tmp_path):
    """Of a file that is too large, only the newest records are read, also if they are before older ones in the file. A
    note says how many are left out."""
    path, _ = copied(of_two, tmp_path / "large")
    data = bytearray(path.read_bytes())
    json_nbytes, _, _, texts_nbytes, _, count = struct.unpack_from("=6Q", data, 8)
    for replaced in (0, 7):
        struct.pack_into("=2Q", data, 40, count, count + replaced)
        path.write_bytes(data)
        whole, _ = rows_of(path)
        for room in (0, 1, 5, 9, len(whole) - 1, len(whole)):
            content = read_trace(path, json_nbytes + texts_nbytes + room * RECORD.size)
            rows = [row for part in content.records for row in RECORD.iter_unpack(part)]
            assert rows == whole[len(whole) - room :]
            note = f"the oldest {len(whole) - room} of {len(whole)} records are left out: 128 MiB of a directory"
            assert any(note in each for each in content.notes) == (room < len(whole))
        with pytest.raises(ValueError, match="its texts are too large: 128 MiB of a directory are read"):
            read_trace(path, json_nbytes + texts_nbytes - 1)


def test_huge_files_take_no_more_than_their_share(of_two, tmp_path, monkeypatch):
    """Almost empty files of a TiB are read in part, with notes. Other files of the directory are read completely."""
    first, second = copied(of_two, tmp_path / "huge")
    data, count = bytearray(second.read_bytes()), 1 << 35
    struct.pack_into("=2Q", data, 40, count, count)
    second.write_bytes(data)
    links = Topology.full_mesh(["host0/cpu:0", "host1/cpu:0"], gb_per_s=2)
    small, large = (first.with_name(f"topology.{first.name.split('.')[1]}.{k}.json") for k in (3, 4))
    small.write_text(links.to_json())
    large.write_text("{}")
    for path in (second, large):
        os.truncate(path, 1 << 40)
    monkeypatch.setattr(trace_calls, "MOST_READ", 3 * needed_nbytes(first))
    group, notes = only_group(tmp_path / "huge")
    assert [call.text for call in group.ranks[0].calls] == CALLS
    assert group.topologies == ((3, links),)
    assert not any(note.startswith((first.name, small.name)) for note in notes)
    present = ((1 << 40) - struct.unpack_from("=Q", data, 24)[0]) // RECORD.size
    assert any(f" of {present} records are left out: 128 MiB" in note for note in notes)
    assert notes[-1].startswith(f"{large.name} cannot be read: ")


def test_links_and_fifos_have_the_names_of_traces(of_two, tmp_path, caplog):
    """The links between hosts replace a link or FIFO of their name, which others can guess. They are neither written
    through it, nor wait for a reader. If that fails, a warning says so. Traces are not read through links."""
    first, _ = copied(of_two, tmp_path / "shared")
    links = Topology.full_mesh(["host0/cpu:0", "host1/cpu:0"], gb_per_s=2)
    of_host = SimpleNamespace(host=(0,), number=3)
    group = SimpleNamespace(traced=first, token="ab", host_topology=links, rank=0, memory=of_host)
    outside, path = tmp_path / "outside", first.with_name("topology.ab.3.json")
    for put in (lambda: path.symlink_to(outside), lambda: os.mkfifo(path), lambda: path.write_text("{")):
        put()
        write = threading.Thread(target=recording.write_topology, args=(group,), daemon=True)
        write.start()
        write.join(30)
        assert (write.is_alive(), path.is_file(), outside.exists()) == (False, True, False)
        assert Topology.from_json(path.read_text()) == links
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
    path.mkdir()
    recording.write_topology(group)
    assert f"{path} cannot be written: Is a directory" in caplog.text
    assert len([*first.parent.iterdir()]) == 3
    first.rename(outside)
    first.symlink_to(outside)
    assert any(note == f"{first.name} cannot be read: it is a symbolic link." for note in only_group(first.parent)[1])


def test_processes_of_containers_are_apart(of_two, tmp_path):
    """Two runs stay apart if their processes have equal pids, as in containers."""
    for path in copied(of_two, tmp_path / "both"):
        data, token = bytearray(path.read_bytes()), path.name.split(".")[1]
        replace_facts(data, token="ab", process="1f")
        path.with_name(path.name.replace(token, "ab")).write_bytes(data)
    assert [len(run) for run in read_directory(tmp_path / "both").runs] == [1, 1]


def shifted(folder, target, clock, add_ns, ranks_):
    """Copy a trace. In the files of ``ranks_``, name another clock, and add nanoseconds to all times."""
    for path in copied(folder, target):
        if path.suffix == ".trace" and int(path.name[4 : path.name.index(".")]) in ranks_:
            data = bytearray(path.read_bytes())
            _, _, records_at, _, _, count, _, *clocks = struct.unpack_from("=6Qq6q", data, 8)
            replace_facts(data, clock=clock)
            clocks[0] += add_ns
            clocks[3] += add_ns
            struct.pack_into("=6q", data, 64, *clocks)
            for k in range(count):
                at = records_at + 32 * k + 8
                begin, end = struct.unpack_from("=2q", data, at)
                struct.pack_into("=2q", data, at, begin + add_ns, end + add_ns if end else 0)
            path.write_bytes(data)
    return target


def test_clocks_of_hosts_are_aligned(of_hosts, tmp_path, trace, monkeypatch):
    """If the second host has another clock, the difference is computed from the calls within the stated error, also if
    not every two hosts are compared."""
    monkeypatch.setattr(clocks, "_MOST_COMPARED", 1)
    add = 123_456_789_012
    group, _ = only_group(shifted(of_hosts, tmp_path / "shifted", "another", add, (3, 4)))
    shifts = align([group])
    assert abs(shifts["another"].add_ns + add) <= shifts["another"].error_ns < 50_000_000
    original, _ = only_group(of_hosts)
    assert align([original]) == {original.ranks[0].facts.clock: ClockShift(0, 0)}
    code, _, err = trace(tmp_path / "shifted", "-o", tmp_path / "out.json")
    assert code == 0
    assert "was aligned with an error of at most" in err
    read_events((tmp_path / "out.json").read_text())


def test_the_tightest_limits_count(of_hosts):
    """The call in which one host was late gives an upper limit of the clocks' difference, and the call in which the
    other host was late gives a lower limit. The middle of the tightest limits is used."""
    group, _ = only_group(of_hosts)
    ranks = {}
    # The clock of rank 3 is 1000 ns behind. Messages take 10 ns. Rank 3 is late in call 1, and rank 0 in call 2.
    for rank, clock, spans in ((0, "one", [(0, 510), (2000, 2015)]), (3, "two", [(-500, -485), (600, 1010)])):
        found = group.ranks[rank]
        calls = tuple(
            found.calls[0]._replace(number=number, parts=(CallPart(Phase.AGREE, *span, 1, None),))
            for number, span in enumerate(spans, 1)
        )
        ranks[rank] = found._replace(facts=found.facts._replace(clock=clock), calls=calls)
    shifts = align([group._replace(ranks=ranks)])
    assert shifts == {"one": ClockShift(0, 0), "two": ClockShift(1000, 10)}


def test_without_common_calls_the_calendar_is_used(of_hosts, tmp_path):
    """If no call can be compared, the calendar clocks align the hosts, with an unknown error."""
    group, _ = only_group(shifted(of_hosts, tmp_path / "shifted", "another", -(10**9), (3, 4)))
    alone = {rank: of._replace(calls=of.calls[: 1 if rank > 2 else 0]) for rank, of in group.ranks.items()}
    shift = align([group._replace(ranks=alone)])["another"]
    assert shift.error_ns is None
    assert abs(shift.add_ns - 10**9) < 5_000_000  # the files were begun within milliseconds on one machine


def test_phases_between_hosts(of_hosts):
    """Leaders compare each call with the other hosts and exchange data. Other ranks only wait for ranks of their host.
    In a small call there is one leader, and the messages that compare the calls have the data.
    If a rank waits for a leader that waits for another host, the wait counts for a rank of the other host."""
    group, _ = only_group(of_hosts)
    assert group.hosts == ((0, 1, 2), (3, 4))
    for rank, found in group.ranks.items():
        assert len(found.calls) == 10
        own = {0, 1, 2} if rank < 3 else {3, 4}
        for call in found.calls:
            kinds, is_leader = [part.phase for part in call.parts], rank != 2
            is_first = rank in (0, 3)
            compares = call.text.startswith("links between hosts planned as ")  # plan_on, which moves no data
            assert compares == (call.number == 9)
            assert kinds.count(Phase.AGREE) <= is_leader
            assert kinds.count(Phase.AGREE) == 1 or not (is_first or compares) or rank == 2
            assert (Phase.BETWEEN_HOSTS in kinds) <= (Phase.AGREE in kinds and not compares)
            assert {part.waited_for for part in call.parts if part.phase is Phase.WAIT} <= own - {rank}
            ends = [call.begin_ns, *(part.end_ns for part in call.parts)]
            assert [part.begin_ns for part in call.parts] == ends[:-1]
    rows = summarize([group], align([group]))
    assert {rank for row in rows for rank, _ in row.waited_for} >= {0, 3}
    assert all(sum(share for _, share in row.waited_for) <= 1 + 1e-9 for row in rows)
