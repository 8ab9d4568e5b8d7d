"use strict";
// The model that Python computed, and texts about it. Nothing here computes a time or a rate.

async function readModel() {
  const packed = Uint8Array.from(atob(document.getElementById("model").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const model = JSON.parse(await new Response(stream).text());
  if (model.other) model.other.parts = model.parts;
  model.plans.forEach((plan) => (plan.map = plan.other ? model.other : model)); // its wiring
  return model;
}

const MEAN = -1; // instead of a part of the time: the mean over the plan's duration

// The part of the plan's duration at a time; one past the last part when it has ended. Without a time, MEAN.
function partAt(plan, seconds) {
  const { parts } = plan.map;
  return seconds === null ? MEAN : Math.min(Math.floor((seconds / plan.seconds) * parts), parts);
}

// The use of a link in percent of its bandwidth in one part of the time.
function useAt(plan, link, part) {
  const found = plan.links[link];
  return found ? (part === MEAN ? found[2] : plan.curves[found[0]][part] || 0) : 0;
}

// The mean use of several links, weighted by their bandwidths.
function meanUse(plan, links, part) {
  let used = 0, most = 0;
  for (const link of links) {
    const speed = plan.map.links[link][2];
    used += speed * useAt(plan, link, part);
    most += speed;
  }
  return most ? used / most : 0;
}

function doneAt(plan, seconds) {
  const exact = (seconds / plan.seconds) * plan.map.parts;
  if (exact >= plan.map.parts) return 100;
  const part = Math.floor(exact), share = exact - part;
  return plan.done[part] * (1 - share) + plan.done[part + 1] * share;
}

// As crossreduce prints a duration.
function durationText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(2)} ms`;
  return `${(seconds * 1e6).toFixed(2)} us`;
}

function bytesText(bytes) {
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  for (const [scale, unit] of units) if (bytes >= scale) return `${(bytes / scale).toPrecision(4)} ${unit}`;
  return `${bytes} B`;
}

function speedText(gigabytes) {
  return `${Number(gigabytes.toPrecision(5))} GB/s`;
}

// What several links carry in one direction: the sums of their bytes, transfers and speeds, and the mean busy share.
function sumOf(plan, links) {
  const sum = { links: links.length, speed: 0, bytes: 0, busy: 0, transfers: 0 };
  for (const link of links) {
    const [, bytes, busy, transfers] = plan.links[link] || [0, 0, 0, 0];
    const speed = plan.map.links[link][2];
    sum.speed += speed;
    sum.bytes += bytes;
    sum.busy += busy * speed;
    sum.transfers += transfers;
  }
  sum.busy = sum.speed ? sum.busy / sum.speed : 0;
  return sum;
}

// The name of a link. Without the host if both ends are in it and ``short``.
function linkName(map, link, short) {
  const ends = map.links[link].slice(0, 2).map((node) => map.nodes[node]);
  const cut = short && ends[0][4] >= 0 && ends[0][4] === ends[1][4] ? `${map.boxes[ends[0][4]][0]}/` : "";
  return ends.map(([name]) => (name.startsWith(cut) ? name.slice(cut.length) : name)).join(" → ");
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function say(text) {
  document.getElementById("status").textContent = text;
}

function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Colours of use, from idle to 100 %, in 21 steps; lightness alone tells them apart.
function useRamp() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const stops = dark
    ? [[58, 68, 80], [112, 46, 110], [205, 72, 168], [255, 205, 240]]
    : [[222, 226, 232], [236, 158, 208], [190, 60, 150], [84, 0, 74]];
  return Array.from({ length: 21 }, (_, k) => {
    const at = (k / 20) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    const mix = stops[low].map((value, c) => Math.round(value + (stops[low + 1][c] - value) * (at - low)));
    return `rgb(${mix.join(",")})`;
  });
}
