"""Run command lines of ``crossreduce`` in new processes, and parse their output."""

import os
import re
import subprocess
import sys
import threading
from contextlib import suppress

# Matches a row of results in the format of nccl-tests, as parsers of that output do; other lines begin with "#".
ROW = re.compile(
    r"^ *(?P<size>\d+) +(?P<count>\d+) +(?P<type>\w+) +(?P<redop>\w+) +(?P<root>-?\d+)"
    r" +(?P<time>[\d.e+]+) +(?P<algbw>[\d.]+) +(?P<busbw>[\d.]+) +(?P<wrong>\d+|N/A)"
    r" +(?P<time_in>[\d.e+]+|N/A) +(?P<algbw_in>[\d.]+|N/A) +(?P<busbw_in>[\d.]+|N/A) +(?P<wrong_in>\d+|N/A)$",
    re.MULTILINE,
)


def run_python(code, *args, **environment):
    """Run Python code in a new process, without the variables that conftest sets for the frameworks."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "JAX_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=inherited | environment,
    )


def in_terminal(*args, bars=False, **environment):
    """Run a command line in a new process on a terminal, and return its output as plain text.

    With ``bars`` its standard error is the same terminal.
    """
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "crossreduce", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs if bars else None,
        env=os.environ | environment,
    )
    os.close(theirs)
    out = b""
    with process, suppress(OSError):  # Linux reports the end of a terminal as an error
        while part := os.read(ours, 4096):
            out += part
    os.close(ours)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.decode())


def with_bars(*args, **environment):
    """Run a command line in a new process whose standard error is a terminal, and that writes its output to a pipe.

    Return its exit code, its output, and its text on the terminal, without control codes.
    """
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "crossreduce", *map(str, args)]
    settings = {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | settings)
    os.close(theirs)
    shown, out = [], []

    def read():
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while part := os.read(ours, 4096):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with process:
        out.append(process.stdout.read())
    reader.join()
    os.close(ours)
    return process.returncode, out[0].decode(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode())


def run_without(module, *args):
    """Run a command line in a new process in which a module cannot be imported."""
    code = f"import sys; sys.modules[{module!r}] = None; from crossreduce.cli import main; main(sys.argv[1:])"
    return run_python(code, *args)


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
