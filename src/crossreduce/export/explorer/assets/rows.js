"use strict";
// The use of links over time: a row for each network switch (rail) and each host, and below it a row for each link.

const ROW = 13; // pixels
const MOST_ROWS = 100; // with more links, groups are folded at first

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
    this.open = new Map(); // for each wiring, the groups whose links are shown
    this.field.addEventListener("pointermove", (event) => this.point(...this.placeOf(event)));
    this.field.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.field.addEventListener("click", (event) => this.select(...this.placeOf(event)));
    this.field.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.select(Math.max(0, Math.min(this.rows.length - 1, this.row + step)), null);
    });
  }

  // The rows: groups, each followed by its links if it is open.
  list({ map }) {
    if (!this.open.has(map)) this.open.set(map, new Set(map.links.length <= MOST_ROWS || map.rows.length === 1 ? map.rows.keys() : []));
    const open = this.open.get(map);
    this.rows = map.rows.flatMap(([title, , links], group) => {
      const head = { name: `${title} (${links.length})`, links, group, open: open.has(group) };
      return [head, ...(head.open ? links.map((link) => ({ name: linkName(map, link, true), links: [link] })) : [])];
    });
    document.getElementById("map-names").replaceChildren(...this.rows.map((row) => {
      const name = element(row.group === undefined ? "div" : "button", { textContent: row.name, title: row.name });
      name.style.height = `${ROW}px`;
      if (row.group === undefined) return name;
      name.type = "button";
      name.setAttribute("aria-expanded", String(row.open));
      name.addEventListener("click", () => {
        if (row.open) open.delete(row.group);
        else open.add(row.group);
        this.show(this.plan);
        document.getElementById("map-names").children[this.rows.findIndex((one) => one.group === row.group)].focus();
      });
      return name;
    }));
    document.getElementById("map-note").textContent =
      `Rows are groups of links, with the mean of their links, and each of the ${map.links.length} links. A column is ` +
      `1/${this.model.parts} of the time of the plan; the colour is the mean use in it. Point at a row for its name, and select it for its numbers.`;
  }

  // The row under the pointer, and the part of the width to its left.
  placeOf(event) {
    const box = this.canvas.getBoundingClientRect(), last = this.rows.length - 1;
    const row = Math.floor(((event.clientY - box.top) / box.height) * (last + 1));
    return [Math.max(0, Math.min(last, row)), (event.clientX - box.left) / box.width];
  }

  // Name the row beside the pointer, on the side that has more room.
  point(row, part) {
    const { style } = this.tip, low = row > this.rows.length / 2, right = part > 0.5;
    this.tip.hidden = false;
    this.tip.textContent = this.rows[row].links.length === 1 ? linkName(this.plan.map, this.rows[row].links[0]) : this.rows[row].name;
    style.top = low ? "auto" : `${(row + 1) * ROW + 6}px`;
    style.bottom = low ? `${(this.rows.length - row) * ROW + 6}px` : "auto";
    style.left = right ? "auto" : `${part * 100}%`;
    style.right = right ? `${(1 - part) * 100}%` : "auto";
  }

  titleOf(links) {
    return this.rows.find((row) => row.links === links).name;
  }

  show(plan) {
    const { model, canvas } = this, ramp = useRamp().map((colour) => colour.match(/\d+/g).map(Number));
    this.plan = plan;
    this.list(plan);
    canvas.width = model.parts;
    canvas.height = this.rows.length;
    canvas.style.height = `${this.rows.length * ROW}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    this.rows.forEach(({ links }, row) => {
      for (let part = 0, at = row * canvas.width * 4; part < canvas.width; part++, at += 4) {
        const use = meanUse(plan, links, part);
        image.data.set([...ramp[use ? Math.max(1, Math.round(use / 5)) : 0], 255], at);
      }
    });
    context.putImageData(image, 0, 0);
    const texts = [0, 0.25, 0.5, 0.75, 1].map((part) => element("span", { textContent: durationText(part * plan.seconds) }));
    document.getElementById("map-axis").replaceChildren(...texts);
    this.mark(this.row < this.rows.length && this.row >= 0 ? this.rows[this.row].links : []);
    this.resize();
  }

  resize() {
    this.wide = 0;
  }

  select(row, part) {
    this.frameRow(row);
    this.choose(this.rows[row].links, part);
  }

  // Mark the row of exactly these links.
  mark(links) {
    const same = (row) => row.links.length === links.length && row.links.every((link, k) => link === links[k]);
    this.frameRow(this.rows.findLastIndex(same));
  }

  frameRow(row) {
    this.row = row;
    this.frame.style.display = row < 0 ? "none" : "block";
    this.frame.style.top = `${row * ROW - 2}px`;
    this.frame.style.height = `${ROW + 4}px`;
  }

  tick(seconds) {
    this.line.hidden = seconds === null;
    if (seconds === null) return;
    this.wide ||= this.field.clientWidth;
    this.line.style.transform = `translateX(${Math.min(1, seconds / this.plan.seconds) * this.wide - 1}px)`;
  }
}
