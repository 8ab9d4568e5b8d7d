"""Programs and libraries that tests compile, kept by a hash of their contents in one folder of the temporary directory.

Workers of pytest and later runs share them. What no run has used for a week is deleted.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

WEEK_S = 7 * 24 * 3600


def compiled(name, command, sources, included=()):
    """Return the path of what a compiler makes of source files.

    The command lacks the sources and ``-o``. ``included``: further files whose contents it depends on.
    """
    sources = [Path(path) for path in sources]
    key = hashlib.sha256(repr((name, command)).encode())
    for path in (*sources, *sorted(included)):
        key.update(path.read_bytes())
    base = Path(tempfile.gettempdir(), f"crossreduce_tests_{os.getuid()}")
    folder = base / key.hexdigest()[:24]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    assert base.stat().st_uid == os.getuid(), f"{base} belongs to another user"
    os.utime(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            for old in base.iterdir():
                if time.time() - old.stat().st_mtime > WEEK_S:
                    shutil.rmtree(old, ignore_errors=True)
            partial = folder / f"partial_{name}"
            subprocess.run([*command, *map(str, sources), "-o", str(partial)], check=True, timeout=300)
            partial.rename(folder / name)
    return folder / name
