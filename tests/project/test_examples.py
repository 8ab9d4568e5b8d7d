"""Each example, run in a new process, has the same losses with several replicas as with one."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest
from paths import ROOT

ELASTIC = ROOT / "examples" / "elastic_digits.py"
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ELASTIC})


def run(path, *args):
    """Run an example in a new process, without the variables that conftest sets for the frameworks."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_"))}
    command = [sys.executable, *map(str, (path, *args))]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=inherited)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "jax_digits"), id=path.stem) for path in EXAMPLES],
)
def test_an_example_trains(path):
    """An example exits with 0, prints two loss curves, which decrease, and reports that they agree. JAX's runs on 32
    devices, since a pass through the data then has few steps."""
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
    """There are examples for JAX, Keras and PyTorch, and one whose ranks die. ``--help`` prints the options. An invalid
    number of replicas is an error with exit code 2."""
    assert [path.stem for path in EXAMPLES] == ["jax_digits", "keras_digits", "torch_characters"]
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    for path in (*EXAMPLES, ELASTIC):
        option = "--devices" if path.stem == "jax_digits" else "--replicas"
        for words, code, shown in ((["--help"], 0, option), ([option, "0"], 2, "invalid choice: 0")):
            monkeypatch.setattr(sys, "argv", [str(path), *words])
            with pytest.raises(SystemExit, match=str(code)):
                runpy.run_path(str(path), run_name="__main__")
            assert shown in "".join(capsys.readouterr())


@pytest.mark.system
def test_ranks_are_killed_and_others_join(tmp_path):
    """Two ranks are killed and two processes join. Each step is made once, and its loss has the bits of the loss in an
    undisturbed run. 97 % of the digits are recognized."""
    ran = run(ELASTIC, "--seed", 1, "--json", tmp_path / "report.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("the curves agree\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert sorted(event for _, event in report["happened"]) == ["join", "join", "kill", "kill"]
    assert report["sizes"][0] == report["sizes"][-1] == 4
    assert len(set(report["sizes"])) > 1
    assert len(report["losses"]) == len(report["sizes"]) == 400
    assert report["losses"] == report["undisturbed"]
    assert report["accuracy"] >= 0.97
