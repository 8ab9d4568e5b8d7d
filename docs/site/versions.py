"""Write the list of the versions of a site: ``versions.json``, the same as ``versions.js``, and ``index.html``.

Input: a folder with one folder per built version, such as ``build/site/html/0.1.0``. Output: the three files in it.
Pages read ``versions.js``; ``index.html`` leads to the newest version.
Run: python docs/site/versions.py FOLDER
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


def key(version: str) -> tuple[bool, list[int]]:
    """Return what versions are sorted by: releases by their numbers, above all else."""
    return bool(re.fullmatch(r"\d+(\.\d+)*", version)), [int(number) for number in re.findall(r"\d+", version)]


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return the versions in ``folder``, newest first: the name, the folder and the pages of each.

    >>> sorted(["0.10.0", "0.9.1", "main"], key=key)
    ['main', '0.9.1', '0.10.0']
    """
    found = sorted((path.parent.name for path in folder.glob("*/index.html")), key=key, reverse=True)
    return [
        {
            "name": f"{version} (newest)" if number == 0 and len(found) > 1 else version,
            "version": version,
            "pages": pages(folder / version),
        }
        for number, version in enumerate(found)
    ]


def pages(folder: Path) -> list[str]:
    """Return the pages of a version, by their paths in its folder."""
    found = (path.relative_to(folder) for path in folder.rglob("*.html"))
    return sorted(path.as_posix() for path in found if path.parts[0] != "_static")


def main(folder: Path) -> None:
    versions = listed(folder)
    if not versions:
        sys.exit(f"{folder} contains no built version; try: scripts/docs")
    text = json.dumps(versions, indent=1)
    (folder / "versions.json").write_text(text + "\n")
    (folder / "versions.js").write_text(f"window.siteVersions = {text};\n")
    newest = versions[0]["version"]
    (folder / "index.html").write_text(
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>crossreduce</title>\n'
        f'<meta http-equiv="refresh" content="0; url={newest}/index.html">\n'
        f'<a href="{newest}/index.html">crossreduce {newest}</a>\n</html>\n'
    )
    (folder / ".nojekyll").touch()  # GitHub Pages would leave out folders whose names start with "_"
    print(f"{len(versions)} versions; newest: {newest}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
