"""The packaged machine code and PTX of the CUDA kernels, without a GPU."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import cuda_launches as launches
import cuda_machine_code as machine_code
import cuda_roundings as roundings
import ptx_to_c
import pytest
from budget import SHARE, count

import crossreduce

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # drawn numbers overflow
ROOT = machine_code.ROOT
SCRIPT = ROOT / "scripts/build_cuda_kernels"
NATIVE = ROOT / "src/crossreduce/engines/cuda/native"
PACKAGE = Path(crossreduce.__file__).parent  # where it is installed
SOME = ["bfloat16", "complex64", "float16", "int32"]  # with the kernels that round to halves


@pytest.fixture(scope="module")
def code():
    return machine_code.unpacked()[1]


def test_the_packaged_code_belongs_to_the_sources(code):
    """All architectures and PTX hold the same kernels, those of ``kernels.inc`` as the sources are now."""
    script = runpy.run_path(str(SCRIPT))
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True)
    assert (PACKAGE / "engines/cuda/kernels.bin").read_bytes() == machine_code.PACKED.read_bytes()
    assert list(code) == [*script["ARCHITECTURES"], script["PTX"]]
    assert machine_code.PACKED.stat().st_size < 3_000_000
    names = {kernel for numbers in launches.all_numbers() for kernel in launches.kernels_of(numbers)}
    assert names == set(ptx_to_c.kernels(machine_code.ptx()))
    for each in script["ARCHITECTURES"]:
        assert set(machine_code.resources(code[each])) == names


def test_a_change_of_the_sources_changes_the_digest(tmp_path):
    """The digest covers each source file, all that are included, and each option of the compiler."""
    script = runpy.run_path(str(SCRIPT))
    digest, namespace = script["digest"], script["digest"].__globals__
    before, sources = digest(), script["SOURCES"]
    included = re.findall(r'#include "(.*)"', "".join((NATIVE / name).read_text() for name in sources))
    assert {*included, "reduce.cu"} == set(sources)
    (tmp_path / "native").mkdir()
    for name in sources:
        (tmp_path / "native" / name).write_bytes((NATIVE / name).read_bytes())
    namespace["ROOT"] = tmp_path
    assert digest() == before
    for name in sources:
        path = tmp_path / "native" / name
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert digest() != before, name
        path.write_bytes(text)
    namespace["OPTIONS"] = (*script["OPTIONS"], "--use_fast_math")
    assert digest() != before


def test_registers_and_stack(code):
    """At most 64 registers, so that four blocks of 256 threads fit, and no stack: read from the ELF."""
    cubins = {name: machine_code.resources(each) for name, each in code.items() if name.startswith("sm_")}
    for each, kernels in cubins.items():
        for name, used in kernels.items():
            assert used["registers"] <= 64, (each, name)
            assert used.get("stack", 0) == 0


@pytest.mark.skipif(machine_code.nvdisasm() is None, reason="needs nvdisasm")
def test_loads_are_wide_and_ahead_of_their_first_use(code):
    """Loads and stores of 16 bytes, or a thread's share; no spills; all loads of a fixed kernel are in flight at once.

    nvdisasm 13 does not list sm_70. Below the full budget, one architecture is listed.
    """
    listed = [name for name in code if name.startswith("sm_") and name != "sm_70"]
    for each in listed if SHARE >= 1 else listed[-1:]:
        for name, instructions in machine_code.listing(code[each], machine_code.nvdisasm()).items():
            found = machine_code.loads(instructions)
            share = 8 if re.search(r"_(u8|i8|bool)_any", name) else 16
            assert (found["widest"], found["stored"]) == (share, share), (each, name)
            assert (found["spills"], found["generic"], found["constant"]) == (0, 0, 0), (each, name)
            fixed = re.search(r"_([2-8])(_large)?$", name)
            if fixed:
                assert found["ahead"] == int(fixed[1]), (each, name)


def test_the_loads_of_a_listing_are_counted():
    """The reader of listings tells apart loads before the first use, branches, spills, widths and kinds of loads."""
    wide = [f"LDG.E.128 R{4 * k}, desc[UR8][R40.64]" for k in range(3)]
    store = "STG.E desc[UR8][R60.64], R50"
    found = machine_code.loads([*wide, "FADD R50, R9, R51", store])  # uses the third
    assert found == {"spills": 0, "widest": 16, "ahead": 3, "stored": 4, "generic": 0, "constant": 0}
    assert machine_code.loads([*wide[:2], "FADD R50, R5, R51", wide[2], store])["ahead"] == 2
    assert machine_code.loads([wide[0], "@P0 BRA `(.L_1)", *wide[1:], store])["ahead"] == 2
    assert machine_code.loads([*wide, "@!P0 STL.64 [R1], R2", "LDL.LU R3, [R1+0x8]", store])["spills"] == 2
    assert machine_code.loads(["LDG.E.128.CONSTANT R0, desc[UR8][R40.64]", store])["constant"] == 1
    narrow = machine_code.loads(["LDG.E.U16 R0, desc[UR8][R40.64]", "LD.E.S8 R1, [R2.64]", "ST.E.64 [R2.64], R0"])
    assert (narrow["widest"], narrow["stored"], narrow["generic"]) == (2, 8, 2)


def test_ptx_rounds_each_result_once_to_the_nearest():
    """No fused multiply-add, approximation, flushed subnormal, or load for memory that does not change."""
    opcodes = set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)+)", machine_code.ptx(), re.MULTILINE))
    assert {"add.rn.f32", "mul.rn.f64", "div.rn.f32", "ld.global.v4.u32", "st.global.v4.u32"} <= opcodes
    for opcode in opcodes:
        op, *rest = opcode.split(".")
        is_float = bool(rest) and rest[-1] in ("f16", "f32", "f64")
        assert not (op in ("fma", "mad") and is_float), opcode
        assert not (op in ("add", "sub", "mul", "div") and is_float) or rest[:-1] == ["rn"], opcode
        if op == "cvt" and rest[-2][0] == "f":
            assert rest[0] == "rn" or rest in (["f64", "f32"], ["f32", "f16"]), opcode  # these are exact
        assert not {"ftz", "nc", "approx", "full", "sat"} & set(rest), opcode
        assert op not in ("ld", "st") or rest[0] in ("param", "global"), opcode


@pytest.mark.parametrize(
    "dtypes", [SOME, pytest.param(sorted(launches.SHORT), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_compiled_instructions_give_the_bits_of_the_reference(dtypes):
    """The PTX of the kernels for some dtypes, translated to C: drawn batches, and conversions to halves."""
    names = {name for each in launches.all_numbers() if each.dtype in dtypes for name in launches.kernels_of(each)}
    kernels = {name: each for name, each in ptx_to_c.kernels(machine_code.ptx()).items() if name in names}
    library = ptx_to_c.loaded(kernels)
    counts = launches.check_each(library, count(100), 3, dtypes)
    assert list(counts) == dtypes
    assert min(counts.values()) >= count(100)
    for short in roundings.NAMES:
        assert roundings.wrong_floats(library, roundings.notable_bits(short), short) == 0
        assert roundings.wrong_doubles(library, short) == 0
        assert roundings.wrong_widened(library, short) == 0
    room, body = kernels["sum_f16_mixed"]
    for unknown in ("fma.rn.f32", "add.rn.ftz.f32", "ex2.approx.f32"):
        with pytest.raises(ValueError, match=f"unknown instruction {unknown}"):
            ptx_to_c.translate({"kernel": (room, body.replace("add.rn.f32", unknown))})
