"""One HTML file with a plan's model, the styles and the scripts.

Input: a ``Plan`` and a path. Output: a file. The page's content security policy forbids every request: it allows only
the scripts in the file, by their hashes. The model is compressed, so that large plans fit into the file.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import os
import sys
import zlib
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from ...errors import ArgumentError, shown
from ...planning import Plan
from ..files import replace_file, writable_target
from .losses import Loss, faster_plan, losses
from .model import PARTS, Advance, Beside, Detail, model, stages
from .positions import places

MOST_BYTES: Final = 1_000_000

# Read in this order; the libraries come first.
_SCRIPTS: Final = (
    "cytoscape.min.js", "uPlot.iife.min.js", "model.js", "wiring.js", "paint.js", "details.js", "plans.js", "losses.js",
    "rows.js", "charts.js", "explorer.js",
)  # fmt: skip
_STYLES: Final = ("uPlot.min.css", "explorer.css")
# Tried in this order, until the page is small enough.
_DETAILS: Final = (
    Detail(), Detail(PARTS // 2), Detail(PARTS // 4), Detail(PARTS // 4, lost=0),
    Detail(PARTS // 4, trees=False, lost=0),
)  # fmt: skip

__all__ = ["MOST_BYTES", "Beside", "report_html", "stages", "with_losses", "write_report"]


def write_report(plan: Plan, path: str | os.PathLike[str], beside: Plan | None = None) -> None:
    """Write a plan as one HTML file: see ``Plan.report``. A failure leaves the old file and no part of a new one."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).lower().endswith((".html", ".htm")):
        raise ArgumentError.of("a report must be a .html file.", shown(path), '"plan.html"')
    target = writable_target(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "This is a folder", str(target))
    if beside is not None and not isinstance(beside, Plan):
        raise ArgumentError.of("beside a plan, a report shows a Plan.", shown(beside), 'beside=plan("dgx-1v")')
    name = "" if beside is None else f"{beside.algorithm} beside it"
    replace_file(target, report_html(plan, beside=Beside(beside, name)).encode())


def with_losses(plan: Plan, advance: Advance) -> tuple[Plan, tuple[Loss, ...]]:
    """Return the plan, or a faster one that was found without a part of the topology, and the losses of parts."""
    lost = losses(plan, places(plan.topology), advance) if plan.rate is not None and plan.nbytes else ()
    return faster_plan(plan, lost), lost


def report_html(
    plan: Plan,
    advance: Advance = lambda _: None,
    beside: Beside = Beside(),  # noqa: B008 - it is a frozen value
    lost: tuple[Loss, ...] | None = None,
) -> str:
    """Return a plan as the text of an HTML file of at most ``MOST_BYTES`` bytes.

    ``advance`` is called with the name of each of the ``stages(plan, beside)`` stages when it begins. ``beside`` has
    what the page shows beside the plan. ``plan`` and ``lost`` are those of ``with_losses``, or ``lost`` is ``None``.

    Raises:
      ArgumentError: ``plan`` is not a ``Plan``, or its report would be larger.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError.of("a report requires a Plan.", shown(plan), 'plan("dgx-1v")')
    plan, lost = (plan, lost) if lost is not None else with_losses(plan, advance)
    for detail in _DETAILS:
        text = _page(model(plan, beside, lost, detail, advance), _about(plan, beside))
        if len(text.encode()) <= MOST_BYTES:
            return text
        advance = lambda _: None  # noqa: E731 - the stages that now run again have been reported
    problem = f"the report of this plan would have more than {MOST_BYTES} bytes."
    raise ArgumentError.of(problem, repr(plan.topology), "a plan for fewer devices")


def _about(plan: Plan, beside: Beside) -> str:
    """Return a line, as HTML, with the machine, the command that wrote the page, and the version."""
    version = sys.modules["crossreduce"].__version__  # the package imports this module, not the other way round
    machine = beside.machine or repr(plan.topology).removeprefix("Topology").strip("()")
    command = f" · <code>{html.escape(beside.command)}</code>" if beside.command else ""
    return f"{html.escape(machine)}{command} · crossreduce {version}"


def _page(content: dict[str, Any], about: str) -> str:
    """Return the page that shows a model."""
    packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)
    scripts = [_asset(name) for name in _SCRIPTS]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    parts = {
        "policy": policy,
        "title": html.escape(content["head"]),
        "about": about,
        "text": html.escape(content["text"]),
        "styles": "\n".join(_asset(name) for name in _STYLES),
        "data": base64.b64encode(packed).decode(),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    text = _asset("explorer.html")
    for name, value in parts.items():  # title, about and text are escaped, so they cannot contain such a mark
        assert f"<!--{name}-->" in text, name
        text = text.replace(f"<!--{name}-->", value)
    return text


@lru_cache(maxsize=32)
def _asset(name: str) -> str:
    """Return the text of a file of assets/."""
    return files(__package__).joinpath("assets", name).read_text("utf-8").strip()
