"""The wheel: two builds of the same files are equal, and without compiled modules it is for every platform."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile

import pytest
from paths import ROOT

SOURCES = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
VARIABLES = ("CFLAGS", "CXXFLAGS", "SOURCE_DATE_EPOCH", "CROSSREDUCE_REQUIRE_KERNELS", "CROSSREDUCE_NO_KERNELS")
# Stand-in for a C++ compiler that supports no instruction set beyond the baseline, and "compiles" all else to nothing.
OLD_COMPILER = """
case "$*" in
  *-mavx*) echo "unknown option" >&2; exit 1;;
esac
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then : > "$2"; fi
  shift
done
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the modules are built as on Linux")


def copy(folder):
    """Copy the sources of a wheel, but only few C++ files, whose code is replaced by a constant: the file's path."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for path in map(ROOT.joinpath, SOURCES):
        (shutil.copytree(path, folder / path.name, ignore=ignored) if path.is_dir() else shutil.copy(path, folder))
    kept = set()
    for path in sorted(folder.glob("src/**/native/**/*.cpp")):
        if path.parent in kept and not path.stem.startswith("isa_"):
            path.unlink()
        else:
            path.write_text(f"const char *name_of_{path.stem} = __FILE__;\n")
            kept |= set() if path.stem.startswith("isa_") else {path.parent}
    return folder


def run_build(folder, environment):
    """Build the wheel of a folder; return the finished process."""
    kept = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "wheels"]
    around = {"cwd": folder, "env": {**kept, **environment}}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, **around)


def build(folder, **environment):
    """Build the wheel of a folder and return its file."""
    done = run_build(folder, environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


def old_compiler(folder, first=""):
    """Write the stand-in for a compiler, which first runs the command ``first``. Return variables that select it."""
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{first}\n{OLD_COMPILER}")
    compiler.chmod(0o755)
    return dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler))


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_two_builds_give_the_same_wheel(tmp_path):
    """Wheels built from the same files, in folders of other names and at other times, are equal byte by byte; compiled
    modules have neither paths nor debug information."""
    first, second = copy(tmp_path / "one"), copy(tmp_path / "another" / "folder")
    for path in second.rglob("*"):
        os.utime(path, (time.time() - 1e6,) * 2)
    wheel, other = build(first), build(second)
    assert wheel.name == other.name
    version = f"cp3{sys.version_info.minor}"  # the stable ABI does not support free-threaded interpreters
    tag = f"-{version}-{version}t-linux" if sysconfig.get_config_var("Py_GIL_DISABLED") else "-cp311-abi3-linux"
    assert tag in wheel.name
    assert wheel.read_bytes() == other.read_bytes()
    with zipfile.ZipFile(wheel) as content:
        modules = [content.read(name) for name in content.namelist() if name.endswith(".so")]
    assert len(modules) == 4
    for trace in (*(f"{folder}/" for folder in (tmp_path, sys.base_prefix, ROOT)), ".debug_info"):
        assert not any(trace.encode() in module for module in modules), trace


def test_a_wheel_without_compiled_modules_is_for_every_platform(tmp_path):
    """If nothing can be compiled, the wheel is tagged py3-none-any. Its files have the date SOURCE_DATE_EPOCH."""
    date = int(time.mktime((2001, 2, 3, 4, 5, 6, 0, 0, 0))) - time.timezone
    wheel = build(copy(tmp_path / "folder"), CC="false", CXX="false", SOURCE_DATE_EPOCH=str(date))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        assert {item.date_time[:3] for item in content.infolist()} == {(2001, 2, 3)}
        texts = {name: content.read(name).decode() for name in content.namelist() if ".dist-info/" in name}
        names = content.namelist()
    assert [text for text in texts.values() if "Root-Is-Purelib: true\nTag: py3-none-any\n" in text]
    assert [text for text in texts.values() if "[torch.backends]\ncrossreduce = _crossreduce_torch:register\n" in text]
    assert {"crossreduce/__init__.py", "_crossreduce_torch.py"} <= set(names)
    assert not [name for name in names if name.endswith(".so") or "purelib" in name or "platlib" in name]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no further instruction sets")
def test_a_build_that_requires_the_kernels_requires_every_instruction_set(tmp_path):
    """If the compiler lacks an instruction set, the set is left out; with CROSSREDUCE_REQUIRE_KERNELS=1 this fails. A
    cross-compilation for arm64 requires no instruction set of x86-64, and the wheel is for arm64."""
    tools = old_compiler(tmp_path)
    folder = copy(tmp_path / "folder")
    assert "-none-any" not in build(copy(tmp_path / "one"), **tools).name
    tools["CROSSREDUCE_REQUIRE_KERNELS"] = "1"
    done = run_build(folder, tools)
    assert done.returncode == 1
    assert "setup.py: CROSSREDUCE_REQUIRE_KERNELS is 1, but a module cannot be compiled: " in done.stderr
    assert build(folder, **tools, _PYTHON_HOST_PLATFORM="linux-aarch64").name.endswith("-linux_aarch64.whl")


def test_a_build_can_omit_the_kernels(tmp_path):
    """With CROSSREDUCE_NO_KERNELS=1 nothing is compiled, and the wheel is for every platform."""
    tools = old_compiler(tmp_path, f': > "{tmp_path}/was_called"')
    assert build(copy(tmp_path / "folder"), **tools, CROSSREDUCE_NO_KERNELS="1").name.endswith("-py3-none-any.whl")
    assert not (tmp_path / "was_called").exists()


def test_builds_that_are_refused(tmp_path):
    """A build makes no wheel if CROSSREDUCE_REQUIRE_KERNELS is 1 and nothing can be compiled, if a variable is neither
    0 nor 1, and if the variables contradict each other."""
    folder, required = copy(tmp_path / "folder"), "CROSSREDUCE_REQUIRE_KERNELS"
    for variables, problem in (
        ({required: "1", "CC": "false", "CXX": "false"}, f"{required} is 1, but a module cannot be compiled: "),
        ({required: "yes"}, f"{required} must be 0 or 1, but is 'yes'"),
        ({required: "1", "CROSSREDUCE_NO_KERNELS": "1"}, f"only one of {required} and CROSSREDUCE_NO_KERNELS can be 1"),
    ):
        done = run_build(folder, variables)
        assert (done.returncode, (folder / "wheels").exists()) == (1, False)
        assert f"\nsetup.py: {problem}" in f"\n{done.stderr}"
