"""Fixtures, such as those that run a test on every framework, and the settings of hypothesis.

Tests run on all four frameworks. Those of a framework that is not installed are skipped by its name. In CI a skipped
test proves nothing: there, ``CROSSREDUCE_TEST_FRAMEWORKS`` names all four, and the tests of a missing one fail.
``CROSSREDUCE_TEST_BROWSER=0`` leaves out the tests in a browser.
On systems other than Linux, pytest does not collect ``paths.LINUX_ONLY``. How much hypothesis draws: budget.py.
"""

import gc
import os
import signal
import sys
import threading
from difflib import get_close_matches

import budget
import paths
import pytest
from frameworks import DEVICES, NAMES, load
from guarded import WRITABLE, Arrays
from hypothesis import HealthCheck, settings

# JAX and TensorFlow read these variables when they are imported, so set them before any test module is imported.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

collect_ignore = [] if sys.platform == "linux" else paths.LINUX_ONLY

# Programs that tests start find the modules of tests/support, too.
os.environ["PYTHONPATH"] = paths.python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

# A shell starts a background job with SIGINT ignored, and so would be the processes whose Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "crossreduce",
    budget.examples(100),
    deadline=None,
    derandomize=budget.SHARE < 1,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("crossreduce")


def pytest_configure(config):
    """Name a test file that does not exist. With ``-n``, pytest would only say that no tests ran."""
    for arg in () if hasattr(config, "workerinput") or config.option.pyargs else config.args:
        path = config.invocation_params.dir / arg.partition("::")[0]
        if not path.exists():
            known = {file.name: file for file in (paths.ROOT / "tests").rglob("test_*.py")}
            near = [known[name].relative_to(paths.ROOT) for name in get_close_matches(path.name, known, 1, 0.5)]
            try_ = f"; try {near[0]}" if near else ""
            raise pytest.UsageError(f"there is no test file or folder {arg}{try_}")


def _loaded(name):
    if name not in NAMES:
        pytest.skip(f"{name} is not installed, or left out by CROSSREDUCE_TEST_FRAMEWORKS")
    try:
        return load(name)
    except ImportError as error:
        pytest.fail(f"{name} must be installed for the tests: {error}", pytrace=False)


@pytest.fixture(scope="session")
def torch_optimizers():
    """Import what torch's optimizers need, so that forked ranks do not each import it."""
    import torch._dynamo  # noqa: F401


@pytest.fixture
def dump_directory(tmp_path, monkeypatch):
    """Return the directory into which ranks write their dumps."""
    monkeypatch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path / "dumps"))
    return tmp_path / "dumps"


@pytest.fixture(scope="module", autouse=True)
def modules_that_are_no_garbage():
    """Exclude the imported modules from garbage collections: with four frameworks that takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def dumps_with_other_files(tmp_path_factory):
    """Write the dumps of broken groups to pytest's temporary directory, so that they are deleted with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSREDUCE_DUMP_DIR", str(tmp_path_factory.getbasetemp() / "dumps"))
        yield


@pytest.fixture(scope="session", params=NAMES)
def framework(request):
    """Return each framework in turn."""
    return _loaded(request.param)


@pytest.fixture(scope="session", params=[name for name in NAMES if name != "numpy"])
def accelerated(request):
    """Return each framework except NumPy, the only one without devices or tracing of its own."""
    return _loaded(request.param)


@pytest.fixture(scope="session")
def numpy_():
    return _loaded("numpy")


@pytest.fixture(scope="session")
def torch_():
    return _loaded("torch")


@pytest.fixture(scope="session")
def jax_():
    return _loaded("jax")


@pytest.fixture(scope="session")
def tensorflow_():
    return _loaded("tensorflow")


@pytest.fixture(scope="session", params=["numpy", "torch", "jax"])
def library(request):
    """Return each framework whose arrays ``MirroredStrategy`` can reduce."""
    return request.getfixturevalue(f"{request.param}_")


@pytest.fixture
def crossreduce(capsys, monkeypatch):
    """Return a function that runs a command line in this process and returns its exit code, stdout and stderr."""
    from crossreduce.cli import main

    monkeypatch.setenv("COLUMNS", "80")

    def run(*args):
        for name in {name for name in NAMES for arg in args if name in str(arg).split(",")}:
            load(name)  # the command would make fewer devices, which other tests of this process then had
        with pytest.raises(SystemExit, match=r"^\d+$") as stopped:
            main([str(arg) for arg in args])
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def printed(crossreduce):
    """Return a function that runs a command line, which must succeed without messages, and returns its stdout."""

    def run(*args):
        code, out, error = crossreduce(*args)
        assert (code, error) == (0, "")
        return out

    return run


@pytest.fixture(params=WRITABLE)
def writable(request):
    """Return each framework whose arrays can be written."""
    return request.getfixturevalue(f"{request.param}_")


@pytest.fixture
def arrays(writable):
    """Return an ``Arrays``, which creates guarded arrays, for each framework whose arrays can be written."""
    return Arrays(writable)


@pytest.fixture
def no_thread_stays():
    """Assert that the test leaves no thread of this library behind."""
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before and t.name.startswith("crossreduce")]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
