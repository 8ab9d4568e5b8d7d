"""Faults of the CUDA engine: changes of one place of its source files, which a check of ``cuda_runs.py`` must find.

``package`` makes a copy of the package that consists of links to its files, apart from the changed one.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from paths import ROOT

import crossreduce

SOURCE = ROOT / "src/crossreduce"
PACKAGE = Path(crossreduce.__file__).parent  # with its compiled modules, where it is installed
ENGINE = "engines/cuda"
NATIVE = SOURCE / ENGINE / "native"
FLAGS = ("-std=c++17", "-O0", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread")
DRAWS, DROPPED = ("full", "draws", 98), ("full", "dropped", 24)
MANY = "full", "many", 3
MOVES, MOVES_DROPPED = ("none", "draws", 98), ("none", "dropped", 24)
T = TypeVar("T")


def some_faults(faults: Sequence[T]) -> Sequence[T]:
    """Return every fourth fault; all of them if the environment variable ``CROSSREDUCE_FAULTS`` is ``all``.

    Each takes a build, and shows that the tests would find it: that is worth its minutes only where they change.
    """
    return faults if os.environ.get("CROSSREDUCE_FAULTS") == "all" else faults[::4]


class Fault(NamedTuple):
    """A fault: the file, what is there, what is put there, and the peers, check and count that find it."""

    file: str
    old: str
    new: str
    found_by: tuple[str, str, int] = DRAWS


STEPS = [
    Fault("steps.py", "known.setdefault((place, read)", "known.setdefault((0, read)"),
    Fault("steps.py", "(*self._wanted.get(node, ()), position)", "(position,)"),
    Fault("steps.py", "bits[0] |= 1 << first", "bits[0] |= 0"),
    Fault("steps.py", "bits[2 if bits[1] & last else 1] |= last", "bits[1] |= last"),
    Fault("steps.py", "last = 1 << (len(leaves) - 1)", "last = 1 << first"),
    Fault("steps.py", "return node if self._readable[place][self._homes[node]]", "return node if True", MOVES),
    Fault("steps.py", "if self._with_out:", "if False:"),
    Fault("steps.py", "after=tuple(sorted(readers))", "after=tuple(sorted(readers))[:1]"),
    Fault("steps.py", "if self._homes[node] == step.device)", "if self._homes[node] == 0)"),
    Fault("steps.py", "if len(readers) == 1)", "if len(readers) >= 1)"),
    Fault("steps.py", "while len(sources) > MAX_STEPS and", "while False and", MANY),
    Fault("steps.py", "(first, *sources[MAX_STEPS:])", "(*sources[MAX_STEPS:], first)", MANY),
]
OPERATIONS = [
    Fault("operations.py", "position, start * itemsize(dtype))", "position, start)"),
    Fault("operations.py", "rows = [(tensor * self._sources", "rows = [(tensor * self._destinations"),
    Fault("operations.py", "first_tensor += len(spans)", "first_tensor += 0"),
    Fault("operations.py", "(high - low) * k // count for", "(high - low) * k // (count + (k > 1)) for"),
    Fault("operations.py", "if begin < stop and start < end and begin < end", "if begin < stop and start <= end"),
    Fault("operations.py", "a[0] == b[0] and a[1] + last.size * nbytes == b[1]", "a[0] == b[0]"),
    Fault("operations.py", "* self._destinations + k, start * size)", "* self._destinations + k, start * 4)"),
    Fault("operations.py", "            at += (stop - start) * size\n", "            at += 16\n"),
    Fault("operations.py", "        self._scratch[device] = at\n", "        self._scratch.setdefault(device, at)\n"),
    Fault("operations.py", "self._numbers.dtype) << k", "self._numbers.dtype) << 0"),
    Fault("operations.py", "count, bool(wide), kind", "count, False, kind"),
    Fault(
        "operations.py",
        "kernel, divisor = copy_kernel(self._dtype(kind)), 1",
        'kernel, divisor = copy_kernel("int8"), 1',
    ),
    Fault("operations.py", 'self._numbers.divisor if kind == "final" else 1', "self._numbers.divisor"),
    Fault("operations.py", "                made.after.add(maker)\n", "                pass\n"),
    Fault(
        "operations.py",
        "        made.after |= after\n        return _Located(targets[0], made, not",
        "        return _Located(targets[0], made, not",
    ),
    Fault("operations.py", "mine = source in steps.read_once and", "mine ="),
    Fault("operations.py", " and steps.homes[source] == step.device", "", ("pairs", "draws", 98)),
    Fault("operations.py", 'steps.kinds[source] == kind == "partial"', 'kind == "partial"'),
    Fault(
        "operations.py",
        "before = after | ({value.maker} if value.maker is not None else set())",
        "before = after",
        MOVES,
    ),
    Fault("operations.py", "if not value.is_whole:", "if False:", MOVES),
    Fault("operations.py", "targets[0] if not many or not step.destinations else", "targets[0] if True else", MOVES),
    Fault("operations.py", "(last - first) * size  #", "(last - first - 1) * size  #", MOVES),
    Fault("operations.py", "targets if direct is not targets[0] else targets[1:]", "targets[1:]", MOVES),
    Fault("operations.py", "part, {moved}, key + 2", "part, set(), key + 2", MOVES),
    Fault("operations.py", "if copy else each.device", "if copy else 0"),
    Fault("operations.py", "return {work.src, work.dst}", "return {work.src}", MOVES),
    Fault("operations.py", "self._result_devices[(row - self._first_result) % len(self._result_devices)]", "0"),
    Fault("operations.py", "self._source_devices[row % len(self._source_devices)]", "work.device"),
]
ORDER = [
    Fault("operations.py", "                self._join(ended, self._at[before])\n", "", DROPPED),
    Fault("operations.py", "touched - {stream} if device not in ended}", "touched - {stream}}", DROPPED),
    Fault("operations.py", "if foreign and 0 not in ended:", "if foreign and len(self._at) < 3:", MOVES),
    Fault("operations.py", "{device for device in touched - {stream}", "{device for device in set()"),
    Fault("operations.py", "self.begins |= foreign - {0}", "self.begins |= set()"),
    Fault("operations.py", "        ended[stream] = number\n", "        pass\n", DROPPED),
    Fault(
        "operations.py", "self._touched[device][stream] = number", "self._touched[device].setdefault(stream, number)"
    ),
    Fault("operations.py", "            if missing and device:\n", "            if False:\n"),
    Fault("operations.py", "key=lambda item: -item[1]", "key=lambda item: item[1]", MOVES_DROPPED),
    Fault(
        "operations.py",
        "                self.ends.add(last)\n",
        "                self.ends.update(list(self.ends)[:1] or [last])\n",
    ),
    Fault("operations.py", "into[stream] = max(", "into[stream] = min(", DROPPED),
]
OTHERS = [
    Fault("launches.py", "mask[3] >> k & 1 if k < MAX_STEPS else 0", "1"),
    Fault(
        "__init__.py",
        "if k in placed.host_sources else x",
        "if k in placed.host_sources[:1] else x",
        ("full", "hosts", 6),
    ),
    Fault("launches.py", "orders.setdefault(part.order, len(orders))", "orders.setdefault(part.order, 0)"),
    Fault("launches.py", "if large else SMALL_NBYTES", "if True else SMALL_NBYTES"),
    Fault("launches.py", "most = max(most, now)", "most = 1"),
    Fault("launches.py", "float(launch.divisor)", "1.0"),
    Fault("kernels.py", '"float16": 3, "bfloat16": 4', '"float16": 4, "bfloat16": 3'),
    Fault("kernels.py", "min(16 // nbytes[0], 32 // nbytes[1], 8)", "min(16 // nbytes[0], 8)"),
    Fault("kernels.py", 'short.replace("i", "u")', "short"),
    Fault("plans.py", "waits if k == 0 else ()", "waits if k == last else ()"),
    Fault("plans.py", "event if k == last else -1)", "event if k == 0 else -1)"),
    Fault("__init__.py", "memory.scratch(size, device) if", "memory.scratch(max(size // 2, 1), device) if"),
    Fault("__init__.py", "memory.stream(device) for device in made", "memory.stream(made.devices[0]) for _ in made"),
    Fault("__init__.py", "_IN_GRAPHS.append((scratch, results))", "pass", ("none", "captures", 24)),
    Fault("driver.py", "= call, device, code", "= call, device, 0", ("full", "failures", 12)),
]
COMPILED = [
    Fault("native/plan.cpp", "if (its_period > period) head", "if (its_period < period) head"),
    Fault("native/plan.cpp", "(one.size - std::max(head, 0) + units", "(one.size + units"),
    Fault("native/plan.cpp", "launch.divisor = from.divisor;", "launch.divisor = 1;"),
    Fault(
        "native/plan.cpp",
        "    context.use(device);\n    require(driver_of_plan().launch",
        "    require(driver_of_plan().launch",
    ),
    Fault("native/plan.cpp", "event == BEGIN ? begin_event(0)", "event == BEGIN ? begin_event(1)"),
    Fault("native/plan.cpp", "if (!alone) record(context, queues, 0, begin_event(0));", ""),
    Fault("native/plan.cpp", "            call.stream_synchronize(queues[k]);\n", "", ("none", "failures", 12)),
    Fault("native/plan.cpp", "        if (!capturing) {", "        if (true) {", ("none", "captures", 24)),
    Fault("native/plan.cpp", "            call.event_destroy(events_[k]);\n", "", ("full", "failures", 3)),
    Fault("native/plan.cpp", "            call.stream_destroy(one.stream);\n", "", ("none", "captures", 24)),
    Fault("native/plan.cpp", "return busy == 0;", "return true;", ("none", "captures", 24)),
    Fault("native/plan.cpp", "push_back(streams[static_cast<size_t>(one.stream)].device)", "push_back(0)"),
    Fault("native/devices.cpp", "device.copy_streams[to]", "device.copy_streams[0]", MOVES_DROPPED),
    Fault("native/devices.cpp", "if (current_ != before_) driver_->", "if (false) driver_->", ("full", "failures", 12)),
    Fault("native/devices.cpp", "if (!can) return false;", "if (!can) return true;", MOVES),
    Fault("native/devices.cpp", "if (code != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) require", "require"),
]
FAULTS = [*STEPS, *OPERATIONS, *ORDER, *OTHERS, *COMPILED]


def package(folder, fault, objects):
    """Make a copy of the package with a fault in a new folder. ``objects``: those of ``compiled``."""
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
    (made,) = compiled([changed], folder)
    link(into / ENGINE, [made if path.stem == changed.stem else path for path in objects])
    return folder


def compiled(sources, folder):
    """Return the compiled forms of source files of the engine."""
    made = []
    includes = [
        f"-I{NATIVE}",
        *(f"-I{folder}" for folder in (SOURCE / "native").iterdir()),
        f"-I{sysconfig.get_path('include')}",
    ]
    for source in sources:
        made.append(folder / f"{source.stem}.o")
        command = ["g++", *FLAGS, *includes, "-c", str(source), "-o", str(made[-1])]
        subprocess.run(command, check=True, timeout=100)
    return made


def link(folder, objects):
    """Make the compiled module of the engine in a folder instead of the one there."""
    for path in folder.glob("_cuda.*so"):
        path.unlink()
    subprocess.run(
        ["g++", "-shared", "-pthread", *map(str, objects), "-o", str(folder / "_cuda.so")], check=True, timeout=100
    )
