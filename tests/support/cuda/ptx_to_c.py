"""Translate the compiler's PTX of the CUDA kernels to C, instruction by instruction, so that it runs on the host.

In: PTX, as scripts/build_cuda_kernels packs it. Out: C with the functions of cuda_host.cpp,
``name(parameters, blocks)``. Each register is a variable. An access of parameters beyond their end, an access that is
not aligned as PTX requires, and an instruction that is unknown here are errors.
Source of the semantics: NVIDIA, Parallel Thread Execution ISA 8.8.
"""

import ctypes
import re
import tempfile

from compiled import compiled

# The C types of PTX's types, and of a register that holds one.
TYPES = {f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "usb" for bits in (8, 16, 32, 64)}
TYPES |= {"f32": "float", "f64": "double", "pred": "uint8_t", "f16": "uint16_t"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
SPECIAL = {"%tid.x": "thread", "%ctaid.x": "block", "%nctaid.x": "blocks"}

PRELUDE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char *why) { fprintf(stderr, "PTX: %s\n", why); abort(); }
// An address in device memory, or in the parameters, from which nbytes are accessed at once.
static inline void *device(uint64_t address, int nbytes) {
    if (address % nbytes) stop("an access is not aligned");
    return (void *)address;
}
static inline const void *within(const unsigned char *parameters, uint64_t room, uint64_t address, int nbytes) {
    const uint64_t at = address - (uint64_t)parameters;
    if (at > room - nbytes || at % nbytes) stop("an access beyond the parameters, or not aligned in them");
    return (const void *)address;
}
static inline float f32_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline double f64_of(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline uint32_t bits_of_f32(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline uint64_t bits_of_f64(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }
// Conversions of the C compiler, which rounds to nearest even.
static inline float widen(uint16_t bits) { _Float16 x; memcpy(&x, &bits, 2); return (float)x; }
static inline uint16_t narrow(float x) { _Float16 y = (_Float16)x; uint16_t bits; memcpy(&bits, &y, 2); return bits; }
static inline uint64_t field(uint64_t x, uint32_t at, uint32_t count, int width, int is_signed) {
    at &= 255, count &= 255;
    uint64_t y = at < 64 ? x >> at : 0;
    if (count < 64) y &= (UINT64_C(1) << count) - 1;
    const int last = (int)(at + count) - 1 < width - 1 ? (int)(at + count) - 1 : width - 1;
    const int filled = last >= (int)at ? last - (int)at + 1 : 0;
    if (is_signed && count && count < 64 && (x >> last & 1)) y |= ~UINT64_C(0) << filled;
    return y;
}
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t y = 0;
    for (int k = 0; k < 4; k++) {
        const uint32_t chosen = selector >> 4 * k & 15, byte = bytes >> 8 * (chosen & 7) & 255;
        y |= (chosen & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * k;
    }
    return y;
}
"""


def register_kind(name: str) -> str:
    """Return the type of a register of floats; empty: it holds bits."""
    found = re.match(r"%f(d?)\d", name)
    return ("f64" if found[1] else "f32") if found else ""


def assign(to: str, kind: str, value: str) -> str:
    """Return the statement that gives a register a value of a type."""
    floats = register_kind(to)
    if floats and kind[0] != "f":
        value = f"{floats}_of({value})"
    elif kind in ("f32", "f64") and not floats:
        value = f"bits_of_{kind}({value})"
    return f"{to[1:]} = {value};"


def operand(text: str, kind: str) -> str:
    """Return an operand as a C expression of a type of PTX."""
    text = text.strip()
    if text in SPECIAL:
        return SPECIAL[text]
    if text.startswith("%"):
        floats, same = register_kind(text), kind in ("f32", "f64")
        if floats and not same:
            return f"bits_of_{floats}({text[1:]})"
        return f"{kind}_of({text[1:]})" if same and not floats else f"(({TYPES[kind]}){text[1:]})"
    if text[:2] in ("0f", "0F"):
        return f"f32_of(0x{text[2:]}u)"
    if text[:2] in ("0d", "0D"):
        return f"f64_of(0x{text[2:]}ull)"
    if re.fullmatch(r"-?\d+", text):
        value = int(text) & (2 ** (64 if kind == "pred" else 8 * WIDTH[kind]) - 1)
        return f"(({TYPES[kind]})UINT64_C({value}))"
    if text.endswith("_param_0"):
        return "((uint64_t)parameters)"
    raise ValueError(f"unknown operand {text}")


WIDTH = {kind: int(kind[1:]) // 8 for kind in TYPES if kind != "pred"}


def address_of(text: str) -> str:
    """Return the address ``[register+offset]`` as a C expression."""
    base, offset = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", text.strip()).groups()
    return f"({operand(base, 'u64')} + {int(offset or 0)})"


def split(operands: str) -> list[str]:
    """Split operands at the commas outside braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", operands)] if operands else []


def load_or_store(parts: list[str], given: list[str]) -> str:
    """Translate ld and st of parameters and device memory."""
    space, kind = parts[1], parts[-1]
    if not (set(parts[2:-1]) <= {"v2", "v4"} and space in ("param", "global")):
        raise ValueError(f"unknown access {'.'.join(parts)}")
    names, where = (given[1], given[0]) if parts[0] == "st" else given
    registers = [name.strip() for name in names.strip("{}").split(",")]
    if len(registers) != int(parts[2][1:] if len(parts) > 3 else 1):
        raise ValueError(f"wrong number of registers in {'.'.join(parts)}")
    nbytes = WIDTH[kind] * len(registers)
    if space == "param":
        pointer = f"within(parameters, ROOM, {address_of(where)}, {nbytes})"
    else:
        pointer = f"device({address_of(where)}, {nbytes})"
    lines = [f"{TYPES[kind]} *at = ({TYPES[kind]} *){pointer};"]
    if parts[0] == "st":
        lines += [f"at[{k}] = {operand(name, kind)};" for k, name in enumerate(registers)]
    else:  # a wider register is extended as its type says
        lines += [f"const {TYPES[kind]} x{k} = at[{k}];" for k in range(len(registers))]
        lines += [assign(name, kind, f"x{k}") for k, name in enumerate(registers)]
    return "{ " + " ".join(lines) + " }"


def convert(parts: list[str], source: str) -> str:
    """Return the C expression of a cvt."""
    to, of = parts[-2:]
    rounding = parts[1] if len(parts) == 4 else ""
    x = operand(source, of)
    if (to, of) == ("f32", "f16") and not rounding:
        return f"widen({x})"
    if (to, of) == ("f16", "f32") and rounding == "rn":
        return f"narrow({x})"
    exact = (to[0] != "f" and of[0] != "f") or (to, of) == ("f64", "f32")
    if (exact and not rounding) or (to[0] == "f" and rounding == "rn") or (of[0] == "f" and rounding == "rzi"):
        return f"(({TYPES[to]}){x})"  # C rounds to nearest even, and integers toward zero
    raise ValueError(f"unknown conversion {'.'.join(parts)}")


def compare(parts: list[str], given: list[str]) -> str:
    """Return the C expression of a setp."""
    comparison, kind = parts[1:]
    a, b = (operand(each, kind) for each in given)
    if kind[0] != "f":
        return f"{a} {COMPARISONS[comparison]} {b}"
    unordered = f"({a} != {a}) | ({b} != {b})"
    if comparison in ("nan", "num"):
        return unordered if comparison == "nan" else f"!({unordered})"
    if comparison in COMPARISONS:
        return f"!({unordered}) & ({a} {COMPARISONS[comparison]} {b})"
    return f"({unordered}) | ({a} {COMPARISONS[comparison.removesuffix('u')]} {b})"


def value_of(parts: list[str], given: list[str]) -> str:
    """Return the C expression of the value of an instruction that has one destination."""
    op, kind = parts[0], parts[-1]
    if op == "cvt":
        return convert(parts, given[0])
    if op == "setp":
        return compare(parts, given)
    if op == "selp":
        return f"{operand(given[2], 'pred')} ? {operand(given[0], kind)} : {operand(given[1], kind)}"
    if op == "bfe":
        x, at, count = operand(given[0], "u" + kind[1:]), *(operand(each, "u32") for each in given[1:])
        return f"field({x}, {at}, {count}, {kind[1:]}, {int(kind[0] == 's')})"
    if op == "prmt" and parts == ["prmt", "b32"]:
        return f"permute({', '.join(operand(each, kind) for each in given)})"
    if parts[1:-1] == ["wide"] and op == "mul":
        a, b = (operand(each, kind) for each in given)
        wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
        return f"({wide}){a} * ({wide}){b}"
    if op in ("shl", "shr") and len(parts) == 2:
        a, count, most = operand(given[0], kind), operand(given[1], "u32"), int(kind[1:]) - 1
        beyond = f"{a} < 0 ? -1 : 0" if kind[0] == "s" else "0"
        return f"{count} > {most} ? {beyond} : {a} {'<<' if op == 'shl' else '>>'} {count}"
    x = [operand(each, kind) for each in given]
    if kind[0] == "f" and op in ("add", "sub", "mul", "div") and parts[1:-1] == ["rn"]:
        return f"{x[0]} {OPERATORS[op]} {x[1]}"
    if op in ("mov", "neg", "not") and len(parts) == 2:
        return {"mov": x[0], "neg": f"-{x[0]}", "not": f"!{x[0]}" if kind == "pred" else f"~{x[0]}"}[op]
    if op in ("min", "max") and kind[0] != "f" and len(parts) == 2:
        return f"{x[0]} {'<' if op == 'min' else '>'} {x[1]} ? {x[0]} : {x[1]}"
    if op in OPERATORS and kind[0] != "f" and (len(parts) == 2 or parts[1:-1] == ["lo"]):
        if op != "div":  # wraps around
            x = [f"(uint64_t){each}" for each in x]
        return f"{x[0]} {OPERATORS[op]} {x[1]}"
    raise ValueError(f"unknown instruction {'.'.join(parts)}")


def statement(line: str) -> str:
    """Translate an instruction, without its predicate and semicolon."""
    opcode, _, operands = line.partition(" ")
    parts, given = opcode.split("."), split(operands.strip())
    if parts[0] == "bra":
        return f"goto {given[0].removeprefix('$')};"
    if opcode == "ret":
        return "return;"
    if parts[0] in ("ld", "st"):
        return load_or_store(parts, given)
    if parts[0] == "mov" and given[0].startswith("{"):  # the halves of a register
        names, bits = (name.strip() for name in given[0].strip("{}").split(",")), 4 * WIDTH[parts[1]]
        values = (f"(uint{bits}_t)({operand(given[1], parts[1])} >> {shift})" for shift in (0, bits))
        return " ".join(assign(name, "b16", x) for name, x in zip(names, values, strict=True) if name != "tmp")
    if parts[0] == "mov" and given[1].startswith("{"):
        bits = 4 * WIDTH[parts[1]]
        low, high = (operand(name, f"u{bits}") for name in given[1].strip("{}").split(","))
        return assign(given[0], parts[1], f"(({TYPES[parts[1]]}){high} << {bits}) | {low}")
    kind = "pred" if parts[0] == "setp" else parts[-2] if parts[0] == "cvt" else parts[-1]
    return assign(given[0], kind, value_of(parts, given[1:]))


def translated(line: str) -> str:
    """Translate a line; empty: it has no instruction."""
    text = re.sub(r"//.*", "", line).strip()
    text = re.sub(r"^\{ \.reg \.\w+ tmp; (.*) \}$", r"\1", text)
    if not text or text.startswith((".reg", ".pragma")):
        return ""
    if text.endswith(":"):
        return f"{text.removeprefix('$')};"
    predicate, text = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([^;]+);", text).groups()
    code = statement(re.sub(r"\s+", " ", text))
    return f"if ({predicate.replace('%', '')}) {{ {code} }}" if predicate else code


def function(name: str, room: int, body: str) -> str:
    """Translate a kernel."""
    lines = []
    for kind, prefix, count in re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;", body):
        lines.append(f"{TYPES[kind]} {', '.join(f'{prefix}{k}' for k in range(int(count)))};")
    lines += filter(None, map(translated, body.split("\n")))
    text = "\n    ".join(lines).replace("ROOM", str(room))
    return (
        f"static void run_{name}(const unsigned char *parameters, "
        f"uint32_t block, uint32_t blocks, uint32_t thread) {{\n"
        f"    {text}\n}}\n"
        f"void {name}(const unsigned char *parameters, uint32_t blocks) {{\n"
        f"    for (uint32_t block = 0; block < blocks; block++)\n"
        f"        for (uint32_t thread = 0; thread < 256; thread++)\n"
        f"            run_{name}(parameters, block, blocks, thread);\n}}\n"
    )


def kernels(ptx: str) -> dict[str, tuple[int, str]]:
    """Return for each kernel in PTX the bytes of its parameters, and its body."""
    pattern = r"\.visible \.entry (\w+)\(\s+\.param \.align 8 \.b8 \w+\[(\d+)\]\s+\)[^{]+\{\n(.*?)\n\}\n"
    return {name: (int(room), body) for name, room, body in re.findall(pattern, ptx, re.DOTALL)}


def translate(found: dict[str, tuple[int, str]]) -> str:
    """Return C code for kernels."""
    return PRELUDE + "".join(function(name, *each) for name, each in found.items())


def loaded(found: dict[str, tuple[int, str]], *flags: str) -> ctypes.CDLL:
    """Return the library of the translated kernels."""
    fixed = ("-shared", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-Wl,-Bsymbolic")
    with tempfile.NamedTemporaryFile("w", suffix=".c") as file:
        file.write(translate(found))
        file.flush()
        return ctypes.CDLL(str(compiled("ptx.so", ["gcc", *(flags or ["-O0"]), *fixed], [file.name])))
