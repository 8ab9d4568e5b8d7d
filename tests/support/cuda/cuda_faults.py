"""Faults of the CUDA engine: changes of one place of its source files, which a check of ``cuda_runs.py`` must find.

``package`` makes a copy of the package that consists of links to its files, apart from the changed one.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

from compiled import compiled
from paths import ROOT

import crossreduce

SOURCE = ROOT / "src/crossreduce"
PACKAGE = Path(crossreduce.__file__).parent  # with its compiled modules, where it is installed
ENGINE = "engines/cuda"
NATIVE = SOURCE / ENGINE / "native"
INCLUDES = (NATIVE, *(SOURCE / "native").iterdir(), sysconfig.get_path("include"))
FLAGS = ("-std=c++17", "-O0", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread")
COMPILE = ["g++", *FLAGS, "-c", *(f"-I{at}" for at in INCLUDES)]
HEADERS = [*NATIVE.glob("*.hpp"), *NATIVE.glob("*.inc"), *(SOURCE / "native").glob("*/*.hpp")]
DRAWS, DROPPED = ("full", "draws", 98), ("full", "dropped", 24)
MANY = "full", "many", 3
MOVES, MOVES_DROPPED = ("none", "draws", 98), ("none", "dropped", 24)


class Fault(NamedTuple):
    """A fault: the file, the old and the new text, and the peers, check and count that detect it."""

    file: str
    old: str
    new: str
    found_by: tuple[str, str, int] = DRAWS


TABLE = {
    "fusion.py": [
        ("known.setdefault((place, read)", "known.setdefault((0, read)"),
        ("(*self._wanted.get(node, ()), position)", "(position,)"),
        ("bits[0] |= 1 << first", "bits[0] |= 0"),
        ("bits[2 if bits[1] & last else 1] |= last", "bits[1] |= last"),
        ("last = 1 << (len(leaves) - 1)", "last = 1 << first"),
        ("return node if self._readable[place][self._homes[node]]", "return node if True", MOVES),
        ("if self._with_out:", "if False:"),
        ("after=tuple(sorted(readers))", "after=tuple(sorted(readers))[:1]"),
        ("if self._homes[node] == step.device)", "if self._homes[node] == 0)"),
        ("if len(readers) == 1)", "if len(readers) >= 1)"),
        ("while len(sources) > MAX_STEPS and", "while False and", MANY),
        ("(first, *sources[MAX_STEPS:])", "(*sources[MAX_STEPS:], first)", MANY),
    ],
    "batching.py": [
        ("position, start * itemsize(dtype))", "position, start)"),
        ("rows = [(tensor * self._sources", "rows = [(tensor * self._destinations"),
        ("first_tensor += len(spans)", "first_tensor += 0"),
        ("(high - low) * k // count for", "(high - low) * k // (count + (k > 1)) for"),
        ("if begin < stop and start < end and begin < end", "if begin < stop and start <= end"),
        ("a[0] == b[0] and a[1] + last.size * nbytes == b[1]", "a[0] == b[0]"),
        ("* self._destinations + k, start * size)", "* self._destinations + k, start * 4)"),
        ("            at += (stop - start) * size\n", "            at += 16\n"),
        ("        self._scratch[device] = at\n", "        self._scratch.setdefault(device, at)\n"),
        ("self._numbers.dtype) << k", "self._numbers.dtype) << 0"),
        ("count, bool(wide), kind", "count, False, kind"),
        ("kernel, divisor = copy_kernel(self._dtype(kind)), 1", 'kernel, divisor = copy_kernel("int8"), 1'),
        ('self._numbers.divisor if kind == "final" else 1', "self._numbers.divisor"),
        ("                launch.after.add(maker)\n", "                pass\n"),
        (
            "        launch.after |= after\n        return _Located(targets[0], launch, not",
            "        return _Located(targets[0], launch, not",
        ),
        ("mine = source in steps.read_once and", "mine ="),
        (" and steps.homes[source] == step.device", "", ("pairs", "draws", 98)),
        ('steps.kinds[source] == kind == "partial"', 'kind == "partial"'),
        ("before = after | ({value.maker} if value.maker is not None else set())", "before = after", MOVES),
        ("if not value.is_whole:", "if False:", MOVES),
        ("targets[0] if not many or not step.destinations else", "targets[0] if True else", MOVES),
        ("(last - first) * size  #", "(last - first - 1) * size  #", MOVES),
        ("targets if direct is not targets[0] else targets[1:]", "targets[1:]", MOVES),
        ("part, {moved}, key + 2", "part, set(), key + 2", MOVES),
        ("if copy else each.device", "if copy else 0"),
        ("return {work.src, work.dst}", "return {work.src}", MOVES),
        ("self._result_devices[(row - self._first_result) % len(self._result_devices)]", "0"),
        ("self._source_devices[row % len(self._source_devices)]", "work.device"),
    ],
    "streams.py": [
        ("                self._join(ended, self._at[before])\n", "", DROPPED),
        ("touched - {stream} if device not in ended}", "touched - {stream}}", DROPPED),
        ("if foreign and 0 not in ended:", "if foreign and len(self._at) < 3:", MOVES),
        ("{device for device in touched - {stream}", "{device for device in set()"),
        ("self.begins |= foreign - {0}", "self.begins |= set()"),
        ("        ended[stream] = number\n", "        pass\n", DROPPED),
        ("self._touched[device][stream] = number", "self._touched[device].setdefault(stream, number)"),
        ("            if missing and device:\n", "            if False:\n"),
        ("key=lambda item: -item[1]", "key=lambda item: item[1]", MOVES_DROPPED),
        ("                self.ends.add(last)\n", "                self.ends.update(list(self.ends)[:1] or [last])\n"),
        ("into[stream] = max(", "into[stream] = min(", DROPPED),
    ],
    "encoding.py": [
        ("mask[3] >> k & 1 if k < MAX_STEPS else 0", "1"),
        ("orders.setdefault(part.order, len(orders))", "orders.setdefault(part.order, 0)"),
        ("if large else SMALL_NBYTES", "if True else SMALL_NBYTES"),
        ("most = max(most, now)", "most = 1"),
        ("float(launch.divisor)", "1.0"),
        ("waits if k == 0 else ()", "waits if k == last else ()"),
        ("event if k == last else -1)", "event if k == 0 else -1)"),
    ],
    "__init__.py": [
        ("if k in placed.host_sources else x", "if k in placed.host_sources[:1] else x", ("full", "hosts", 6)),
        ("memory.scratch(size, device) if", "memory.scratch(max(size // 2, 1), device) if"),
        ("memory.stream(device) for device in made", "memory.stream(made.devices[0]) for _ in made"),
        ("_IN_GRAPHS.append((scratch, results))", "pass", ("none", "captures", 24)),
    ],
    "kernels.py": [
        ('"float16": 3, "bfloat16": 4', '"float16": 4, "bfloat16": 3'),
        ("min(16 // nbytes[0], 32 // nbytes[1], 8)", "min(16 // nbytes[0], 8)"),
        ('short.replace("i", "u")', "short"),
    ],
    "driver.py": [
        ("= call, device, code", "= call, device, 0", ("full", "failures", 12)),
    ],
    "native/plan.cpp": [
        ("if (its_period > period) head", "if (its_period < period) head"),
        ("(one.size - std::max(head, 0) + units", "(one.size + units"),
        ("launch.divisor = from.divisor;", "launch.divisor = 1;"),
        ("    context.use(device);\n    require(driver_of_plan().launch", "    require(driver_of_plan().launch"),
        ("event == BEGIN ? begin_event(0)", "event == BEGIN ? begin_event(1)"),
        ("if (!alone) record(context, queues, 0, begin_event(0));", ""),
        ("            call.stream_synchronize(queues[k]);\n", "", ("none", "failures", 12)),
        ("        if (!capturing) {", "        if (true) {", ("none", "captures", 24)),
        ("            call.event_destroy(events_[k]);\n", "", ("full", "failures", 3)),
        ("            call.stream_destroy(one.stream);\n", "", ("none", "captures", 24)),
        ("return busy == 0;", "return true;", ("none", "captures", 24)),
        ("push_back(streams[static_cast<size_t>(one.stream)].device)", "push_back(0)"),
    ],
    "native/devices.cpp": [
        ("device.copy_streams[to]", "device.copy_streams[0]", MOVES_DROPPED),
        ("if (current_ != before_) driver_->", "if (false) driver_->", ("full", "failures", 12)),
        ("if (!can) return false;", "if (!can) return true;", MOVES),
        ("if (code != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) require", "require"),
    ],
}
FAULTS = [Fault(file, *fault) for file, faults in TABLE.items() for fault in faults]


def package(folder, fault):
    """Make a copy of the package with a fault in a new folder, and return that."""
    text = (SOURCE / ENGINE / fault.file).read_text()
    assert text.count(fault.old) == 1, f"the text of a fault occurs {text.count(fault.old)} times: {fault}"
    changed = folder / "changed" / fault.file
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(fault.old, fault.new))
    into = folder / "crossreduce"
    for inner in ("", "engines", ENGINE):
        (into / inner).mkdir()
        for path in (PACKAGE / inner).iterdir():
            if path.name not in ("engines", "cuda", "__pycache__"):
                (into / inner / path.name).symlink_to(path)
    if changed.suffix == ".py":
        (into / ENGINE / fault.file).unlink()
        changed.rename(into / ENGINE / fault.file)
        return folder
    for path in (into / ENGINE).glob("_cuda.*so"):
        path.unlink()
    sources = [changed if path.name == changed.name else path for path in sorted(NATIVE.glob("*.cpp"))]
    objects = [compiled(f"{path.stem}.o", COMPILE, [path], HEADERS) for path in sources]
    (into / ENGINE / "_cuda.so").symlink_to(compiled("_cuda.so", ["g++", "-shared", "-pthread"], objects))
    return folder
