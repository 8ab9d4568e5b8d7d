"use strict";
// The use of the links on a canvas behind the drawing of Cytoscape.js, in every frame.

class Painter {
  constructor(wiring) {
    this.wiring = wiring;
    this.context = wiring.canvas.getContext("2d");
    this.plan = null;
    this.part = 0;
    this.lanes = [];
    this.cells = []; // devices of a rack, each with the links out of it and into it
    this.levels = []; // of the lanes, then of the folded hosts, then of both halves of each cell
    this.restyle();
  }

  restyle() {
    this.ramp = useRamp();
    this.colours = { partial: theme("partial"), final: theme("final"), cut: theme("cut"), panel: theme("panel"), idle: theme("idle"), lost: theme("lost") };
    this.draw();
  }

  resize() {
    const { canvas, view } = this.wiring, ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(view.clientWidth * ratio));
    canvas.height = Math.max(1, Math.round(view.clientHeight * ratio));
    this.ratio = ratio;
    this.draw();
  }

  // Compute a lane for each direction of each line: its ends, its links, and whether it is in the route and the cut.
  prepare(route, cut, lost) {
    const { edges, cy } = this.wiring, tight = new Set(cut.flatMap((one) => one.links));
    const partial = new Set(route ? route.partial : []), final = new Set(route ? route.final : []);
    const places = new Map(cy.nodes().map((node) => [node.id(), node.position()]));
    const marks = (links) => {
      const gone = links.length > 0 && links.every((link) => lost.has(link));
      return {
        partial: links.some((link) => partial.has(link)), final: links.some((link) => final.has(link)),
        tight: !gone && links.some((link) => tight.has(link)), lost: gone,
      };
    };
    this.route = Boolean(route);
    this.lanes = [];
    this.cells = [...this.wiring.cells].map(([key, halves]) => ({ ...places.get(key), halves: halves.map((links) => ({ links, ...marks(links) })) }));
    for (const { a, b, there, back, bend, cell } of edges) {
      if (cell) continue;
      for (const [from, to, links, turn] of [[a, b, there, bend], [b, a, back, -bend]]) {
        if (!links.length) continue;
        const start = places.get(from), end = places.get(to);
        const dx = end.x - start.x, dy = end.y - start.y, length = Math.hypot(dx, dy) || 1;
        this.lanes.push({
          x1: start.x, y1: start.y, x2: end.x, y2: end.y, ux: dx / length, uy: dy / length, length, links,
          // graph_layout's y axis points up, so its left is the other side here
          cx: turn ? (start.x + end.x) / 2 + (dy / length) * turn : null, cy: (start.y + end.y) / 2 - (dx / length) * turn,
          ...marks(links),
        });
      }
    }
    if (this.plan) this.measure();
    this.draw();
  }

  show(plan, part) {
    if (plan === this.plan && part === this.part) return;
    this.plan = plan;
    this.part = part;
    if (this.measure()) this.draw();
  }

  // Find the use of each lane and folded host, in steps of 5 %; return whether one has changed.
  measure() {
    const { plan, part, wiring } = this;
    const level = (links) => {
      const use = links.length === 1 ? useAt(plan, links[0], part) : meanUse(plan, links, part);
      return use > 0 ? Math.max(1, Math.round(use / 5)) : 0;
    };
    const found = [...this.lanes.map((lane) => level(lane.links)), ...[...wiring.folded].map((box) => level(wiring.inside[box]))];
    found.push(...this.cells.flatMap(({ halves }) => halves.map(({ links }) => level(links))));
    const changed = found.length !== this.levels.length || found.some((one, k) => one !== this.levels[k]);
    this.levels = found;
    return changed;
  }

  draw() {
    const { wiring, context } = this;
    if (!this.plan || !this.ratio) return;
    const zoom = wiring.cy.zoom(), pan = wiring.cy.pan(), { canvas, model } = wiring;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.setTransform(zoom * this.ratio, 0, 0, zoom * this.ratio, pan.x * this.ratio, pan.y * this.ratio);
    context.lineCap = "butt";
    const pixel = this.unit(zoom) / zoom; // lines are thinner where symbols are small
    this.lines(pixel);
    this.crosses(this.lanes.filter((lane) => lane.lost), 12 * pixel);
    [...wiring.folded].forEach((box, k) => this.bar(model.boxes[box], this.levels[this.lanes.length + k]));
    this.cells.forEach((cell, k) => this.cell(cell, this.lanes.length + wiring.folded.size + 2 * k));
  }

  // The lower part of a cell: the use of the links out of the device at the left, of those into it at the right.
  cell({ x, y, halves }, first) {
    const { context, colours, route } = this, wide = this.wiring.model.symbol, half = wide / 2, top = y - wide * 0.1;
    halves.forEach(({ partial, final, tight, lost }, k) => {
      const kind = lost ? "lost" : route ? (partial ? "partial" : final ? "final" : "idle") : null, left = x - half + k * half;
      context.fillStyle = kind ? colours[kind] : this.ramp[this.levels[first + k]];
      context.fillRect(left + 3, top, half - 6, wide * 0.54);
      if (!tight || route) return;
      context.fillStyle = colours.cut;
      context.fillRect(left, y + half, half, wide * 0.09);
    });
  }

  // The size of a line's pixel on the screen: 1 where a symbol, or a folded host, has about 50 pixels.
  unit(zoom) {
    const { folded, model } = this.wiring, all = folded.size && folded.size === model.boxes.length;
    const size = (all ? model.boxes[0][3] / 2 : model.symbol) * zoom;
    return Math.min(1.2, Math.max(0.35, size / 45));
  }

  // Cover the lines behind a folded host, and draw the mean use of the links inside it as a bar.
  bar([, x, y, width, height], level) {
    const { context } = this, left = x - width / 2, thick = height * 0.13, low = y + height / 2 - thick;
    context.fillStyle = this.colours.panel;
    context.fillRect(left, y - height / 2, width, height);
    context.fillStyle = this.colours.idle;
    context.fillRect(left, low, width, thick);
    context.fillStyle = this.ramp[level];
    context.fillRect(left, low, (width * level) / 20, thick);
  }

  lines(pixel) {
    const tight = this.route ? [] : this.lanes.filter((lane) => lane.tight);
    this.strokes(tight, this.colours.cut, 21 * pixel, 0, 0.6);
    if (this.route) {
      for (const kind of ["partial", "final"]) {
        const lanes = this.lanes.filter((lane) => lane[kind]);
        const side = kind === "partial" ? 3 * pixel : 7.5 * pixel;
        this.strokes(lanes, this.colours[kind], 3.2 * pixel, side, 1);
        this.heads(lanes, this.colours[kind], 11 * pixel, side);
      }
      return;
    }
    const levels = this.ramp.map(() => []);
    this.lanes.forEach((lane, k) => {
      if (this.levels[k]) levels[this.levels[k]].push(lane);
    });
    const many = this.lanes.length > 400; // too many for arrow heads
    levels.forEach((lanes, level) => {
      if (!lanes.length) return;
      const width = (1.5 + level * 0.2) * pixel, side = width * 0.5 + pixel;
      this.strokes(lanes, this.ramp[level], width, side, 1);
      if (!many) this.heads(lanes, this.ramp[level], (6 + level * 0.35) * pixel, side);
    });
  }

  // A cross in the middle of each link that has failed.
  crosses(lanes, size) {
    const { context } = this;
    context.beginPath();
    for (const lane of lanes) {
      const x = lane.cx === null ? (lane.x1 + lane.x2) / 2 : (lane.x1 + lane.x2) / 4 + lane.cx / 2;
      const y = lane.cx === null ? (lane.y1 + lane.y2) / 2 : (lane.y1 + lane.y2) / 4 + lane.cy / 2;
      context.moveTo(x - size, y - size);
      context.lineTo(x + size, y + size);
      context.moveTo(x - size, y + size);
      context.lineTo(x + size, y - size);
    }
    context.strokeStyle = this.colours.lost;
    context.lineWidth = size / 2.5;
    context.stroke();
  }

  strokes(lanes, colour, width, side, alpha) {
    const { context } = this;
    context.beginPath();
    for (const lane of lanes) {
      const x = -lane.uy * side, y = lane.ux * side; // to the right of the direction
      context.moveTo(lane.x1 + x, lane.y1 + y);
      if (lane.cx === null) context.lineTo(lane.x2 + x, lane.y2 + y);
      else context.quadraticCurveTo(lane.cx + x, lane.cy + y, lane.x2 + x, lane.y2 + y);
    }
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.globalAlpha = alpha;
    context.stroke();
    context.globalAlpha = 1;
  }

  // Arrow heads, at 62 % of the way so that both directions have room.
  heads(lanes, colour, size, side) {
    const { context } = this;
    context.beginPath();
    for (const lane of lanes) {
      const t = 0.62, curved = lane.cx !== null;
      const at = (a, c, b) => (curved ? (1 - t) ** 2 * a + 2 * t * (1 - t) * c + t * t * b : a + (b - a) * t);
      const x = at(lane.x1, lane.cx, lane.x2) - lane.uy * side, y = at(lane.y1, lane.cy, lane.y2) + lane.ux * side;
      const { ux, uy } = lane;
      context.moveTo(x + ux * size, y + uy * size);
      context.lineTo(x - uy * size * 0.5, y + ux * size * 0.5);
      context.lineTo(x + uy * size * 0.5, y - ux * size * 0.5);
      context.closePath();
    }
    context.fillStyle = colour;
    context.fill();
  }
}
