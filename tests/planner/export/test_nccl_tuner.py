"""The CSV for NCCL's tuner plug-in: read by the plug-in's rules, modelled rows, measured rows, and invalid reports."""

import json
from itertools import pairwise

import pytest

import crossreduce as cr
from crossreduce.export.formats.nccl_model import ALGORITHMS, PROTOCOLS, Model
from crossreduce.export.formats.nccl_tuner import LARGEST, read_runs, to_nccl_tuner_csv
from crossreduce.planning import COLLECTIVES
from crossreduce.topology.machines import machine_names

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


def call(rows, collective, nbytes, hosts, ranks, offered=None):
    """Return the algorithm, the protocol and the channels that the plug-in sets for a call.

    A row for another communicator does not match. If NCCL does not offer a choice, the next row counts. The number of
    channels is 1 without a row, and with -1. ``offered`` returns whether NCCL offers an algorithm with a protocol.
    """
    for name, least, most, algorithm, protocol, channels, nodes, size, *_ in rows:
        if (
            name == collective and least <= nbytes <= most and nodes in (-1, hosts) and size in (-1, ranks)
        ) and (offered is None or offered(algorithm, protocol)):  # fmt: skip
            return algorithm, protocol, 1 if channels == -1 else channels
    return None, None, 1


def choice(rows, collective, nbytes):
    """Return the algorithm and protocol of the first row that matches, as the plug-in does."""
    return next((row[3], row[4]) for row in rows if row[0] == collective and row[1] <= nbytes <= row[2])


def report(topology, times, collective="all_reduce", env=("NCCL_ALGO=Ring", "NCCL_PROTO=Simple"), devices=None):
    """Return a report of nccl-tests with some microseconds by bytes."""
    named = [name.rpartition("/") for name in topology.devices[:devices]]
    places = [
        {"rank": k, "pid": k, "hostname": host or "a", "device": int(device[5:])}
        for k, (host, _, device) in enumerate(named)
    ]
    results = [{"size": n, "root": "-1", "out_of_place": {"time": t, "nwrong": 0}} for n, t in times.items()]
    config = {"nthreads": 1, "ngpus": 1, "devices": places}
    content = {"args": [f"{collective}_perf"], "env": ["HOME=/", *env], "config": config, "results": results}
    return json.dumps(content).encode()


ALONE = {"epyc-numa-4", "epyc-numa-8", "nvlink-pairs-4", "pcie-8", "tpu-v4", "gb200-nvl72"}  # not with a network


@pytest.mark.parametrize(
    ("machine", "hosts"),
    [(name, hosts) for name, _ in machine_names() for hosts in (1, 2, 4) if hosts == 1 or name not in ALONE],
)
def test_the_plugin_finds_a_row_for_every_call(machine, hosts):
    """Rows of a collective cover all sizes of a size_t without gaps, and have a number of channels, which grows with
    the size. Where NCCL offers neither LL128 nor an algorithm in switches, rings and trees follow for the same size."""
    topology = cr.Topology.machine(machine, hosts)
    rows = plugin_rows(to_nccl_tuner_csv(topology))
    assert {row[0] for row in rows} == {name.replace("_", "") for name in COLLECTIVES}
    for row in rows:
        assert row[3] in ALGORITHMS
        assert row[4] in PROTOCOLS
        assert 1 <= row[5] <= 64
        assert row[6:] == [hosts, len(topology.devices), -1, -1]
    for name in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == name]
        first = mine[: [row[2] for row in mine].index(LARGEST) + 1]
        assert (first[0][1], first[-1][2]) == (0, LARGEST)
        assert all(before[2] + 1 == after[1] for before, after in pairwise(first))
        edges = [size for row in mine for size in row[1:3]]
        for offered in (None, lambda algorithm, protocol: algorithm in ("ring", "tree") and protocol != "ll128"):
            for size in edges:
                algorithm, protocol, channels = call(rows, name, size, hosts, len(topology.devices), offered)
                assert algorithm is not None
                assert offered is None or offered(algorithm, protocol)
                assert channels == 64 or size < 64 * 32768 * len(topology.devices)


def test_channels_are_at_least_those_of_nccl():
    """NCCL gives a channel at least 8 bytes (64 with Simple) for each of its threads. A row has at least as many
    channels as that rule. One channel for large messages, which the plug-in makes of -1, is up to 15 times as slow."""
    model = Model(HGX)
    for algorithm, protocol, least in (
        ("ring", "ll", 8 * 512 * 8), ("tree", "ll", 8 * 512), ("ring", "ll128", 8 * 640), ("ring", "simple", 64 * 512)
    ):  # fmt: skip
        for nbytes in (1, least, least + 1, 3 * least, 64 * least, 1 << 40):
            ours, theirs = model.channels(algorithm, protocol, nbytes), min(64, max(1, nbytes // least))
            assert theirs <= ours <= max(1, 2 * theirs)
    for name, nbytes in (("allreduce", 1 << 30), ("allgather", 1 << 26), ("broadcast", 1 << 26)):
        assert call(plugin_rows(to_nccl_tuner_csv(HGX)), name, nbytes, 1, 8)[2] == 64


# What NCCL 2.29.7 prints for two hosts of one GPU over sockets, in us and GB/s: eunomia-bpf/nccl-eBPF,
# docs/tmp/default-suboptimal-search.md. LL128 and NVLS are not offered there.
PRINTED = {
    ("all_reduce", "tree", "ll"): (16.8, 0.5), ("all_reduce", "tree", "simple"): (36.4, 1.9),
    ("all_reduce", "ring", "ll"): (16.6, 1.2), ("all_reduce", "ring", "simple"): (36.4, 2.4),
    ("all_gather", "ring", "ll"): (11.6, 2.4), ("all_gather", "ring", "simple"): (22.4, 4.8),
    ("reduce_scatter", "ring", "ll"): (11.6, 2.4), ("reduce_scatter", "ring", "simple"): (22.4, 4.8),
    ("all_gather", "pat", "simple"): (17.6, 3.6), ("reduce_scatter", "pat", "simple"): (17.6, 3.6),
    ("broadcast", "ring", "ll"): (9.3, 1.2), ("broadcast", "ring", "simple"): (22.4, 2.4),
    ("reduce", "ring", "ll"): (9.3, 1.2), ("reduce", "ring", "simple"): (22.4, 2.4),
}  # fmt: skip
SOCKETS = cr.Topology(
    ["host0/cuda:0", "host1/cuda:0"],
    [("host0/cuda:0", "host1/cuda:0", 2.4), ("host1/cuda:0", "host0/cuda:0", 2.4)],
)


def test_the_model_is_that_of_nccl():
    """The model has the latencies and bandwidths that NCCL prints, for each algorithm and protocol that it offers."""
    model = Model(SOCKETS)
    found = {(name, *each) for name in COLLECTIVES for each in model.choices(name)}
    assert found == set(PRINTED)
    for key, (micros, rate) in PRINTED.items():
        latency, transfer = model.parts(*key, 1000)  # at this size, NCCL's corrections of trees are 1 for LL
        assert latency == pytest.approx(micros * 1e-6, abs=0.05e-6), key
        if key[1] != "tree":
            assert 1e-6 / transfer == pytest.approx(rate, abs=0.05), key
    assert 1e-9 * (1 << 40) / model.parts("all_reduce", "tree", "simple", 1 << 40)[1] == pytest.approx(1.9, abs=0.05)
    assert 1e-9 * (1 << 40) / model.parts("all_reduce", "tree", "ll", 1 << 40)[1] == pytest.approx(0.5, abs=0.05)


# Published us of all-reduces by bytes, out of place, with NCCL_ALGO and NCCL_PROTO forced. Two hosts of one GPU over
# sockets: eunomia-bpf/nccl-eBPF, docs/tmp/p2-default-vs-optimal-sweep.md (64 B to 128 MB). Four hosts of one GPU:
# luxingcom/aicad-nccl-optimization, docs/reports/nccl-proto-threshold-scan-2026-08-16.md (only rings). 8 B300:
# eunomia-bpf/nccl-eBPF, docs/tmp/protocol-sweep-results.md; GB/s instead of us; only the protocol was forced, and
# without force NCCL chose NVLS.
FORCED_SOCKETS = {
    64: (4361, 4356, 4254, 4365), 512: (4360, 4359, 4253, 4365), 4096: (4357, 4360, 4365, 4365),
    32768: (4364, 4371, 4253, 4371), 65536: (4366, 4372, 4366, 4369), 131072: (4370, 4373, 4372, 4371),
    262144: (4370, 4377, 4370, 4371), 524288: (4368, 8748, 4371, 4502), 1 << 20: (4374, 17487, 4379, 4391),
    1 << 22: (4390, 69917, 4388, 9680), 1 << 24: (7524, 279640, 7782, 30823),
    1 << 26: (28095, 1118663, 29670, 120297), 1 << 27: (54234, 2237440, 59025, 256608),
}  # fmt: skip
FORCED_RING = {
    4096: (62.7, 44.6), 8192: (67.3, 48.6), 16384: (82.1, 54.3), 24576: (104.2, 89.8), 32768: (123.4, 112.4),
    40960: (145.5, 139.3), 49152: (172.8, 174.0), 57344: (196.3, 228.8), 65536: (241, 321), 134144: (240, 1315),
    376832: (173, 3414), 524288: (198, 4585), 1 << 20: (315, 6919),
}  # fmt: skip
FORCED_B300 = {
    1 << 22: (133.5, 57.63), 1 << 23: (196.46, 112.46), 1 << 24: (283.61, 141.7), 1 << 25: (353.34, 189.4),
    1 << 26: (425.45, 120.2), 1 << 27: (595.71, 405.77), 1 << 28: (657.0, 137.8), 1 << 29: (704.46, 102.26),
    1 << 30: (732.02, 126.37), 1 << 31: (821.44, 99.15), 1 << 32: (831.85, 116.26), 1 << 33: (836.53, 154.99),
}  # fmt: skip


def published(table, names):
    return {size: dict(zip(names, values, strict=True)) for size, values in table.items()}


def near_the_best(topology, table, *, better=min, times=None):
    """Return the part of the sizes at which the chosen row is at most 5 % slower than the best published one."""
    rows = plugin_rows(to_nccl_tuner_csv(topology, times))
    good = 0
    for size, values in table.items():
        best, ours = better(values.values()), values.get(choice(rows, "allreduce", size))
        good += ours is not None and max(ours / best, best / ours) <= 1.05
    return good / len(table)


def test_choices_are_near_the_best_published_ones():
    """Of published tables with forced choices, the model is within 5 % of the best in 90 % of the sizes for 2 hosts of
    one GPU and for 8 B300, and the fitted rows for all three machines."""
    pairs = [("ring", "simple"), ("ring", "ll"), ("tree", "simple"), ("tree", "ll")]
    sockets, ring = published(FORCED_SOCKETS, pairs), published(FORCED_RING, pairs[:2])
    switch = published(FORCED_B300, [("nvls", "simple"), ("ring", "simple")])
    names = [f"host{k}/cuda:0" for k in range(4)]
    four = cr.Topology(names, [(names[k], names[(k + way) % 4], 12.5) for k in range(4) for way in (1, -1)])
    assert near_the_best(SOCKETS, sockets) >= 0.9
    assert near_the_best(cr.Topology.machine("hgx-b200"), switch, better=max) == 1
    for topology, table in ((SOCKETS, sockets), (four, ring)):
        times = {
            ("all_reduce", *pair): {size: values[pair] * 1e-6 for size, values in table.items()}
            for pair in next(iter(table.values()))
        }
        assert near_the_best(topology, table, times=times) == 1


def test_the_model_chooses_as_nccl_does_in_known_cases():
    """LL is for small messages, Simple for large ones. Two DGX A100 are faster with trees, which send half as much over
    the network (NVIDIA/nccl, issues 812 and 946). NVSwitches of H100 add; without NVLink, NCCL has no LL128."""
    rows = plugin_rows(to_nccl_tuner_csv(cr.Topology.machine("dgx-a100", 2)))
    assert choice(rows, "allreduce", 1024) == ("tree", "ll")
    assert choice(rows, "allreduce", 1 << 30) == ("tree", "simple")
    assert choice(rows, "allgather", 1 << 30) == ("ring", "simple")
    assert choice(plugin_rows(to_nccl_tuner_csv(HGX)), "allreduce", 1 << 30) == ("nvls", "simple")
    assert choice(plugin_rows(to_nccl_tuner_csv(HGX.subset([0, 1]))), "allreduce", 1 << 30) == ("ring", "simple")
    two = plugin_rows(to_nccl_tuner_csv(cr.Topology.machine("hgx-h100", 2)))
    assert choice(two, "allreduce", 1 << 30) == ("nvls_tree", "simple")
    assert call(two, "allreduce", 1 << 30, 2, 16, lambda name, _: name in ("ring", "tree"))[:2] == ("ring", "simple")
    pcie = plugin_rows(to_nccl_tuner_csv(cr.Topology.machine("pcie-8")))
    assert {row[4] for row in pcie} == {"ll", "simple"}


def test_only_nvlinks_count_as_nvlinks(tmp_path):
    """Links to PCIe switches, CPUs and network cards neither change the generation of a GPU, nor give it NVLS or LL128.
    NVLinks that join only pairs of GPUs do not, either."""
    for name, hosts, nics, rate in (("dgx-1v", 2, None, 150), ("dgx-a100", 2, "efa", 300), ("hgx-h100", 1, None, 450)):
        assert Model(cr.Topology.machine(name, hosts, nics=nics)).gpu_gb_per_s == rate
    rows = ["X NV12 PIX PIX", "NV12 X PIX PIX", "PIX PIX X NV12", "PIX PIX NV12 X"]
    pairs = "GPU0 GPU1 GPU2 GPU3\n" + "".join(f"GPU{k} {row}\n" for k, row in enumerate(rows))
    for text, known in ((pairs, {"gpu": "a100"}), (pairs.replace("NV12", "PIX"), {"pcie": 6})):
        (tmp_path / "host.txt").write_text(text)
        model = Model(cr.Topology.load(tmp_path / "host.txt", **known))
        assert model.choices("all_reduce") == [("ring", "ll"), ("ring", "simple"), ("tree", "ll"), ("tree", "simple")]
        assert model.generation == ("gpu" in known)  # A100: the most that LL reaches depends on the kind of GPU


def test_the_times_of_the_model():
    """A ring all-reduce of 8 GPUs has 14 steps, and sends 14/8 of the buffer at the rings' rate. NVLS reaches 85 % of
    NVLink on H100, on 15 of 16 channels, in two directions at once."""
    latency, transfer = Model(HGX).parts("all_reduce", "ring", "simple", 1 << 30)
    assert latency == pytest.approx((8.4 + 14 * 3.4) * 1e-6)
    assert transfer == pytest.approx((1 << 30) * 14 / 8 / 450e9)
    latency, transfer = Model(HGX).parts("all_reduce", "nvls", "simple", 1 << 30)
    assert latency == pytest.approx(25e-6)
    assert transfer == pytest.approx((1 << 30) * 14 / 8 / (450e9 * 0.85 * 15 / 16 * 2))
    assert Model(HGX.subset([0])).parts("all_reduce", "ring", "ll", 1024) == (0, 0)
    for protocol, micros in (("ll", 6.6 + 8 * 0.6), ("simple", 8.4 + 8 * 4.0)):  # rings of several orders
        latency, _ = Model(cr.Topology.machine("dgx-1v")).parts("broadcast", "ring", protocol, 1024)
        assert latency == pytest.approx(micros * 1e-6)


def test_the_tree_of_nvls_on_blackwell():
    """With x86 CPUs, the tree of NVLS on Blackwell reaches the part of its rate that a tree with Simple reaches: half
    at 1 MiB, 0.9 at 512 MiB, all from 1 GiB on. Hosts of up to four GPUs and racks have Arm CPUs. With H100, there is
    no part."""
    b200, gb200, h100 = (cr.Topology.machine(name, 2) for name in ("hgx-b200", "gb200-nvl72", "hgx-h100"))
    few = b200.subset([*range(4), *range(8, 12)])
    for topology, parts in ((b200, (0.5, 0.9, 1)), (few, (1, 1, 1)), (gb200, (1, 1, 1)), (h100, (1, 1, 1))):
        model, whole = Model(topology), 1 << 40
        rates = [n / model.parts("all_reduce", "nvls_tree", "simple", n)[1] for n in (1 << 20, 1 << 29, 1 << 30, whole)]
        assert [rate / rates[-1] for rate in rates[:-1]] == pytest.approx(parts)


def test_assumed_speeds_are_in_the_file(tmp_path):
    """A comment states each assumption of the topology, and a line how many rows are measured and modelled. The plug-in
    reads 255 bytes of a line, and the rest as another row, so long texts and those of several lines are cut."""
    matrix = "GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X\n"
    (tmp_path / "host.txt").write_text(matrix)
    topology = cr.Topology.load(tmp_path / "host.txt")
    lines = to_nccl_tuner_csv(topology).splitlines()
    (assumed,) = [line for line in lines if line.startswith("# assumed: ")]
    assert assumed.startswith("# assumed: 18 NVLinks of 25 GB/s each")
    rows = plugin_rows("\n".join(lines))
    assert f"# Rows: 0 measured, {len(rows)} modelled, with the assumed speeds." in lines
    assert not any("assumed" in line for line in to_nccl_tuner_csv(HGX).splitlines())
    content = json.loads(topology.to_json())
    content["assumed"] = ["\u00e4" * 300, "one\nallreduce,0,9,tree,ll,1,1,2,-1,-1"]
    (tmp_path / "host.json").write_text(json.dumps(content))
    text = to_nccl_tuner_csv(cr.Topology.load(tmp_path / "host.json"))
    assert plugin_rows(text) == rows
    assert max(len(line.encode()) for line in text.splitlines()) < 255


def test_measured_times_decide_and_rows_say_so():
    """Of measured algorithms, the fastest is chosen, also NVLS. Each row is marked. Where NCCL does not offer NVLS, the
    measured ring follows. CollNet gets as many channels as the host has network links, since NCCL does not limit it."""
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
    assert call(rows, "allreduce", 1 << 26, 1, 8, lambda algorithm, _: algorithm == "ring")[0] == "ring"
    two = cr.Topology.machine("hgx-h100", 2)
    runs = [
        (name, report(two, {1024: micros}, env=(f"NCCL_ALGO={name}", "NCCL_PROTO=Simple")))
        for name, micros in (("CollnetDirect", 10), ("Ring", 20))
    ]
    rows = plugin_rows(to_nccl_tuner_csv(two, read_runs(runs, two)))
    assert call(rows, "allreduce", 1 << 30, 2, 16) == ("collnet_direct", "simple", 8)


def test_the_model_is_fitted_to_one_measured_algorithm():
    """If rings take twice the modelled latencies and half the bandwidth, the other protocols are modelled alike."""
    model = Model(HGX)
    times = {1 << k: sum(model.parts("all_gather", "ring", "ll", 1 << k)) * 2e6 for k in range(8, 28, 4)}
    run = report(HGX, times, "all_gather", ("NCCL_ALGO=Ring", "NCCL_PROTO=LL"))
    fitted = to_nccl_tuner_csv(HGX, read_runs([("a", run)], HGX)).splitlines()
    plain = to_nccl_tuner_csv(HGX).splitlines()
    row = "allgather,25165825,18446744073709551615,ring,simple,64,1,8,-1,-1"
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
    about = json.loads(printed(*line, "--json"))
    assert (about["measured_rows"], about["assumed"]) == (0, [])
    table = tmp_path / "host.txt"
    table.write_text("GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X\n")
    said = printed("export", table, tmp_path / "two.csv", "--format", "nccl-tuner")
    assert "  assumed   18 NVLinks of 25 GB/s each" in said
    assert plugin_rows(target.read_text())
    for wrong, message in (
        (("--format", "msccl", "--measured", run), "--measured is only for --format nccl-tuner"),
        (("--format", "nccl-tuner", "--measured", tmp_path / "none"), "cannot be read"),
        (("--format", "nccl-tuner", "--rank", 0), "--rank requires a format"),
    ):
        code, _, error = crossreduce("export", "hgx-h100", target, *wrong)
        assert code != 0
        assert message in error
