"""The command that launches ranks of a small program as ``crossreduce bench --launch`` does."""

import sys

LIMIT_S = 120

LAUNCHER = """
import sys
from crossreduce.cli.bench.launch import launch
sys.exit(launch([sys.executable, "-c", *sys.argv[2:]], int(sys.argv[1])))
"""


def launching(count, code, *args):
    """Return the command that launches ``count`` ranks of a program."""
    return [sys.executable, "-c", LAUNCHER, str(count), code, *args]
