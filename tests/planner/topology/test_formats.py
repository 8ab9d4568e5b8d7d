"""Files of topologies: this library's JSON, NCCL's and RCCL's XML, and the table of nvidia-smi."""

import pytest
from test_nccl_xml import SAMPLES, load, machine, read_nccl_xml, read_nvidia_smi
from test_nvidia_smi import DGX_1, GOOD

from crossreduce import ArgumentError, Topology
from crossreduce.topology.formats import LARGEST

FILES = {
    "powershell-be.txt": (b"\xfe\xff" + DGX_1.encode("utf-16-be"), machine("dgx-1v")),
    "topology.json": (Topology.torus(2, 3).to_json().encode(), Topology.torus(2, 3)),
    "topology-indented.json": (b"\n  " + Topology.star(3).to_json().encode() + b"\n", Topology.star(3)),
    "nccl.xml": (SAMPLES[0].encode(), read_nccl_xml(SAMPLES[0])),
    "with-header.xml": (b'<?xml version="1.0" encoding="UTF-8"?>\n' + SAMPLES[1].encode(), read_nccl_xml(SAMPLES[1])),
    "table.txt": (DGX_1.encode(), machine("dgx-1v")),
    "underlined": (GOOD.encode(), read_nvidia_smi(GOOD)),
    "powershell.txt": (b"\xff\xfe" + DGX_1.encode("utf-16-le"), machine("dgx-1v")),
    "with-mark.xml": (b"\xef\xbb\xbf" + SAMPLES[0].encode(), read_nccl_xml(SAMPLES[0])),
}


@pytest.mark.parametrize("name", FILES)
def test_load(name, tmp_path):
    """The content of a file, not its name, determines its format. A path may be a str or a Path."""
    data, topology = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    assert Topology.load(path) == Topology.load(str(path)) == topology


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (b" \n\t\n", ["empty"]),
        (b"\x00\x01\x02", ["this is not a topology"]),
        (bytes(range(256)), ["this is not text"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), ["this is not text"]),
        (b"\xff\xfe\x00", ["this is not text"]),
        (b"hello", ["this is not a topology", "nvidia-smi topo -m", "crossreduce.topology/1"]),
        (b"[1, 2]", ["this is not a topology"]),
        (b"{", ["not a topology in JSON"]),
        (b"{}", ["not a topology in JSON", 'its format is not "crossreduce.topology/1"']),
        (b'{"a": ' * 100_000, ["not a topology in JSON"]),
        (Topology.ring(3).to_json().encode()[:-20], ["not a topology in JSON"]),
        (SAMPLES[0].encode()[:-20], ["this is not XML", "line"]),
        (b"<html></html>", ["starts with <system"]),
        (b"<algo></algo>", ["this is a plan in MSCCL XML, not a topology", "crossreduce verify FILE"]),
        (b"GPU0 is busy", ["does not contain a table of GPUs"]),
        (b"x" * (LARGEST + 1), ["at most", "bytes"]),
    ],
)
def test_invalid_files(data, words, tmp_path):
    """An invalid file raises an ArgumentError that names the file and its fault."""
    path = tmp_path / "given.file"
    path.write_bytes(data)
    with pytest.raises(ArgumentError) as caught:
        load(path)
    for word in (*words, "given.file"):
        assert word in str(caught.value)


def test_paths_that_cannot_be_read(tmp_path):
    """An invalid path raises an ArgumentError. A missing file or a folder raises an OSError."""
    for path in (None, 3.5, b"topology.xml", ["topology.xml"], "a\0b"):
        with pytest.raises(ArgumentError, match="this is not a path"):
            load(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.xml"):
        load(tmp_path / "missing.xml")
    with pytest.raises(OSError, match="irectory"):
        load(tmp_path)
