"""``crossreduce train``: losses, parameters and reports."""

import json

import numpy as np
import pytest
from command_line import ROW, run_python

import crossreduce as cr
from crossreduce.cli import main
from crossreduce.cli.train.command import batches

# The greatest allowed difference of losses. Between 1 and 100 devices it was 3e-7 after 460 steps; it is above 1e-2 if
# the gradients of one replica are lost.
TOLERANCE = 1e-5
BRIEF = ("--epochs", "3")


def trained(folder, *args):
    """Train for three epochs and return the losses."""
    with pytest.raises(SystemExit, match="0"):
        main(["train", *BRIEF, "--output", str(folder / "losses.json"), *map(str, args)])
    return np.array(json.loads((folder / "losses.json").read_text())["losses"])


@pytest.fixture(scope="module")
def one_device_losses(tmp_path_factory):
    """Return the losses of NumPy on one device."""
    return trained(tmp_path_factory.mktemp("train"), "--devices", 1)


def test_train_learns_with_its_defaults(crossreduce, tmp_path):
    """``crossreduce train`` with its defaults reaches an accuracy of 95 % on test digits, and reports the run."""
    code, out, error = crossreduce("train", "--output", tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    assert (code, error) == (0, "")
    assert report["test_accuracy"] >= 0.95
    assert report["replicas_identical"] is True
    assert report["devices"] == [f"cpu:{k}" for k in range(8)]
    assert (len(report["losses"]), report["steps"], len(report["epoch_losses"])) == (460, 460, 20)
    assert report["final_loss"] == report["epoch_losses"][-1] < report["epoch_losses"][0]
    assert 0 < report["reduction_s"] < report["total_s"]
    assert f"{report['test_accuracy']:.4f}" in out
    assert "identical to the bit" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    "options", ["3 --algorithm ring", "5 --algorithm hierarchical_copy --num-packs 3", "8", "100 --algorithm direct"]
)
def test_losses_do_not_depend_on_the_number_of_devices(tmp_path, one_device_losses, options):
    """n devices have the losses of one device, also for odd n and for empty shards (n greater than the batch)."""
    assert np.abs(one_device_losses - trained(tmp_path, "--devices", *options.split())).max() < TOLERANCE


def test_replicas_that_drift_apart_are_an_error(crossreduce, tmp_path, monkeypatch):
    """If the parameters of one replica differ at the end, the exit code is 1 and the JSON reports it."""

    def drift(trees, *rest, **options):
        trees = cr.all_reduce(trees, *rest, **options)
        if isinstance(trees[0]["b2"], np.ndarray):  # not an array of the null framework, which only counts bytes
            trees[2]["b2"][3] += 1e-3
        return trees

    monkeypatch.setattr("crossreduce.cli.train.command.all_reduce", drift)
    code, out, error = crossreduce("train", *BRIEF, "--output", tmp_path / "run.json")
    assert code == 1
    assert "the replicas' parameters differ" in error
    assert "DIFFERENT" in out
    assert json.loads((tmp_path / "run.json").read_text())["replicas_identical"] is False


def test_bytes_moved_are_exact(crossreduce, tmp_path):
    """With one_device each step moves all gradients to one device, and the sums back to the others."""
    four = ("--devices", 4, "--algorithm", "one_device")
    crossreduce("train", "--epochs", 1, *four, "--output", tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    parameters, steps, there_and_back, other_devices, itemsize = 64 * 64 + 64 + 64 * 10 + 10, 23, 2, 3, 4
    assert report["bytes_moved"] == steps * there_and_back * other_devices * itemsize * parameters
    assert report["gradients_reduced"] == steps * 4  # the arrays of a replica


def test_a_run_is_reproducible(tmp_path, one_device_losses):
    """The same seed gives the same losses to the bit; another seed gives other losses."""
    assert (trained(tmp_path, "--devices", 1) == one_device_losses).all()
    assert (trained(tmp_path, "--devices", 1, "--seed", 1) != one_device_losses).all()


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow"])
def test_every_framework_trains_and_benchmarks_alike(request, crossreduce, capsys, tmp_path, one_device_losses, name):
    """On five devices each framework has the losses of NumPy on one device. No result of ``bench`` is wrong."""
    request.getfixturevalue(f"{name}_")
    losses = trained(tmp_path, "--devices", 5, "--framework", name, "--live")
    assert np.abs(one_device_losses - losses).max() < TOLERANCE
    assert capsys.readouterr().err == ""
    expected_ops = {
        "-g 5 -A auto,ring": ["sum", "sum"],
        "-g 3 -d int64 -o prod": ["prod"],
        "-g 3 -d bfloat16 -o avg": ["avg"],
        "-g 3 -d half --collective broadcast -r all": ["none"] * 3,
    }
    for line, ops in expected_ops.items():
        code, out, error = crossreduce(*f"bench --framework {name} -b 1000 -e 1000 -n 1 {line}".split())
        assert (code, error) == (0, "")
        assert [(row["redop"], row["wrong"]) for row in ROW.finditer(out)] == [(op, "0") for op in ops]


def test_the_command_makes_the_devices_of_jax():
    """In a new process the command makes as many devices of JAX as it needs, and writes nothing on stderr."""
    line = ["bench", "--framework", "jax", "-b", "1000", "-e", "1000", "-n", "1", "-g", "5"]
    ran = run_python("import sys; from crossreduce.cli import main; main(sys.argv[1:])", *line)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [row["wrong"] for row in ROW.finditer(ran.stdout)] == ["0"]


def test_batches_cover_an_epoch():
    """Each epoch contains every sample once, in a different order."""
    drawn = list(batches(100, 7, 2, seed=3))
    first, second = (np.concatenate([batch for epoch, batch in drawn if epoch == k]) for k in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert list(first) != list(second)


@pytest.mark.parametrize("line", ["train --epochs 1 --devices 2", "bench -b 64 -e 64 -n 1 -g 2"])
def test_json_is_all_that_is_printed(crossreduce, tmp_path, line):
    """With ``--json`` standard output has only the report, which ``--output`` also writes. ``--live`` is then named as
    without effect."""
    code, out, error = crossreduce(*line.split(), "--json", "--output", tmp_path / "report.json")
    assert (code, error) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "report.json").read_text())
    if line.startswith("train"):
        code, out, error = crossreduce(*line.split(), "--json", "--live")
        assert error == "crossreduce: --live has no effect: --json prints only JSON\n"
        assert json.loads(out)["steps"] == 23


USELESS = """
plan dgx-1v --algorithm ring --packs 3: --packs has no effect: ring has no roots
plan dgx-1v --participants 0-7: --participants has no effect: it lists all devices
bench -b 64 -e 64 -n 1 -g 2 -r 1: --root has no effect: all_reduce has no root
bench -b 64 -e 64 -n 1 -g 2 --collective broadcast -o max: --op has no effect: broadcast reduces nothing
bench -b 64 -e 64 -n 1 -g 2 -a 2: --average has no effect: one process has no times of several ranks
bench -b 64 -e 64 -n 1 -g 2 -f 2 -i 8: --stepbytes has no effect: the sizes are multiplied by --stepfactor
export dgx-1v a.csv --format nccl-tuner --nbytes 1M: --nbytes has no effect: the file of nccl-tuner has choices
export dgx-1v a.csv --format nccl-tuner --operation-us 1: --costs or --operation-us has no effect
"""


@pytest.mark.parametrize("case", USELESS.strip().splitlines())
def test_options_without_effect_are_named(crossreduce, tmp_path, monkeypatch, case):
    """An option that changes nothing is named on standard error with the reason, and the command continues."""
    monkeypatch.chdir(tmp_path)
    line, words = case.split(": ", 1)
    code, out, error = crossreduce(*line.split())
    assert code == 0
    assert out
    assert error.startswith(f"crossreduce: {words}")
    assert error.count("\n") == 1
