"""The style and the script of the page that ``crossreduce doctor --report`` writes."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2430;--dim:#5b6675;--line:#d5dbe3;--soft:#f3f5f8;--odd:#3b78c2;
--even:#7aa9de;--wait:#e0a020;--bad:#c4212f;--badsoft:#fdecee;--focus:#111}
@media(prefers-color-scheme:dark){:root{--bg:#14181f;--fg:#e4e9f0;--dim:#9aa6b6;--line:#333c49;--soft:#1d232d;
--odd:#5a95df;--even:#3c6ba6;--wait:#d9a53c;--bad:#ff6b78;--badsoft:#3a1d22;--focus:#fff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1500px;padding:16px;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.35rem;margin:.2em 0 .6em}h2{font-size:1.15rem;margin:1.6em 0 .4em}h3{font-size:1rem;
margin:1.3em 0 .4em}
p,li,pre,summary{overflow-wrap:anywhere}
ul.findings{padding-left:1.2em;margin:.4em 0}
pre{background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:8px;white-space:pre-wrap;
margin:.4em 0;
font-size:.85rem}
a{color:inherit}.dim{color:var(--dim)}.bad{color:var(--bad);font-weight:600}
.bar-tools{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center;margin:.5em 0}
button{font:inherit;min-width:34px;min-height:32px;border:1px solid var(--line);border-radius:6px;
background:var(--soft);
color:inherit;cursor:pointer}
.key{display:inline-flex;gap:5px;align-items:center;font-size:.85rem}
.key i{width:22px;height:12px;border-radius:2px;display:inline-block}
.odd{background:var(--odd)}.even{background:var(--even)}.wait{background:var(--wait)}
.hung{outline:2px solid var(--bad);outline-offset:-1px}
.none,.pause{background:repeating-linear-gradient(45deg,var(--line) 0 4px,transparent 4px 8px)}
.lines{position:relative;overflow:auto;max-height:78vh;border:1px solid var(--line);border-radius:6px}
.inner{--zoom:1;--label:215px;width:calc(var(--label) + (100% - var(--label))*var(--zoom));position:relative}
.row{display:flex;height:20px;padding-right:14px;border-bottom:1px solid var(--soft)}
.row.big{height:26px}
.label{position:sticky;left:0;z-index:3;flex:0 0 var(--label);width:var(--label);background:var(--bg);padding:0 8px;
white-space:nowrap;overflow:hidden;text-overflow:ellipsis;font-size:.8rem;
line-height:19px;border-right:1px solid var(--line)}
.blamed .label{background:var(--badsoft);color:var(--bad);font-weight:600}
.hostline{position:sticky;left:0;background:var(--soft);font-size:.8rem;font-weight:600;padding:2px 8px;z-index:2}
.hostline span{position:sticky;left:8px}
.track{position:relative;flex:1;min-width:0}
.track:focus{outline:2px solid var(--focus);outline-offset:-2px}
.track b{position:absolute;top:3px;bottom:3px;min-width:2px;border-radius:2px;overflow:hidden}
.track b i{position:absolute;left:0;top:0;bottom:0;background:var(--wait)}
.track b.sel{box-shadow:0 0 0 2px var(--focus);z-index:2}
.track .pause,.track .none{position:absolute;top:0;bottom:0;opacity:.6;pointer-events:none}
.track .pause{z-index:1;opacity:.45;background:repeating-linear-gradient(45deg,var(--bg) 0 3px,transparent 3px 9px),
repeating-linear-gradient(45deg,var(--line) 0 3px,transparent 3px 9px)}
.abort{position:absolute;top:0;bottom:0;width:0;margin-left:1px;border-left:3px dashed var(--bad);z-index:1;
pointer-events:none}
.only .row:not(.blamed):not(.head){display:none}button[aria-pressed=true]{border-color:var(--bad);color:var(--bad)}
.track .none{left:0;right:0;font-size:.75rem;padding-left:6px}
.head{position:sticky;top:0;z-index:4;background:var(--bg);border-bottom:1px solid var(--line);height:42px}
.head .label{line-height:42px}
.tick{position:absolute;top:2px;font-size:.72rem;color:var(--dim);transform:translateX(-50%);white-space:nowrap}
.fine{display:none}.zoomed .fine{display:inline}.tick.first{transform:none}.tick.last{transform:translateX(-100%)}
.cut{position:absolute;top:21px;font-size:.7rem;color:var(--dim);text-align:center;white-space:nowrap;
overflow:visible;
display:flex;justify-content:center}
.info{position:sticky;bottom:0;z-index:5;background:var(--soft);border:1px solid var(--line);border-radius:6px;
padding:6px 10px;margin-top:6px;min-height:2.7em;font-size:.9rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;min-width:520px;width:100%}
th,td{white-space:nowrap;text-align:left;border-bottom:1px solid var(--line);padding:3px 8px;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
tr.blamed td,tr.blamed th{background:var(--badsoft)}
details{border:1px solid var(--line);border-radius:6px;padding:6px 10px;margin:6px 0}
summary{cursor:pointer;font-weight:600}
code{font:.85rem/1.4 ui-monospace,monospace}
ol.stack{list-style:none;padding-left:0;margin:.3em 0 .8em}ol.stack li{margin:.15em 0}
@media(max-width:640px){body{padding:10px;font-size:14px}.inner{--label:84px;min-width:calc(84px + 460px*var(--zoom))}
.label .more{display:none}}
@media(forced-colors:active){.track b{border:1px solid CanvasText}}
"""

SCRIPT: Final = """
"use strict";
for (const box of document.querySelectorAll(".timeline")) {
  const inner = box.querySelector(".inner"), info = box.querySelector(".info"), lines = box.querySelector(".lines");
  const tracks = [...box.querySelectorAll(".track[tabindex]")];
  let zoom = 1, selected = null;
  const select = bar => {
    if (selected) { selected.classList.remove("sel"); selected.setAttribute("aria-selected", "false"); }
    selected = bar;
    if (!bar) return;
    bar.classList.add("sel"); bar.setAttribute("aria-selected", "true");
    bar.parentElement.setAttribute("aria-activedescendant", bar.id);
    info.textContent = bar.getAttribute("aria-label");
  };
  const show = bar => {
    select(bar);
    const view = lines.getBoundingClientRect(), at = bar.getBoundingClientRect();
    const left = box.querySelector(".label").offsetWidth;
    if (at.left < view.left + left || at.left > view.right - 20)
      lines.scrollLeft += at.left - view.left - view.width / 2;
  };
  const scale = factor => {
    const middle = (lines.scrollLeft + lines.clientWidth / 2) / lines.scrollWidth;
    zoom = factor === 0 ? 1 : Math.min(400, Math.max(1, zoom * factor));
    inner.style.setProperty("--zoom", zoom);
    inner.classList.toggle("zoomed", zoom >= 8);
    lines.scrollLeft = middle * lines.scrollWidth - lines.clientWidth / 2;
    if (selected && factor > 1) show(selected);
  };
  const only = box.querySelector("button.filter"), first = box.querySelector(".row.blamed");
  if (only) only.addEventListener("click", () =>
    only.setAttribute("aria-pressed", String(inner.classList.toggle("only"))));
  if (first && first.offsetTop > lines.clientHeight) lines.scrollTop = first.offsetTop - lines.clientHeight / 2;
  for (const button of box.querySelectorAll("button[data-scale]"))
    button.addEventListener("click", () => scale(Number(button.dataset.scale)));
  lines.addEventListener("pointerover", event => { const bar = event.target.closest("b"); if (bar) select(bar); });
  lines.addEventListener("click", event => { const bar = event.target.closest("b"); if (bar) select(bar); });
  lines.addEventListener("keydown", event => {
    const track = event.target.closest(".track");
    if (!track) return;
    const bars = [...track.querySelectorAll("b")], at = bars.indexOf(selected), row = tracks.indexOf(track);
    const moves = {ArrowLeft: at < 0 ? bars.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: bars.length - 1};
    if (event.key in moves) { const bar = bars[moves[event.key]]; if (bar) show(bar); }
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const next = tracks[row + (event.key === "ArrowUp" ? -1 : 1)];
      if (next) {
        next.focus();
        const same = [...next.querySelectorAll("b")].find(bar => selected && bar.dataset.op === selected.dataset.op);
        if (same) show(same);
      }
    } else if (event.key === "+" || event.key === "=") scale(2);
    else if (event.key === "-") scale(0.5);
    else if (event.key === "0") scale(0);
    else return;
    event.preventDefault();
  });
}
"""
