"""Run command lines of ``crossreduce`` in processes of their own, and parse their output."""

import logging
import os
import re
import select
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import NamedTuple

# Matches a row of results in the format of nccl-tests, as parsers of that output do; other lines begin with "#".
ROW = re.compile(
    r"^ *(?P<size>\d+) +(?P<count>\d+) +(?P<type>\w+) +(?P<redop>\w+) +(?P<root>-?\d+)"
    r" +(?P<time>[\d.e+]+) +(?P<algbw>[\d.]+) +(?P<busbw>[\d.]+) +(?P<wrong>\d+|N/A)"
    r" +(?P<time_in>[\d.e+]+|N/A) +(?P<algbw_in>[\d.]+|N/A) +(?P<busbw_in>[\d.]+|N/A) +(?P<wrong_in>\d+|N/A)$",
    re.MULTILINE,
)
STREAMS = ("stdin", "stdout", "stderr")


def run_python(code, *args, **environment):
    """Run Python code in a new process, without the variables that conftest sets for the frameworks."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_"))}
    command = [sys.executable, "-c", code, *map(str, args)]
    around = inherited | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=around)


def run_without(module, *args):
    """Run a command line in a new process in which a module cannot be imported."""
    code = f"import sys; sys.modules[{module!r}] = None; from crossreduce.cli import main; main(sys.argv[1:])"
    return run_python(code, *args)


class Ran(NamedTuple):
    """``out`` and ``error``: the texts in pipes; ``shown``: the text on the terminal, without control codes."""

    code: int
    out: str
    error: str
    shown: str


def forked(function, *args, terminal=(), begun=None, **environment):
    """Call ``function(args)`` in a fork of this process, which saves the imports of a new one, and return how it ran.

    It must use no framework but NumPy. ``terminal``: those of STREAMS that are one terminal. ``begun``: called with the
    number of the process.
    """
    import pty

    ours, theirs = pty.openpty()
    pipes = [os.pipe() for _ in STREAMS[1:]]
    pid = os.fork()
    if not pid:
        piped = [os.open(os.devnull, os.O_RDONLY), *(writer for _, writer in pipes)]
        chosen = [theirs if name in terminal else other for name, other in zip(STREAMS, piped, strict=True)]
        _child(function, list(map(str, args)), chosen, {"TERM": "xterm-256color", **environment})
    for descriptor in (theirs, *(writer for _, writer in pipes)):
        os.close(descriptor)
    try:
        if begun:
            begun(pid)
        texts = {ours: b"", **{reader: b"" for reader, _ in pipes}}
        open_ = set(texts)
        while open_:
            ready, _, _ = select.select(sorted(open_), [], [], 200)
            assert ready, "the process wrote nothing for 200 s"
            for descriptor in ready:
                part = b""
                with suppress(OSError):  # Linux reports the end of a terminal as an error
                    part = os.read(descriptor, 1 << 16)
                texts[descriptor] += part
                open_ -= set() if part else {descriptor}
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
        for descriptor in (ours, *(reader for reader, _ in pipes)):
            os.close(descriptor)
    codes, out, error = (text.decode() for text in texts.values())
    return Ran(os.waitstatus_to_exitcode(status), out, error, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", codes))


def _child(function, args, descriptors, environment):
    """Call a function as the program of this process, and end without the exit handlers of the test's process."""
    code = 70
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in its background ignore it
        os.environ.update(environment)
        logging.root.handlers.clear()  # those of pytest
        try:
            function(args)
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
    finally:
        os._exit(code)


def forked_command(*args, **options):
    """Run a command line of ``crossreduce`` by ``forked``."""
    from crossreduce.cli import main

    return forked(main, *args, **options)


def expanded(text):
    """Return the names that ``crossreduce.cli.support.output.group_names`` joined."""
    names = []
    for part in text.split():
        match = re.fullmatch(r"(.*?)([0-9][0-9,-]*)", part)
        for run in match[2].split(",") if match else [""]:
            first, _, last = run.partition("-")
            numbers = range(int(first), int(last or first) + 1) if run else [""]
            names += [f"{match[1] if match else part}{number}" for number in numbers]
    return names


def plan_shown(plan, line, width=80):
    """Return the text of a plan, with the lines about the machine and the command after the first."""
    from crossreduce.planning.explain import wrapped

    words = line.split()
    hosts = ", 2 hosts" if "--hosts 2" in line else ""
    part = ", only a part of it" if "--devices" in line or "--without" in line else ""
    head, *rest = plan.explain(width).splitlines()
    about = [f"  machine   {words[1]}{hosts}{part}", f"  command   crossreduce {line}"]
    return "\n".join([head, wrapped(about, width), *rest]) + "\n"
