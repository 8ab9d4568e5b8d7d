"use strict";
// The use of every link over time, the times by size, and the table of all links.

class LinkMap {
  constructor(model, choose) {
    this.model = model;
    this.choose = choose;
    this.canvas = document.getElementById("map-canvas");
    this.field = document.getElementById("map-field");
    this.line = document.getElementById("map-now");
    this.frame = document.getElementById("map-row");
    this.tip = document.getElementById("map-tip");
    this.row = -1;
    const count = model.links.length;
    this.height = count <= 48 ? 14 : count <= 160 ? 6 : count <= 600 ? 2 : 1;
    if (this.height >= 10) {
      document.getElementById("map-names").append(...model.links.map((_, link) => {
        const name = element("div", { textContent: this.name(link) });
        name.style.height = `${this.height}px`;
        return name;
      }));
    }
    document.getElementById("map-note").textContent =
      `Each row is one of ${count} links, each column 1/${model.parts} of the time of the plan; the colour is the mean use in it. ` +
      "Point at a row for its link, and select it for its numbers.";
    this.field.addEventListener("pointermove", (event) => this.point(...this.placeOf(event)));
    this.field.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.field.addEventListener("click", (event) => this.select(...this.placeOf(event)));
    this.field.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.select(Math.max(0, Math.min(count - 1, this.row + step)), null);
    });
  }

  // The row under the pointer, and the part of the width to its left.
  placeOf(event) {
    const box = this.canvas.getBoundingClientRect(), last = this.model.links.length - 1;
    const row = Math.floor(((event.clientY - box.top) / box.height) * (last + 1));
    return [Math.max(0, Math.min(last, row)), (event.clientX - box.left) / box.width];
  }

  // Name the link of a row beside the pointer, on the side that has more room.
  point(row, part) {
    const { style } = this.tip, low = row > this.model.links.length / 2, right = part > 0.5;
    this.tip.hidden = false;
    this.tip.textContent = this.name(row);
    style.top = low ? "auto" : `${(row + 1) * this.height + 6}px`;
    style.bottom = low ? `${(this.model.links.length - row) * this.height + 6}px` : "auto";
    style.left = right ? "auto" : `${part * 100}%`;
    style.right = right ? `${(1 - part) * 100}%` : "auto";
  }

  name(link) {
    const [src, dst] = this.model.links[link];
    return `${this.model.nodes[src][0]} → ${this.model.nodes[dst][0]}`;
  }

  show(plan) {
    const { model, canvas } = this, ramp = useRamp().map((colour) => colour.match(/\d+/g).map(Number));
    this.plan = plan;
    canvas.width = model.parts;
    canvas.height = model.links.length;
    canvas.style.height = `${model.links.length * this.height}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    for (let link = 0, at = 0; link < canvas.height; link++) {
      for (let part = 0; part < canvas.width; part++, at += 4) {
        const use = useAt(plan, link, part), colour = ramp[use ? Math.max(1, Math.round(use / 5)) : 0];
        image.data.set([...colour, 255], at);
      }
    }
    context.putImageData(image, 0, 0);
  }

  resize() {
    this.wide = 0;
  }

  select(row, part) {
    this.mark(row);
    this.choose(row, part);
  }

  mark(row) {
    this.row = row;
    this.frame.style.display = row < 0 ? "none" : "block";
    this.frame.style.top = `${row * this.height - 2}px`;
    this.frame.style.height = `${this.height + 4}px`;
  }

  tick(seconds) {
    this.wide ||= this.field.clientWidth;
    this.line.style.transform = `translateX(${Math.min(1, seconds / this.plan.seconds) * this.wide - 1}px)`;
  }
}

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
    const head = element("tr", {}, ...["Size", "fastest", "", "GB/s", ...names].map((text) => element("th", { scope: "col", textContent: text })));
    const rows = texts.map((text, k) => {
      const [best, , duration, rate] = auto[k];
      return element("tr", {}, element("th", { scope: "row", textContent: text }), element("td", { className: "best", textContent: best }),
        element("td", { textContent: duration }), element("td", { textContent: rate }),
        ...names.map((name) => this.cell(algorithms[name][k], name === best ? duration : "")));
    });
    document.getElementById("sizes").append(element("thead", {}, head), element("tbody", {}, ...rows));
    this.draw();
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
    const { bytes, texts, algorithms, auto } = this.sizes, names = Object.keys(algorithms);
    const axis = { stroke: theme("soft"), grid: { stroke: theme("line"), width: 1 }, ticks: { stroke: theme("line"), width: 1 }, font: "11px system-ui" };
    const label = new Map(bytes.map((size, k) => [size, texts[k]]));
    const value = (_, seconds) => (seconds === null ? "–" : durationText(seconds));
    const narrow = this.place.clientWidth < 600;
    this.chart = new uPlot({
      width: Math.max(240, this.place.clientWidth), height: 320,
      scales: { x: { distr: 3, log: 2, time: false, range: [bytes[0], bytes[bytes.length - 1]] }, y: { distr: 3, log: 10 } },
      axes: [
        { ...axis, splits: () => (narrow ? bytes.filter((_, k) => k % 5 === 0) : bytes), filter: (_, splits) => splits, values: (_, splits) => splits.map((size) => label.get(size) || "") },
        { ...axis, size: 60, values: (_, splits) => splits.map((value) => (value === null ? "" : durationText(value).replace(/\.00 /, " "))) },
      ],
      series: [
        { label: "size", value: (_, size) => (size === null ? "–" : label.get(size) || "") },
        { label: "auto", stroke: theme("wire"), width: 8, points: { show: false }, value },
        ...names.map((name, k) => ({ label: name, stroke: LINE_COLOURS[k % LINE_COLOURS.length], width: 2, dash: k > 3 ? [6, 3] : [], points: { show: true, size: 5 }, value })),
      ],
    }, [bytes, auto.map(([, seconds]) => seconds), ...names.map((name) => algorithms[name].map((one) => (one ? one[0] : null)))], this.place);
  }
}

// Fill the table of all links when it is opened, since it may have a thousand rows.
class LinkTable {
  constructor(model, map) {
    this.model = model;
    this.map = map;
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
    const rows = this.model.links.map((_, link) => {
      const { speed, bytes, busy, transfers } = sumOf(this.model, this.plan, [link]);
      return element("tr", {}, element("th", { scope: "row", textContent: this.map.name(link) }), element("td", { textContent: String(speed) }),
        element("td", { textContent: String(bytes) }), element("td", { textContent: `${busy.toFixed(2)} %` }), element("td", { textContent: String(transfers) }));
    });
    document.getElementById("links").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }
}
