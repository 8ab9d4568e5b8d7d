"""The wheel: two builds of the same files are equal, and without compiled modules it is for every platform."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the modules are built as on Linux")


def copy(folder):
    """Copy what a wheel is built from; each file of the kernels only has its own name, which compiles in seconds."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in SOURCES:
        path = ROOT / name
        (shutil.copytree(path, folder / name, ignore=ignored) if path.is_dir() else shutil.copy(path, folder / name))
    for path in folder.glob("src/crossreduce/kernels/native/*.cpp"):
        path.write_text(f"const char *name_of_{path.stem} = __FILE__;\n")
    return folder


def build(folder, **environment):
    """Build the wheel of a folder and return its file."""
    kept = {name: text for name, text in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS", "SOURCE_DATE_EPOCH")}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "wheels"],
        cwd=folder, capture_output=True, text=True, timeout=250, check=False, env={**kept, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_two_builds_give_the_same_wheel(tmp_path):
    """Wheels built from the same files, in folders of other names and at other times, are equal byte by byte; compiled
    modules have neither paths nor debug information."""
    first, second = copy(tmp_path / "one"), copy(tmp_path / "another" / "folder")
    for path in second.rglob("*"):
        os.utime(path, (time.time() - 1e6,) * 2)
    wheels = [build(folder) for folder in (first, second)]
    assert wheels[0].name == wheels[1].name
    assert wheels[0].name.endswith(".whl")
    version = f"cp3{sys.version_info.minor}"  # the stable ABI does not support free-threaded interpreters
    tag = f"-{version}-{version}t-linux" if sysconfig.get_config_var("Py_GIL_DISABLED") else "-cp311-abi3-linux"
    assert tag in wheels[0].name
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        modules = [name for name in wheel.namelist() if name.endswith(".so")]
        assert len(modules) == 4
        for name in modules:
            content = wheel.read(name)
            for trace in (tmp_path, sys.base_prefix, ROOT):
                assert f"{trace}/".encode() not in content, (name, trace)
            assert b".debug_info" not in content, name


def test_a_wheel_without_compiled_modules_is_for_every_platform(tmp_path):
    """If nothing can be compiled, the wheel is tagged py3-none-any; its files have the date SOURCE_DATE_EPOCH."""
    date = int(time.mktime((2001, 2, 3, 4, 5, 6, 0, 0, 0))) - time.timezone
    wheel = build(copy(tmp_path / "folder"), CC="false", CXX="false", SOURCE_DATE_EPOCH=str(date))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        assert {item.date_time[:3] for item in content.infolist()} == {(2001, 2, 3)}
        (metadata,) = (name for name in names if name.endswith("/WHEEL"))
        assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in content.read(metadata).decode()
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        assert "[torch.backends]\ncrossreduce = _crossreduce_torch:register\n" in content.read(entry_points).decode()
    assert {"crossreduce/__init__.py", "_crossreduce_torch.py"} <= set(names)
    assert not [name for name in names if name.endswith(".so") or "purelib" in name or "platlib" in name]
