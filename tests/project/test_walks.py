"""The number of files of the package whose functions run in the first call, and in a later one."""

import json
import subprocess
import sys

import pytest

from crossreduce.kernels import native

# The numbers of today, which only go down; the aim is 14 files in the first call.
FIRST, LATER = 25, 3
WALK = """
import json, pathlib, sys
import numpy as np
import crossreduce as cr

root = pathlib.Path(cr.__file__).parent
trees = [{"w": np.full((2, 2), float(k)), "b": np.full(3, float(k))} for k in range(3)]

def walk():
    files = set()

    def called(frame, event, argument):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and root in path.parents:
            files.add(str(path.relative_to(root)))

    sys.setprofile(called)
    cr.all_reduce(trees, "mean")
    sys.setprofile(None)
    return sorted(files)

print(json.dumps([walk(), walk()]))
"""


@pytest.mark.skipif(native() is None, reason="without the compiled kernels calls take other ways")
def test_the_walk_of_all_reduce():
    """The first ``all_reduce`` of trees runs functions of at most ``FIRST`` files, a later one of ``LATER``."""
    ran = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, check=True)
    first, later = json.loads(ran.stdout)
    assert len(first) <= FIRST, first
    assert len(later) <= LATER, later
