"""``crossreduce compare``: two machines, two plans or two measured results side by side."""

import json

import pytest
from nccl_reports import report

import crossreduce as cr
from crossreduce.planning.explain import duration

TOPO_M = """\
\tGPU0\tGPU1\tCPU Affinity
GPU0\t X \tNV4\t0-7
GPU1\tNV4\t X \t0-7
"""


def rows(printed, *line):
    """Return the rows of a comparison by their names, from its JSON."""
    content = json.loads(printed("compare", *line, "--json"))
    return content["kind"], {row["what"]: (row["a"], row["b"], row["ratio"]) for row in content["rows"]}


def test_two_machines(printed):
    """Machines are compared by their parts, the bounds of all collectives and the plan of one."""
    kind, found = rows(printed, "dgx-1v", "hgx-h100", "--hosts", 2, "--collective", "all-gather", "--nbytes", "1M")
    machines = [cr.Topology.machine(name, 2) for name in ("dgx-1v", "hgx-h100")]
    plans = [cr.plan(machine, "all_gather", "1M") for machine in machines]
    assert kind == "machine"
    assert found["hosts"] == (2, 2, 1)
    assert found["links"] == (
        *(len(machine.links) for machine in machines),
        len(machines[1].links) / len(machines[0].links),
    )
    rates = [float(cr.bound(machine, "reduce").algbw) for machine in machines]
    assert found["bound of reduce, GB/s"] == (*rates, rates[1] / rates[0])
    times = [made.seconds for made in plans]
    assert found["all_gather of 1 MiB"] == (*times, times[1] / times[0])
    assert found["all_gather of 1 MiB, algorithm"] == (plans[0].algorithm, plans[1].algorithm, None)
    text = printed("compare", "dgx-1v", "hgx-h100")
    assert "A: dgx-1v" in text
    assert duration(cr.plan("hgx-h100").seconds) in text


def test_a_machine_and_a_table_on_two_hosts(printed, crossreduce, tmp_path, monkeypatch):
    """--hosts and --nics are for both a machine and a table of GPUs; a machine keeps its own network cards. A file that
    states its links states its hosts, too, which a note says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.txt").write_text(TOPO_M)
    table = cr.Topology.load("box.txt", hosts=2, nics="2x200")
    (tmp_path / "box.json").write_text(table.to_json())
    machine = cr.Topology.machine("dgx-a100", 2)
    for line in (["dgx-a100", "box.txt"], ["box.txt", "dgx-a100"]):
        pair = [table if name == "box.txt" else machine for name in line]
        _, found = rows(printed, *line, "--hosts", 2, "--nics", "2x200", "--nbytes", "1M")
        assert found["hosts"] == (2, 2, 1)
        assert found["links"][:2] == tuple(len(topology.links) for topology in pair)
        assert found["bound of reduce, GB/s"][:2] == tuple(float(cr.bound(each, "reduce").algbw) for each in pair)
    code, out, error = crossreduce("compare", "dgx-a100", "box.txt", "--hosts", 2)
    assert (code, out) == (2, "")
    assert "--nics 8x400" in error
    code, out, error = crossreduce("compare", "dgx-a100", "box.json", "--hosts", 2, "--nbytes", "1M", "--json")
    assert (code, error) == (0, "crossreduce: --hosts has no effect: box.json states its hosts itself\n")
    assert json.loads(out)["rows"][1] == {"what": "hosts", "a": 2, "b": 2, "ratio": 1}


def test_two_plans(printed, tmp_path, monkeypatch):
    """Plans are compared by their JSON: algorithm, time, rate and shape."""
    monkeypatch.chdir(tmp_path)
    plans = [cr.plan("dgx-1v", nbytes="1M", algorithm=name) for name in ("ring", "one_device")]
    for made, file in zip(plans, ("a.json", "b.json"), strict=True):
        text = printed("plan", "dgx-1v", "--nbytes", "1M", "--algorithm", made.algorithm, "--json")
        (tmp_path / file).write_text(text)
    kind, found = rows(printed, "a.json", "b.json")
    assert kind == "plan"
    assert found["algorithm"] == ("ring", "one_device", None)
    assert found["predicted time"] == (plans[0].seconds, plans[1].seconds, plans[1].seconds / plans[0].seconds)
    assert found["steps"][:2] == (plans[0].schedule.steps, plans[1].schedule.steps)
    assert "one_device" in printed("compare", "a.json", "b.json")


def test_two_results(printed, crossreduce, tmp_path):
    """Reports of nccl-tests and of bench are compared size by size; a size that one lacks is a dash."""
    for file, options in (("a.json", "-e 1K"), ("b.json", "-e 2K -A ring,direct")):
        line = f"bench -b 1K {options} -f 2 -n 2 -g 2 -J"
        assert crossreduce(*line.split(), tmp_path / file)[0] == 0
    kind, found = rows(printed, tmp_path / "a.json", tmp_path / "a.json")
    assert (kind, list(found)) == ("results", ["all_reduce of 1 KiB"])
    assert found["all_reduce of 1 KiB"][2] == 1
    _, found = rows(printed, tmp_path / "a.json", tmp_path / "b.json")
    assert list(found) == ["all_reduce of 1 KiB, auto"] + [
        f"all_reduce of {size} KiB, {name}" for name in ("ring", "direct") for size in (1, 2)
    ]
    assert found["all_reduce of 2 KiB, ring"][0] is None
    code, out, error = crossreduce("compare", tmp_path / "a.json", tmp_path / "b.json", "--hosts", 2)
    assert (code, error) == (0, "crossreduce: --hosts has no effect: A and B are measured results\n")
    assert "│ -" in out


WRONG = """
dgx-1v a.json: A and B must be of one kind, but A is a machine, and B is a plan.
dgx-1v none.json: none.json cannot be read: No such file or directory.
dgx-1v list.json: list.json is not JSON of a topology, of a plan with its time, or of measured results.
dgx-1v broken.json: broken.json is not JSON of a topology
dgx-1v schedule.json: schedule.json is not JSON of a topology, of a plan with its time
a.json short.json: short.json is not the JSON of a plan: it lacks 'rate'.
empty.json empty.json: empty.json: the report has no results.
results.json results.json: results.json: this is not a report of nccl-tests (-J FILE) or of crossreduce bench
dgx-1v dgx-9: dgx-9
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_what_cannot_be_compared(crossreduce, printed, tmp_path, monkeypatch, line):
    """Mixed kinds and bad files are errors that name the file, and say what to do."""
    monkeypatch.chdir(tmp_path)
    files = {
        "a.json": printed("plan", "dgx-1v", "--json"),
        "list.json": "[1, 2]",
        "broken.json": "{",
        "schedule.json": cr.plan("dgx-1v").schedule.to_json(),
        "short.json": '{"seconds": 3}',
        "results.json": '{"results": [{}]}',
        "empty.json": report("all_reduce_perf", [(0, 1.0)]).decode(),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words, problem = line.split(": ", 1)
    code, out, error = crossreduce("compare", *words.split())
    assert (code, out) == (2, "")
    assert problem in error
    assert error.startswith("crossreduce: ")
