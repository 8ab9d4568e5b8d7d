"""The packaged machine code and PTX of the CUDA kernels, without a GPU."""

import json
import lzma
import re
import runpy
import struct
import sys
import types
from functools import cache
from unittest import mock

import cuda_launches as launches
import pytest
from fake_cuda import KERNELS, PACKAGE
from paths import ROOT

from crossreduce.engines.cuda import driver as cuda_driver
from crossreduce.engines.cuda import kernels

SCRIPT, PACKED = ROOT / "scripts/build_cuda_kernels", KERNELS.parent / "kernels.bin"
# Attributes of kernels in .nv.info, and the format of values of any size.
REGISTERS, STACK, ANY_SIZE = 0x2F, 0x12, 0x04


@cache
def unpacked():
    """Return the code of each architecture in ``kernels.bin``: cubins, and PTX as bytes."""
    sizes, codes = cuda_driver._packed()
    code = {}
    for name, nbytes in sizes.items():
        code[name], codes = lzma.decompress(codes[:nbytes]), codes[nbytes:]
    assert not codes
    return code


def ptx():
    """Return the packed PTX."""
    return unpacked()[kernels.PTX].rstrip(b"\0").decode()


def bodies():
    """Return the body of each kernel in PTX."""
    pattern = r"\.visible \.entry (\w+)\([^)]+\)[^{]+\{\n(.*?)\n\}\n"
    return dict(re.findall(pattern, ptx(), re.DOTALL))


def resources(cubin):
    """Return for each kernel in a cubin the registers of a thread, and the bytes of its stack, calls included."""
    # The ELF header has the offset, size and number of the section headers, and the number of the section of names.
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    nbytes, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + k * nbytes) for k in range(count)]

    def text(strings, at):
        begin = headers[strings][4] + at
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    found = {}
    sections = {text(names, header[0]): header for header in headers}
    symbols = sections[".symtab"]
    at, end = sections[".nv.info"][4], sections[".nv.info"][4] + sections[".nv.info"][5]
    while at < end:
        kind, attribute, size = struct.unpack_from("<BBH", cubin, at)
        if kind == ANY_SIZE and attribute in (REGISTERS, STACK):
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            key = "registers" if attribute == REGISTERS else "stack"
            found.setdefault(text(symbols[6], name), {})[key] = value
        at += 4 + (size if kind == ANY_SIZE else 0)
    return {name: values for name, values in found.items() if "registers" in values}  # not subroutines


def test_the_packaged_code_belongs_to_the_sources():
    """All architectures and PTX hold the same kernels, those of ``kernels.inc`` as the sources are now.

    The digest of the sources is that of all files, and ``layout.inc`` has the constants of ``kernels.py``.
    """
    script = runpy.run_path(str(SCRIPT))
    included = re.findall(r'#include "(.*)"', "".join((KERNELS / name).read_text() for name in script["SOURCES"]))
    assert {*included, "reduce.cu"} == {*script["SOURCES"]}
    made = json.loads(PACKED.read_bytes().partition(b"\n")[0])["digest"], (KERNELS / "layout.inc").read_text()
    assert made == (script["digest"](), script["layout"]()), f"run {SCRIPT}"
    assert re.search(r"^\.version (.*)$", ptx(), re.MULTILINE)[1] == "8.8"  # needs PTX_DRIVER
    assert (PACKAGE / "engines/cuda/kernels.bin").read_bytes() == PACKED.read_bytes()
    assert list(unpacked()) == [*script["ARCHITECTURES"], script["PTX"]]
    assert PACKED.stat().st_size < 3_000_000
    names = {kernel.name for kernel in launches.kernels()}
    assert names == set(bodies())
    for each in script["ARCHITECTURES"]:
        assert set(resources(unpacked()[each])) == names


@pytest.mark.parametrize(
    ("capability", "driver", "code"),
    [
        *((each, 12000, "sm_70") for each in (70, 75)),
        *((each, 12000, "sm_80") for each in (80, 86, 89)),
        *((each, 12080, f"sm_{each // 10 * 10}") for each in (90, 100, 103, 120, 121)),
        *((each, 12090, "compute_90") for each in (101, 110, 130)),
        *((each, 13000, "no CUDA kernels for this device") for each in (61, 72, 87, 88)),
        *((each, 12080, r"driver is too old.*(?s:.)*for CUDA 12\.8") for each in (101, 110, 130)),
    ],
)
def test_the_code_of_each_compute_capability(capability, driver, code, monkeypatch):
    """Machine code runs on GPUs of the same major version, except for those of Jetson; PTX needs a newer driver."""
    loaded = []
    description = {"capability": capability, "driver": driver}
    device = types.SimpleNamespace(is_loaded=bool, describe=lambda _: description, load=lambda _, x: loaded.append(x))
    monkeypatch.setattr(cuda_driver, "native", lambda: device)
    why = cuda_driver.lacks_kernels.__wrapped__(0)
    if why:
        assert re.search(code, why)
    else:
        assert loaded == [unpacked()[code] + b"\0"]
    assert bool(why) == (not loaded)
    monkeypatch.setitem(sys.modules, "lzma", None)  # as in a Python that was built without it
    monkeypatch.setattr(cuda_driver, "_code", cuda_driver._code.__wrapped__)
    assert "this Python cannot decompress" in cuda_driver.lacks_kernels.__wrapped__(0)


@pytest.mark.parametrize(("code", "is_unfit"), [(209, True), (222, True), (801, True), (2, False), (220, False)])
def test_only_code_that_a_driver_cannot_load_is_left_to_the_framework(code, is_unfit, monkeypatch):
    """An old driver may refuse large parameters (801). What may fail only now (memory, a link) is an error later."""
    error = cuda_driver._error("cuModuleLoadData", 0, code, "", "")
    monkeypatch.setattr(cuda_driver, "load_kernels", mock.Mock(side_effect=error))
    assert bool(cuda_driver.lacks_kernels.__wrapped__(0)) == is_unfit


def test_registers_and_stack():
    """A kernel has at most 64 registers, so that four blocks of 256 threads fit, and no stack, and so no spills."""
    for each in kernels.MACHINE_CODE:
        for name, used in resources(unpacked()[each]).items():
            assert used["registers"] <= 64, (each, name)
            assert used.get("stack", 0) == 0, (each, name)


def narrow_loads(kernels):
    """Return the kernels in PTX whose loads are not wide (16 bytes, or a thread's share), or not before any branch.

    Kernels of one or two sources load two vectors of each, except for those of float64.
    """
    found = set()
    for name, body in kernels.items():
        share = 8 if re.search(r"_(u8|i8|bool)_(any|1)", name) else 16
        for access in ("ld", "st"):
            each = re.findall(rf"\b{access}\.global(?:\.v(\d))?\.[a-z](\d+)", body)
            if max(int(count or 1) * int(bits) // 8 for count, bits in each) != share:
                found.add(name)
        fixed = re.search(r"_([1-8])(_large)?$", name)
        blocks = re.split(r"\bbra\b|^\$", body, flags=re.MULTILINE)
        needed = int(fixed[1]) * (2 if fixed[1] in "12" and "f64" not in name else 1) if fixed else 1
        if max(len(re.findall(r"\bld\.global\.v", block)) for block in blocks) < needed:
            found.add(name)
    return found


def test_loads_are_wide_and_ahead_of_their_first_use():
    """Every kernel loads and stores 16 bytes at once, or a thread's share. The check itself detects narrower loads."""
    kernels = bodies()
    assert narrow_loads(kernels) == set()
    for change in ("ld.global.v2.u32", "ld.global.u32", "bra $done;\n ld.global.v4.u32"):
        assert narrow_loads({"sum_f32_2": kernels["sum_f32_2"].replace("ld.global.v4.u32", change)}), change


def test_ptx_rounds_each_result_once_to_the_nearest():
    """PTX has no fused multiply-adds, approximations, flushed subnormals, or loads for memory that does not change."""
    opcodes = set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)+)", ptx(), re.MULTILINE))
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
