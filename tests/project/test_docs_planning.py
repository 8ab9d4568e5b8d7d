"""docs/planning.md is correct: its code prints its output and draws its pictures, and its numbers are computed again.

The stored results of benchmarks/planning.py, which the page quotes, agree with the current code.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from paths import ROOT

import crossreduce as cr
from crossreduce.export.formats.chakra import writer
from crossreduce.export.pictures.folding import DEVICES_FROM, HOSTS_FROM
from crossreduce.planning import schedules
from crossreduce.planning.optimal.few_step.few_step_forests import MOST_DEVICES
from crossreduce.planning.optimal.symmetric.orbit_forest import FEW_DEVICES
from crossreduce.planning.optimal.trees import fitting

DOCS = ROOT / "docs"
PAGE = (DOCS / "planning.md").read_text()
CODE = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)
DATA = Path(cr.__file__).parent / "topology" / "data"
KEPT = json.loads((ROOT / "benchmarks" / "results" / "planning.json").read_text())
TE_CCL = json.loads((ROOT / "benchmarks" / "results" / "planning_hosts.json").read_text())["te_ccl"]
SCALE = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())


def texts(picture):
    """Return the contents of the text elements of an SVG picture."""
    return re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text(), re.DOTALL)


def test_the_code_of_the_page_prints_and_draws_what_the_page_shows(tmp_path):
    """Each Python block prints the text block that follows it, or nothing if none follows. The page shows the pictures
    that its code draws, and the texts of the stored pictures are up to date."""
    blocks, names, printed = CODE.findall(PAGE), {}, []
    for code, _ in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.chdir(tmp_path):
            exec(code, names)
        printed.append(out.getvalue())
    assert len(blocks) == PAGE.count("```python") > 8
    assert printed == [shown for _, shown in blocks]
    named = re.findall(r"\]\(pictures/([\w-]+\.svg)\)", PAGE)
    assert sorted(named) == sorted(file.name for file in tmp_path.glob("*.svg"))
    for name in named:
        assert texts(DOCS / "pictures" / name) == texts(tmp_path / name) != []


# For each row of the page's table of groups: the machine, its hosts, and the sizes of the mesh.
MESHES = (
    ("dgx-1v", 1, (2, 4)), ("dgx-1v", 1, (4, 2)), ("mi250", 1, (2, 8)), ("mi300x", 1, (2, 4)),
    ("hgx-h100", 2, (2, 8)), ("hgx-h100", 4, (4, 8)),
)  # fmt: skip


def table(rows):
    """Return rows of cells as text, in the notation of the page's tables."""
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in rows)


def groups_rows(meshes):
    """Yield rows of the page's table of the rates of groups."""
    for name, hosts, shape in meshes:
        topology = cr.Topology.machine(name, hosts)
        job = cr.plan_groups(topology, cr.mesh_groups(topology.devices, shape))
        assert job.ratio == 1
        without = job.separate_without_helpers
        rates = [job.rates, job.separate.rates, None if without is None else without.rates]
        cells = ["-" if found is None else f"{float(min(found)):.4g} to {float(max(found)):.4g}" for found in rates]
        yield f"{name}, {hosts} hosts" if hosts > 1 else name, " x ".join(map(str, shape)), *cells


def parts_rows():
    """Yield the rows of the table of parts (subsets of a machine's devices) and failed links, from stored results."""
    for name, found in KEPT["subsets"].items():
        broken = KEPT["failures"][name]
        cells = [name, f"{found['connected']} of {found['cases']}", found["at_bound"]]
        cells += [found["joint_beats_scatter_and_gather"], median(found, "tensorflow")]
        cells += [f"{median(found, 'rings')} ({found['without_ring']})", median(found, "one_device")]
        cells += [broken[what] for what in ("cases", "connected", "at_bound", "joint_beats_scatter_and_gather")]
        yield [*cells, median(broken, "tensorflow")]


def median(found, what):
    """Return the median of the ratios of ``what`` in a stored result, in percent, as text."""
    middle = found[what]["median"]
    return "-" if middle is None else f"{float(Fraction(middle) * 100):.0f}"


def machines_rows():
    """Yield the rows of the page's table of the machines of the library, from their files."""
    for path in sorted(DATA.glob("*.json")):
        content = json.loads(path.read_text())
        if path.name not in ("links.json", "gpus.json"):
            names = (", ".join(f"`{name}`" for name in content.get(what, {})) for what in ("aliases", "networks"))
            yield f"`{content['name']}`", content["description"], *(cell or "-" for cell in names)


def te_ccl_rows():
    """Yield the rows of the times of plans divided by those of TE-CCL, on both clocks."""
    for hosts in (2, 4):
        for clock, ratio in (("ours", "ratio"), ("TE-CCL's", "ratio_in_their_model")):
            yield f"{hosts}, {clock}", *(f"{line[ratio]:.2f}" for line in TE_CCL if line["hosts"] == hosts)


def test_the_tables_of_the_page_are_computed_again():
    """The tables of the page, and the limits that it states, are those of the library and of the stored results."""
    for rows in (parts_rows(), machines_rows(), te_ccl_rows()):
        assert table(rows) in PAGE
    for text in (
        f"for topologies of more than {FEW_DEVICES} devices",
        f"tori of up to {max(row['devices'] for row in SCALE['machines'].values()):,} devices",
        f"within {int(fitting.TOLERANCE * 100)} % of the bound. Beyond {schedules.FOREST_DEVICES} devices",
        f"a GiB per second, so multiply the GB/s of a topology by {1e9 / 2**30:.4f}",
        f"at least {writer.PACKETS} per chunk",
        f"Traces have at most {writer.MOST_NODES} nodes",
        f"forests of few steps on up to {MOST_DEVICES} devices",
        f"more than {HOSTS_FROM} devices in all",
        f"one host with more than {DEVICES_FROM} devices",
    ):
        assert text in " ".join(PAGE.split())


@pytest.mark.parametrize("meshes", [MESHES[:4], pytest.param(MESHES[4:], marks=pytest.mark.slow)])
def test_the_rates_of_groups_are_computed_again(meshes):
    """The page's table of groups has the rates of the plans of the library."""
    assert table(groups_rows(meshes)) in PAGE


def exact(value):
    """Return a result without its times, and without the shape of the trees, since several shapes are equally good."""
    if isinstance(value, dict):
        ignored = ("time", "slowest_plan", "k", "trees", "depth")
        return {what: exact(entry) for what, entry in value.items() if what not in ignored}
    return [exact(v) for v in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_stored_results_are_current(tmp_path):
    """A quick run of benchmarks/planning.py agrees with its reference values and with the stored full run."""
    path = tmp_path / "planning.json"
    command = [sys.executable, ROOT / "benchmarks" / "planning.py", "--quick", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    quick = json.loads(path.read_text())
    assert all(line["equal"] is True for line in (*quick["reference"], *KEPT["reference"]))
    for table in ("reference", "machines", "meshes", "hosts"):
        for line in quick[table]:
            assert exact(line) in exact(KEPT[table]), line
    assert exact(quick["failures"]["dgx-1v"]) == exact(KEPT["failures"]["dgx-1v"])


@pytest.mark.parametrize(("form", "page"), [("msccl", "msccl-files.md"), ("mscclpp", "mscclpp-files.md")])
def test_rates_of_files(form, page):
    """The table of the exported files' rates, by machine and collective, has the stored results."""
    (head, _, *rows) = (DOCS / page).read_text().partition("| machine, hosts |")[2].partition("\n\n")[0].split("\n")
    shown, kept = set(), set()
    for name, *ratios in (row.strip("| ").split(" | ") for row in rows):
        machine = name.removesuffix(", 1").replace(", ", " x ")
        shown |= {(machine, *cell) for cell in zip(head.replace("|", " ").split(), ratios, strict=True)}
    for line in KEPT["files"]:
        if line["format"] == form:
            kept.add((line["name"], line["collective"], f"{100 * line['ratio']:.1f}"))
    assert shown == kept
    assert len(rows) == 28
