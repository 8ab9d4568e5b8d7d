"""The page of ``crossreduce doctor --report``: one HTML file without any request to a network.

Input: the incidents that ``doctor`` found, and their dumps. Output: HTML; each private function returns or yields some.
All texts from dumps are escaped, since users choose the names of groups and the descriptions of calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from ...errors import rank_list
from ...observe.flight_recorder import Dump, Thread
from .diagnosis import Incident, RankState
from .style import SCRIPT, STYLE
from .timeline import Axis, CallBar, RankRow, Timeline, seconds_text, timeline

_TICKS: Final = 5  # the number of intervals between ticks
_HOSTS: Final = 16  # that the head of a group names
_FINE: Final = 8  # the number of intervals into which finer ticks divide each interval when the user zooms in
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(groups: Sequence[tuple[Incident, Sequence[Dump]]], problems: Sequence[str], about: str) -> str:
    """Return the page. For each broken group it has the findings, the time line, a table of the ranks, and stacks.

    ``about`` is a line about the command that wrote the page.
    """
    lines = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<title>crossreduce doctor</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>',
        f'<h1>crossreduce doctor: the last calls of all ranks</h1><p class="dim" id="about">{escape(about)}</p>',
    ]
    for number, (incident, dumps) in enumerate(groups):
        lines += _group(number, incident, dumps)
    if problems:
        lines += ["<h2>Files that could not be read</h2><ul>"]
        lines += [f"<li>{escape(problem)}</li>" for problem in problems] + ["</ul>"]
    return "\n".join([*lines, f"</main><script>{SCRIPT}</script></body></html>\n"])


def _group(number: int, incident: Incident, dumps: Sequence[Dump]) -> Iterator[str]:
    yield f'<section><h2>Group "{escape(incident.group)}"</h2><p class="dim">{escape(incident.about)}</p>'
    hosts = dict.fromkeys(dump.hostname for dump in sorted(dumps, key=lambda dump: dump.rank))
    listed = [f"{'hosts' if len(hosts) > 1 else 'host'} {', '.join(list(hosts)[:_HOSTS])}"]
    listed += [f"and {len(hosts) - _HOSTS} more"] if len(hosts) > _HOSTS else []
    yield f'<p class="dim">{escape(" ".join(listed))}</p>'
    for versions in sorted({tuple(sorted(dump.versions.items())) for dump in dumps}):
        yield f'<p class="dim">{escape(", ".join(f"{name} {version}" for name, version in versions))}</p>'
    yield '<ul class="findings">'
    for k, finding in enumerate(incident.findings):
        yield f"<li{' class=bad' if k == 0 and incident.behind else ''}>{escape(finding)}</li>"
    yield f"</ul><h3>The ranks raised</h3><pre>{escape(incident.raised)}</pre>"
    yield from _timeline(number, incident, timeline(dumps))
    yield from _table(number, incident.ranks, {*incident.behind, *incident.missing})
    yield from _stacks(dumps)
    yield "</section>"


def _timeline(number: int, incident: Incident, line: Timeline) -> Iterator[str]:
    states = {state.rank: state for state in incident.ranks}
    blamed = {*incident.behind, *incident.missing}
    yield f'<h3 id="g{number}">Time line</h3><div class="timeline">'
    yield '<div class="bar-tools"><span>'
    for text, scale, label in (("&minus;", "0.5", "zoom out"), ("+", "2", "zoom in"), ("1:1", "0", "show everything")):
        yield f'<button type="button" data-scale="{scale}" aria-label="{label}">{text}</button>'
    yield "</span>"
    if blamed and len(blamed) < len(states):
        yield '<button type="button" class="filter" aria-pressed="false">only ranks that are behind or unknown</button>'
    keys = (("odd", "call of odd number"), ("even", "of even number"), ("wait", "waits for ranks of its host"))
    for kind, text in (*keys, ("odd hung", "did not end"), ("pause", "a long pause, shortened")):
        yield f'<span class="key"><i class="{kind}"></i>{text}</span>'
    yield "</div>"
    notes = ["Times are relative to the moment when the first rank aborted the group, the dashed line."]
    if line.uncertainty_s is not None:
        how = "unknown" if line.uncertainty_s == float("inf") else f"up to {seconds_text(line.uncertainty_s)}"
        notes.append(
            "Hosts are aligned by the calendar times in their dumps, with an error of "
            f"{how}, and the error with which the hosts' clocks are set. Compare times of one host only."
        )
    yield f'<p class="dim">{" ".join(notes)} Arrow keys move between calls, + and - zoom.</p>'
    yield '<div class="lines" role="region" aria-label="time line" tabindex="-1"><div class="inner">'
    yield f'<div class="row head"><span class="label">rank</span><div class="track">{_ticks(line.axis)}</div></div>'
    host = None
    marks = "".join(_span("pause", pause.begin, pause.end) for pause in line.axis.pauses)
    marks += f'<span class="abort" style="left:{100 * line.axis.place(0.0):.6g}%"></span>'
    names: dict[int, str | None] = {}  # of the hosts
    for each in line.rows:
        names.setdefault(each.host, states[each.rank].hostname)
    several = len(names) > 1
    for row in sorted(line.rows, key=lambda row: (row.host, row.rank)):
        if several and row.host != host:
            host = row.host
            yield f'<div class="hostline"><span>host {host}: {escape(names[host] or "unknown")}</span></div>'
        yield _row(number, row, states[row.rank], line.axis, marks, row.rank in blamed)
    yield '</div></div><div class="info" role="status" aria-live="polite">Select a call to see it here.</div></div>'


def _row(number: int, row: RankRow, state: RankState, axis: Axis, marks: str, blamed: bool) -> str:
    process = "no process" if state.pid is None else f"pid {state.pid}"
    mark = ", behind" if blamed and row.bars is not None else ""
    label = f'rank {row.rank}<span class="more">, {process}{mark}</span>'
    kind = "row blamed" if blamed else "row"
    head = f'<div class="{kind}" id="g{number}r{row.rank}"><span class="label">{label}</span>'
    if row.bars is None:
        return f'{head}<div class="track"><span class="none">no dump describes this rank</span></div></div>'
    bars = "".join(_bar(f"g{number}r{row.rank}o", row.rank, bar, axis) for bar in row.bars)
    words = f"rank {row.rank}: {len(row.bars)} calls; the last one is {state.state}"
    return f'{head}<div class="track" role="listbox" tabindex="0" aria-label="{words}">{bars}{marks}</div></div>'


def _bar(prefix: str, rank: int, bar: CallBar, axis: Axis) -> str:
    """Return the bar of a call, with a label for screen readers. The first part is the time that the rank waited."""
    begin, end = axis.place(bar.begin_s), axis.place(bar.end_s)
    kind = ("odd" if bar.sequence % 2 else "even") + ("" if bar.ended else " hung")
    text = f"rank {rank}, op {bar.sequence}, {bar.text}: began at {seconds_text(bar.begin_s)}, "
    took = seconds_text(bar.end_s - bar.begin_s)
    text += f"took {took}" if bar.ended else f"had not ended after {took}"
    waited = ""
    if bar.waited_s > 0:
        text += f", of which it waited {seconds_text(bar.waited_s)} for ranks of its host"
        share = (axis.place(bar.begin_s + bar.waited_s) - begin) / (end - begin) if end > begin else 1.0
        waited = f'<i style="width:{100 * share:.4g}%"></i>'
    place = f"left:{100 * begin:.6g}%;width:{100 * (end - begin):.6g}%"
    return (
        f'<b id="{prefix}{bar.sequence}" role="option" aria-selected="false" class="{kind}" data-op="{bar.sequence}" '
        f'style="{place}" aria-label="{escape(text)}">{waited}</b>'
    )


def _span(kind: str, begin: float, end: float, text: str = "") -> str:
    return f'<span class="{kind}" style="left:{100 * begin:.6g}%;width:{100 * (end - begin):.6g}%">{text}</span>'


def _ticks(axis: Axis) -> str:
    parts = []
    for k in range(_TICKS * _FINE + 1):
        place = k / (_TICKS * _FINE)
        kind = "tick first" if place == 0 else "tick last" if place == 1 else "tick fine" if k % _FINE else "tick"
        parts.append(f'<span class="{kind}" style="left:{100 * place:.4g}%">{seconds_text(axis.time(place))}</span>')
    cuts = [
        _span("cut", pause.begin, pause.end, f"<span>{seconds_text(pause.seconds)}</span>") for pause in axis.pauses
    ]
    return "".join([*parts, *cuts])


def _table(number: int, states: Sequence[RankState], blamed: set[int]) -> Iterator[str]:
    yield '<h3>Ranks when the group broke</h3><div class="scroll" tabindex="0" role="region" aria-label="ranks">'
    yield "<table><thead><tr>"
    for name in ("rank", "host", "pid", "state", "for", "op", "call", "dump"):
        yield f'<th scope="col">{name}</th>'
    yield "</tr></thead><tbody>"
    for state in states:
        cells = [state.hostname or "-", str(state.pid or "-"), state.state]
        cells += ["" if state.seconds is None else seconds_text(state.seconds), str(state.sequence or "-")]
        cells += [state.text or "-", "yes" if state.dumped else "no"]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        kind = ' class="blamed"' if state.rank in blamed else ""
        yield f'<tr{kind}><th scope="row"><a href="#g{number}r{state.rank}">{state.rank}</a></th>{row}</tr>'
    yield "</tbody></table></div>"


def _stacks(dumps: Sequence[Dump]) -> Iterator[str]:
    """Yield the stacks of all threads. Ranks with the same stacks share an entry."""
    ranks_of: dict[tuple[Thread, ...], list[int]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        ranks_of.setdefault(dump.threads, []).append(dump.rank)
    if not ranks_of:
        return
    yield "<h3>Stacks</h3>"
    for threads, ranks in ranks_of.items():
        count = f"{len(threads)} thread{'' if len(threads) == 1 else 's'}"
        yield f"<details><summary>{escape(rank_list(ranks))}: {count}</summary>"
        for thread in threads:
            yield f'<p>{escape(thread.name)}, the innermost function last</p><ol class="stack">'
            for frame in thread.stack:
                where = escape(f"{frame.function} ({frame.file}:{frame.line})")
                code = f"<br><code class=dim>{escape(frame.code)}</code>" if frame.code else ""
                yield f"<li><code>{where}</code>{code}</li>"
            yield "</ol>"
        yield "</details>"
