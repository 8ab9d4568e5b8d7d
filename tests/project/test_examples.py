"""Each example, run in a new process, has the same losses with several replicas as with one."""

import json
import os
import re
import runpy
import subprocess
import sys

import fake_cuda
import pytest
from paths import ROOT

ELASTIC = ROOT / "examples" / "elastic_digits.py"
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ELASTIC})


def run(path, *args):
    """Run an example in a new process, without the variables that conftest sets for the frameworks."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_"))}
    return subprocess.run(
        [sys.executable, *map(str, (path, *args))],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=inherited,
    )


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "jax_digits"), id=path.stem) for path in EXAMPLES],
)
def test_an_example_trains(path):
    """An example exits with 0, prints the two loss curves, which decrease, and reports that they agree; JAX's on 32
    devices, of which each pass through the data has few steps."""
    ran = run(path, *(["--devices", "32"] if path.stem == "jax_digits" else []))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    curves = [line.split() for line in ran.stdout.splitlines() if re.fullmatch(r" *\d+ +\d+\.\d+ +\d+\.\d+", line)]
    assert len(curves) >= 8
    for column in (1, 2):
        assert float(curves[-1][column]) < 0.9 * float(curves[0][column])
    assert ran.stdout.endswith("the curves agree\n")
    if path.stem == "keras_digits":
        assert "new plan: all_reduce hierarchical_copy: 3 devices" in ran.stderr


def test_examples_check_their_options(capsys, monkeypatch):
    """There is an example for Keras under tf.distribute, JAX under shard_map, PyTorch under MirroredStrategy, and one
    whose ranks die. ``--help`` prints the options; an invalid number of replicas is an error with exit code 2."""
    assert [path.stem for path in EXAMPLES] == ["jax_digits", "keras_digits", "torch_characters"]
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    for path in (*EXAMPLES, ELASTIC):
        option = "--devices" if path.stem == "jax_digits" else "--replicas"
        for words, code, shown in ((["--help"], 0, option), ([option, "0"], 2, "invalid choice: 0")):
            monkeypatch.setattr(sys, "argv", [str(path), *words])
            with pytest.raises(SystemExit, match=str(code)):
                runpy.run_path(str(path), run_name="__main__")
            assert shown in "".join(capsys.readouterr())


@pytest.mark.slow
def test_the_benchmark_of_the_cuda_engine_runs_without_a_gpu(tmp_path):
    """On the fake driver the benchmark for GPUs runs all its cases, finds no wrong bit, and keeps nothing."""
    program, fake = ROOT / "benchmarks" / "gpu_reduction.py", ["--driver", "fake", "--library", fake_cuda.built()]
    ran = run(program, *fake)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "FAKE DRIVER: NO MEASUREMENT" in ran.stdout
    assert re.findall(r"^  \[(\w+): \d+ s so far\]$", ran.stdout, re.M) == [
        *("correctness", "large", "halves", "gradients", "many_small", "one_small", "several"),
        *("grid", "kernels", "sanitizer"),
    ]
    assert set(re.findall(r"ours queues .*", ran.stdout)) == {"ours queues 1 launches and 0 copies"}
    rejected = run(program, *fake, "--json", tmp_path / "gpu.json")
    assert rejected.returncode == 2
    assert "measures nothing" in rejected.stderr
    assert not (tmp_path / "gpu.json").exists()


def test_the_gradients_of_a_model_are_one_launch(tmp_path):
    """The benchmark of the host's cost on CUDA devices finds that the gradients of ResNet-50 are one launch."""
    ran = run(ROOT / "benchmarks" / "cuda_host_cost.py", "--quick", "--json", tmp_path / "cost.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cases = json.loads((tmp_path / "cost.json").read_text())["cases"]
    assert cases["161 gradients of ResNet-50, 8 to 8 on one GPU"]["queued"] == {"launches": 1, "copies": 0, "waits": 0}
    assert all(row["median_s"] > 0 for case in cases.values() for row in case["rows"].values())


@pytest.mark.system
def test_ranks_are_killed_and_others_join(tmp_path):
    """Two ranks are killed and two processes join; each step is made once, with the losses of an undisturbed run, in
    every bit; 97 % of the digits are recognized, and a chart is drawn."""
    ran = run(ELASTIC, "--seed", 1, "--json", tmp_path / "report.json", "--chart", tmp_path / "chart.svg")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("the curves agree\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert sorted(event for _, event in report["happened"]) == ["join", "join", "kill", "kill"]
    sizes = report["sizes"]
    assert sizes[0] == sizes[-1] == 4
    assert len(set(sizes)) > 1
    assert len(report["losses"]) == len(sizes) == len(report["undisturbed"]) == 400
    assert report["losses"] == report["undisturbed"]
    assert sum(report["losses"][-20:]) < 0.05 * sum(report["losses"][:20])
    assert report["accuracy"] >= 0.97
    chart = (tmp_path / "chart.svg").read_text()
    assert chart.startswith("<?xml")
    assert len(re.findall(r'id="axes_\d"', chart)) == 2


@pytest.mark.slow
def test_a_state_that_is_not_received_is_noticed(tmp_path):
    """If the new processes receive the number of the step, but not the weights, the example fails.

    A fourth of its steps are enough for that, though not for an accurate network.
    """
    text, broken = ELASTIC.read_text(), tmp_path / ELASTIC.name
    sent = "for x in (known, *(p.detach() for p in self.parameters), *momentum):"
    for old, new in ((sent, "for x in (known, *momentum):"), ("STEPS = 400", "STEPS = 100")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    broken.write_text(text)
    ran = run(broken, "--seed", 1)
    assert ran.returncode == 1
    noticed = "THE CURVES DIFFER", "the ranks end with different networks"
    assert any(words in ran.stdout + ran.stderr for words in noticed), ran.stdout + ran.stderr


def test_the_page_shows_a_run_of_the_example():
    """The picture of the how-to page is a chart of the example."""
    page = (ROOT / "docs/how-to/when-a-rank-dies.md").read_text()
    assert "../pictures/elastic.svg" in page
    assert "asks to join" in (ROOT / "docs/pictures/elastic.svg").read_text()
