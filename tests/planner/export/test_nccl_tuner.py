"""The CSV for NCCL's tuner plug-in: read by the plug-in's rules, modelled rows, measured rows, and invalid reports."""

import json
from itertools import pairwise

import pytest

import crossreduce as cr
from crossreduce.export.formats.nccl_tuner import ALGORITHMS, LARGEST, PROTOCOLS, Model, read_runs, to_nccl_tuner_csv
from crossreduce.planning import COLLECTIVES

HGX = cr.Topology.machine("hgx-h100")


def plugin_rows(text):
    """Return the rows that the plug-in loads: fields at commas, without lines that begin with # or are empty.

    Source: NVIDIA/nccl, plugins/tuner/example/plugin.c. It reads lines of at most 255 characters and 8 to 10 fields.
    """
    rows = []
    for line in text.split("\n"):
        assert len(line) < 255
        if line and not line.startswith("#"):
            fields = [field.strip(" \t") for field in line.split(",")]
            assert 8 <= len(fields) <= 10
            rows.append([fields[0], int(fields[1]), int(fields[2]), *fields[3:5], *map(int, fields[5:])])
    return rows


def choice(rows, collective, nbytes):
    """Return the algorithm and protocol of the first row that matches, as the plug-in does."""
    return next((row[3], row[4]) for row in rows if row[0] == collective and row[1] <= nbytes <= row[2])


def report(topology, times, collective="all_reduce", env=("NCCL_ALGO=Ring", "NCCL_PROTO=Simple"), devices=None):
    """Return a report of nccl-tests with some microseconds by bytes."""
    places = [{"rank": k, "pid": k, "hostname": "a", "device": k} for k in range(devices or len(topology.devices))]
    results = [{"size": n, "root": "-1", "out_of_place": {"time": t, "nwrong": 0}} for n, t in times.items()]
    config = {"nthreads": 1, "ngpus": 1, "devices": places}
    content = {"args": [f"{collective}_perf"], "env": ["HOME=/", *env], "config": config, "results": results}
    return json.dumps(content).encode()


@pytest.mark.parametrize(("machine", "hosts"), [("hgx-h100", 1), ("dgx-a100", 2), ("pcie-8", 1)])
def test_all_sizes_of_all_collectives_have_one_row(machine, hosts):
    """Rows of a collective cover all sizes of a size_t without gaps, and are for this number of hosts and ranks."""
    topology = cr.Topology.machine(machine, hosts)
    rows = plugin_rows(to_nccl_tuner_csv(topology))
    assert {row[0] for row in rows} == {name.replace("_", "") for name in COLLECTIVES}
    for name in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == name]
        assert (mine[0][1], mine[-1][2]) == (0, LARGEST)
        assert all(before[2] + 1 == after[1] for before, after in pairwise(mine))
    for row in rows:
        assert row[3] in ALGORITHMS
        assert row[4] in PROTOCOLS
        assert row[5:] == [-1, hosts, len(topology.devices), -1, -1]


def test_the_model_chooses_as_nccl_does_in_known_cases():
    """LL is for small messages, Simple for large ones. Two DGX A100 are faster with trees, which send half as much over
    the network (NVIDIA/nccl, issues 812 and 946); rings are faster with NVLink alone."""
    rows = plugin_rows(to_nccl_tuner_csv(cr.Topology.machine("dgx-a100", 2)))
    assert choice(rows, "allreduce", 1024) == ("tree", "ll")
    assert choice(rows, "allreduce", 1 << 30) == ("tree", "simple")
    assert choice(rows, "allgather", 1 << 30) == ("ring", "simple")
    assert choice(plugin_rows(to_nccl_tuner_csv(HGX)), "allreduce", 1 << 30) == ("ring", "simple")


def test_the_times_of_the_model():
    """A ring all-reduce of 8 GPUs has 14 steps, and sends 14/8 of the buffer at the rings' rate."""
    latency, transfer = Model(HGX).parts("all_reduce", "ring", "simple", 1 << 30)
    assert latency == pytest.approx((8.4 + 14 * 3.4) * 1e-6)
    assert transfer == pytest.approx((1 << 30) * 14 / 8 / 450e9)
    assert Model(HGX.subset([0])).parts("all_reduce", "ring", "ll", 1024) == (0, 0)


def test_measured_times_decide_and_rows_say_so():
    """Of measured algorithms, the fastest is chosen, also NVLS, which the model does not have. Each row is marked."""
    ring = report(HGX, {1024: 30, 1 << 20: 60, 1 << 26: 400})
    nvls = report(HGX, {1024: 40, 1 << 20: 50, 1 << 26: 300}, env=("NCCL_ALGO=allreduce:nvls", "NCCL_PROTO=SIMPLE"))
    text = to_nccl_tuner_csv(HGX, read_runs([("a", ring), ("b", nvls)], HGX))
    rows = plugin_rows(text)
    for nbytes, expected in {1: "ring", 1024: "ring", 1 << 20: "nvls", 1 << 26: "nvls", 1 << 32: "nvls"}.items():
        assert choice(rows, "allreduce", nbytes) == (expected, "simple")
    lines = text.splitlines()
    marks = {line: lines[k - 1].split(":")[0] for k, line in enumerate(lines) if not line.startswith("#")}
    measured = [line for line, mark in marks.items() if mark == "# measured"]
    assert measured
    assert all(line.startswith("allreduce,") for line in measured)
    assert {mark for line, mark in marks.items() if line.startswith("allgather")} == {"# modelled"}


def test_the_model_is_fitted_to_one_measured_algorithm():
    """If rings take twice the modelled latencies and half the bandwidth, the other protocols are modelled alike."""
    model = Model(HGX)
    times = {1 << k: sum(model.parts("all_gather", "ring", "ll", 1 << k)) * 2e6 for k in range(8, 28, 4)}
    run = report(HGX, times, "all_gather", ("NCCL_ALGO=Ring", "NCCL_PROTO=LL"))
    fitted = to_nccl_tuner_csv(HGX, read_runs([("a", run)], HGX)).splitlines()
    plain = to_nccl_tuner_csv(HGX).splitlines()
    row = "allgather,25165825,18446744073709551615,ring,simple,-1,1,8,-1,-1"
    micros = [float(lines[lines.index(row) - 1].split()[2]) for lines in (fitted, plain)]
    assert micros[0] == pytest.approx(2 * micros[1], abs=0.2)


BAD = {
    "must state in env which NCCL_ALGO": report(HGX, {8: 1}, env=()),
    "'Ring,Tree'": report(HGX, {8: 1}, env=("NCCL_ALGO=Ring,Tree", "NCCL_PROTO=LL")),
    "which NCCL_PROTO was forced": report(HGX, {8: 1}, env=("NCCL_ALGO=Ring",)),
    "must have all devices": report(HGX, {8: 1}, devices=4),
    "this is not a report of nccl-tests": b"x",
}


@pytest.mark.parametrize("message", BAD)
def test_reports_that_cannot_be_used(message):
    """A report of another machine, or one that does not state the forced choice, is an error that names the file."""
    with pytest.raises(cr.ArgumentError, match=message) as caught:
        read_runs([("run7.json", BAD[message])], HGX)
    assert "run7.json" in str(caught.value)


def test_the_command_line(printed, crossreduce, tmp_path):
    """``export --format nccl-tuner`` writes the file, and counts its rows. --measured is for this format and pages."""
    run = tmp_path / "run.json"
    run.write_bytes(report(HGX, {1024: 30, 4096: 40}))
    target = tmp_path / "tuner.csv"
    line = ("export", "hgx-h100", target, "--format", "nccl-tuner")
    assert " rows for hgx-h100, " in printed(*line, "--measured", run)
    assert json.loads(printed(*line, "--json"))["measured_rows"] == 0
    assert plugin_rows(target.read_text())
    for wrong, message in (
        (("--format", "msccl", "--measured", run), "--measured is only for --format nccl-tuner"),
        (("--format", "nccl-tuner", "--measured", tmp_path / "none"), "cannot be read"),
        (("--format", "nccl-tuner", "--rank", 0), "--rank requires a format"),
    ):
        code, _, error = crossreduce("export", "hgx-h100", target, *wrong)
        assert code != 0
        assert message in error
