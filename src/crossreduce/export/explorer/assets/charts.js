"use strict";
// The times by size, the measured times, and the table of all links.

const LINE_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#7f7f7f"];

class Sizes {
  constructor(model) {
    this.sizes = model.sizes;
    this.place = document.getElementById("sizes-chart");
    const { texts, algorithms, auto } = this.sizes, names = Object.keys(algorithms);
    document.getElementById("sizes-note").textContent =
      "Simulated times of the same request at other sizes, of the algorithms that auto considers for so many devices. " +
      "Auto also tries variants of them: where a variant is the fastest, the time of the algorithm by its name is below. " +
      "The chart has the times by name, and auto as a wide line.";
    const head = element("tr", {}, ...["Size", "fastest", "its time", "algbw GB/s", "busbw GB/s", ...names].map((text) => element("th", { scope: "col", textContent: text })));
    const rows = texts.map((text, k) => {
      const [best, , duration, rate, bus] = auto[k];
      return element("tr", {}, element("th", { scope: "row", textContent: text }), element("td", { className: "best", textContent: best }),
        ...[duration, rate, bus].map((text) => element("td", { textContent: text })),
        ...names.map((name) => this.cell(algorithms[name][k], name === best ? duration : "")));
    });
    document.getElementById("sizes").append(element("thead", {}, head), element("tbody", {}, ...rows));
    this.measured = model.measured;
    this.listMeasured();
    this.draw();
  }

  // The measured times beside the planned ones.
  listMeasured() {
    document.getElementById("measured-part").hidden = !this.measured.length;
    const head = ["Size", "planned", "measured", "measured / planned", "algbw GB/s", "busbw GB/s"];
    const rows = this.measured.map(([, size, , measured, , planned, ratio, rate, bus]) => element("tr", {}, element("th", { scope: "row", textContent: size }),
      ...[planned, measured, ratio, rate, bus].map((text) => element("td", { textContent: text }))));
    document.getElementById("measured").append(
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", textContent: text })))), element("tbody", {}, ...rows));
  }

  // The time of an algorithm; where it is the fastest, ``fastest`` is the time of its fastest variant.
  cell(one, fastest) {
    const byName = one ? one[1] : "–";
    if (!fastest) return element("td", { textContent: byName });
    const more = fastest === byName ? [] : [element("small", { textContent: `by name ${byName}` })];
    return element("td", { className: "best" }, fastest, ...more);
  }

  draw() {
    if (this.chart) this.chart.destroy();
    const { bytes: planned, texts, algorithms, auto } = this.sizes, names = Object.keys(algorithms), { measured } = this;
    const bytes = [...new Set([...planned, ...measured.map(([size]) => size)])].sort((a, b) => a - b); // of all points
    const points = (values) => bytes.map((size) => (planned.includes(size) ? values[planned.indexOf(size)] : undefined));
    const times = new Map(measured.map(([size, , seconds]) => [size, seconds]));
    const axis = { stroke: theme("soft"), grid: { stroke: theme("line"), width: 1 }, ticks: { stroke: theme("line"), width: 1 }, font: "11px system-ui" };
    const label = new Map([...planned.map((size, k) => [size, texts[k]]), ...measured]);
    const value = (_, seconds) => (seconds === null ? "–" : durationText(seconds));
    const narrow = this.place.clientWidth < 600;
    this.chart = new uPlot({
      width: Math.max(240, this.place.clientWidth), height: 320,
      scales: { x: { distr: 3, log: 2, time: false, range: [bytes[0], bytes[bytes.length - 1]] }, y: { distr: 3, log: 10 } },
      axes: [
        { ...axis, splits: () => (narrow ? planned.filter((_, k) => k % 5 === 0) : planned), filter: (_, splits) => splits, values: (_, splits) => splits.map((size) => label.get(size) || "") },
        { ...axis, size: 60, values: (_, splits) => splits.map((value) => (value === null ? "" : durationText(value).replace(/\.00 /, " "))) },
      ],
      series: [
        { label: "size", value: (_, size) => (size === null ? "–" : label.get(size) || "") },
        { label: "auto", stroke: theme("wire"), width: 8, points: { show: false }, value },
        ...names.map((name, k) => ({ label: name, stroke: LINE_COLOURS[k % LINE_COLOURS.length], width: 2, dash: k > 3 ? [6, 3] : [], points: { show: true, size: 5 }, value })),
        ...(measured.length ? [{ label: "measured", stroke: theme("ink"), width: 2, dash: [2, 3], points: { show: true, size: 8, fill: theme("ink") }, value }] : []),
      ],
    }, [
      bytes, points(auto.map(([, seconds]) => seconds)), ...names.map((name) => points(algorithms[name].map((one) => (one ? one[0] : null)))),
      ...(measured.length ? [bytes.map((size) => times.get(size))] : []),
    ], this.place);
  }
}

// Fill the table of all links when it is opened, since it may have a thousand rows.
class LinkTable {
  constructor() {
    this.details = document.getElementById("all-links");
    this.details.addEventListener("toggle", () => this.fill());
  }

  show(plan) {
    this.plan = plan;
    this.fill();
  }

  fill() {
    if (!this.details.open) return;
    const head = ["Link", "GB/s", "bytes", "busy", "transfers"].map((text) => element("th", { scope: "col", textContent: text }));
    const rows = this.plan.map.links.map((_, link) => {
      const { speed, bytes, busy, transfers } = sumOf(this.plan, [link]);
      return element("tr", {}, element("th", { scope: "row", textContent: linkName(this.plan.map, link) }), element("td", { textContent: String(speed) }),
        element("td", { textContent: String(bytes) }), element("td", { textContent: `${busy.toFixed(2)} %` }), element("td", { textContent: String(transfers) }));
    });
    document.getElementById("links").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }
}
