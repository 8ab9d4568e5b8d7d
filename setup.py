"""Build the compiled modules. If that fails, the package is installed without them and computes in NumPy.

Two environment variables change this, for wheels that are published. With CROSSREDUCE_REQUIRE_KERNELS=1, a build
fails if a module, or an instruction set of the kernels, cannot be compiled. With CROSSREDUCE_NO_KERNELS=1, nothing is
compiled.

Two builds of the same files with the same compiler give the same wheel, in any folder and at any time.
"""

import os
import sys
import sysconfig
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

# The stable ABI does not support these interpreters: their modules are compiled for one version of Python.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# Not platform.machine(): a cross-compilation sets _PYTHON_HOST_PLATFORM, which this function returns.
PLATFORM = sysconfig.get_platform()
X86 = PLATFORM.endswith(("-x86_64", "-amd64")) and not PLATFORM.startswith("macosx")
NATIVE = "src/crossreduce/native"  # a folder per concern: kernels, shared memory, sockets, ...
CUDA = "src/crossreduce/engines/cuda/native"  # CUDA need not be installed: its driver is opened at run time
SUFFIXES = (".hpp", ".inc", ".h")
FOLDERS = [str(path) for path in sorted(Path(NATIVE).iterdir()) if path.is_dir()]
HEADERS = [
    str(path) for folder in (NATIVE, CUDA) for path in sorted(Path(folder).rglob("*")) if path.suffix in SUFFIXES
]
# With contraction, a * b + c would be rounded once, and results would depend on the compiler.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
if "-g" not in f"{os.environ.get('CFLAGS')} {os.environ.get('CXXFLAGS')}".split():
    FLAGS.append("-g0")  # Python's own flags contain -g; debug information contains the paths of this machine
FLAGS.append(f"-ffile-prefix-map={Path.cwd()}=.")
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, the earliest date of a file in a wheel
SETS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mf16c"],
}


def flag(name):
    """Return whether an environment variable is 1; it may also be 0, empty or missing."""
    value = os.environ.get(name) or "0"
    if value not in ("0", "1"):
        sys.exit(f"setup.py: {name} must be 0 or 1, but is {value!r}")
    return value == "1"


REQUIRED, OMITTED = flag("CROSSREDUCE_REQUIRE_KERNELS"), flag("CROSSREDUCE_NO_KERNELS")
if REQUIRED and OMITTED:
    sys.exit("setup.py: only one of CROSSREDUCE_REQUIRE_KERNELS and CROSSREDUCE_NO_KERNELS can be 1")


class Build(build_ext):
    """Compiles the kernels' passes over the data once for each instruction set."""

    def build_extensions(self):
        for name in ("linker_so", "linker_so_cxx"):  # Python's own flags may contain the path of its libraries
            command = getattr(self.compiler, name, None) or []
            setattr(self.compiler, name, [flag for flag in command if not flag.startswith("-Wl,-rpath")])
        try:
            super().build_extensions()
        except (CCompilerError, BaseError) as error:
            if REQUIRED:  # no module is optional
                sys.exit(f"setup.py: CROSSREDUCE_REQUIRE_KERNELS is 1, but a module cannot be compiled: {error}")
            raise

    def build_extension(self, ext):
        if ext.name.endswith("kernels._native"):
            for name, flags in SETS.items():
                ext.extra_objects += self.passes(f"{NATIVE}/kernels/isa_{name}.cpp", flags if X86 else [], ext.depends)
        super().build_extension(ext)

    def passes(self, source, flags, depends):
        options = {"output_dir": self.build_temp, "include_dirs": FOLDERS, "depends": depends}
        try:
            return self.compiler.compile([source], extra_postargs=FLAGS + flags, **options)
        except CompileError:
            if not flags or REQUIRED:
                raise
            # The compiler lacks the instruction set. Without its flags, the source defines null: the set is not used.
            return self.compiler.compile([source], extra_postargs=FLAGS, **options)


class Wheel(bdist_wheel):
    """Makes a wheel for every platform (py3-none-any) if nothing could be compiled."""

    def run(self):
        if not self.skip_build:
            self.run_command("build")
            self.skip_build = True
        built = self.get_finalized_command("build_ext").get_outputs()
        if not any(Path(file).exists() for file in built):
            self.distribution.ext_modules = []
            self.root_is_pure, self.py_limited_api = True, False
        super().run()


def extension(name, sources, **options):
    return Extension(
        f"crossreduce.{name}",
        sources,
        extra_compile_args=FLAGS,
        extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
        language="c++",
        py_limited_api=not FREE_THREADED,
        define_macros=[] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")],
        optional=not REQUIRED,
        **options,
    )


def sources(*folders):
    """Return the C++ files of folders, without the kernels' passes, which ``Build`` compiles."""
    files = sorted(path for folder in folders for path in Path(folder).glob("*.cpp"))
    return [str(path) for path in files if not path.name.startswith("isa_")]


arrays = f"{NATIVE}/arrays"
calls = f"{NATIVE}/calls"
modules = [
    extension(
        "kernels._native",
        sources(*(folder for folder in FOLDERS if folder not in (arrays, calls))),
        include_dirs=FOLDERS,
        depends=HEADERS,
    ),
    extension("frameworks._numpy_arrays", sources(arrays), include_dirs=[numpy.get_include()]),
    extension(
        "engines.host._calls", sources(calls), include_dirs=[numpy.get_include(), *FOLDERS, CUDA], depends=HEADERS
    ),
    extension("engines.cuda._cuda", sources(CUDA), include_dirs=FOLDERS, depends=HEADERS),
]
setup(
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    ext_modules=[] if OMITTED else modules,
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
