"""``crossreduce train``: losses, parameters and reports."""

import json

import numpy as np
import pytest
from command_line import ROW, run_python

import crossreduce as cr
from crossreduce.cli.support.arguments import read_algorithms
from crossreduce.cli.train.command import batches

# The greatest difference of losses that is allowed. Measured: 3e-7 between 1 and 100 devices over 460 steps; above 1e-2
# if the gradients of one replica are lost.
TOLERANCE = 1e-5
BRIEF = ("--epochs", "3")
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10


def losses(crossreduce, path, *args):
    code, _, error = crossreduce("train", "--json", path, *args)
    assert (code, error) == (0, "")
    return np.array(json.loads(path.read_text())["losses"])


def test_train_learns_with_its_defaults(crossreduce, tmp_path):
    """``crossreduce train`` with its defaults reaches an accuracy of 95 % on test digits, and reports the run."""
    code, out, error = crossreduce("train", "--json", tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    assert (code, error) == (0, "")
    assert report["test_accuracy"] >= 0.95
    assert report["replicas_identical"] is True
    assert report["devices"] == [f"cpu:{k}" for k in range(8)]
    assert len(report["losses"]) == report["steps"] == 20 * 23
    assert len(report["epoch_losses"]) == 20
    assert report["final_loss"] == report["epoch_losses"][-1] < report["epoch_losses"][0]
    assert 0 < report["reduction_s"] < report["total_s"]
    assert f"{report['test_accuracy']:.4f}" in out
    assert "identical to the bit" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (3, ("--algorithm", "ring")),
        (5, ("--algorithm", "hierarchical_copy", "--num-packs", "3")),
        (8, ()),
        (100, ("--algorithm", "direct")),
    ],
)
def test_losses_do_not_depend_on_the_number_of_devices(crossreduce, tmp_path, devices, options):
    """n devices have the losses of one device, also for odd n and for empty shards (n greater than the batch)."""
    one = losses(crossreduce, tmp_path / "one.json", *BRIEF, "--devices", 1)
    many = losses(crossreduce, tmp_path / "many.json", *BRIEF, "--devices", devices, *options)
    assert one.shape == many.shape
    assert np.abs(one - many).max() < TOLERANCE


def break_reduction(monkeypatch, before=lambda trees: trees, after=lambda trees: trees):
    """Change the arguments or the results of the reduction in the training loop."""

    def all_reduce(trees, *rest, **options):
        if not isinstance(trees[0]["b2"], np.ndarray):  # arrays of the null framework, which only count bytes
            return cr.all_reduce(trees, *rest, **options)
        return after(cr.all_reduce(before(trees), *rest, **options))

    monkeypatch.setattr("crossreduce.cli.train.command.all_reduce", all_reduce)


def test_the_tolerance_detects_a_lost_replica(crossreduce, tmp_path, monkeypatch):
    """The comparison of losses fails if the gradients of one of eight replicas are lost."""
    one = losses(crossreduce, tmp_path / "one.json", *BRIEF, "--devices", 1)
    break_reduction(monkeypatch, before=lambda trees: [{k: 0 * x for k, x in trees[0].items()}, *trees[1:]])
    assert np.abs(one - losses(crossreduce, tmp_path / "lossy.json", *BRIEF)).max() > 1000 * TOLERANCE


def test_replicas_that_drift_apart_are_an_error(crossreduce, tmp_path, monkeypatch):
    """If the parameters of one replica differ at the end, the exit code is 1 and the JSON reports it."""

    def drift(trees):
        trees[2]["b2"][3] += 1e-3
        return trees

    break_reduction(monkeypatch, after=drift)
    code, out, error = crossreduce("train", *BRIEF, "--json", tmp_path / "run.json")
    assert code == 1
    assert "the replicas' parameters differ" in error
    assert "DIFFERENT" in out
    assert json.loads((tmp_path / "run.json").read_text())["replicas_identical"] is False


def test_bytes_moved_are_exact(crossreduce, tmp_path):
    """With one_device each step moves all gradients to one device, and the sums back to the others."""
    crossreduce("train", "--epochs", 1, "--devices", 4, "--algorithm", "one_device", "--json", tmp_path / "run.json")
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["bytes_moved"] == 23 * 2 * 3 * 4 * PARAMETERS
    assert report["gradients_reduced"] == 23 * 4


def test_a_run_is_reproducible(crossreduce, tmp_path):
    """The same seed gives the same losses to the bit; another seed gives other losses."""
    first, again = (losses(crossreduce, tmp_path / "run.json", *BRIEF) for _ in range(2))
    other = losses(crossreduce, tmp_path / "run.json", *BRIEF, "--seed", 1)
    assert (first == again).all()
    assert (first != other).all()


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_every_framework_trains_and_benchmarks_alike(crossreduce, tmp_path, framework):
    """On five devices each framework has the losses of NumPy on one, no wrong element, and no output on stderr."""
    one = losses(crossreduce, tmp_path / "one.json", *BRIEF, "--devices", 1)
    small = ["bench", "--framework", framework, "-b", "1000", "-e", "1000", "-n", "1", "-g"]
    lines = [
        ["train", *BRIEF, "--devices", "5", "--framework", framework, "--json", str(tmp_path / "run.json")],
        [*small, "5", "-A", "all"],
        [*small, "3", "-d", "int64", "-o", "prod"],
        [*small, "3", "-d", "bfloat16", "-o", "avg"],
        [*small, "3", "-d", "half", "--collective", "broadcast", "-r", "all"],
    ]
    ran = run_python(
        "import json, sys\n"
        "from crossreduce.cli import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try: main(line)\n"
        "    except SystemExit as stopped: assert not stopped.code, (line, stopped.code)\n",
        json.dumps(lines),
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["replicas_identical"] is True
    assert np.abs(one - np.array(report["losses"])).max() < TOLERANCE
    rows = [match.groupdict() for match in ROW.finditer(ran.stdout)]
    assert [row["redop"] for row in rows] == ["sum"] * len(read_algorithms("-A", "all")) + ["prod", "avg"] + [
        "none"
    ] * 3
    assert {row["wrong"] for row in rows} == {"0"}


def test_a_json_file_is_replaced_atomically(crossreduce, tmp_path):
    """A new report replaces the file: a reader that opened the earlier file can still read all of it."""
    path = tmp_path / "run.json"
    path.write_text("earlier")
    with path.open() as reader:
        assert crossreduce("train", "--epochs", 1, "--json", path)[0] == 0
        assert reader.read() == "earlier"
    assert json.loads(path.read_text())["epochs"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_batches_cover_an_epoch():
    """Each epoch contains every sample once, in a different order."""
    epochs = [[], []]
    for epoch, batch in batches(100, 7, 2, seed=3):
        assert len(batch) <= 7
        epochs[epoch].extend(batch)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]
