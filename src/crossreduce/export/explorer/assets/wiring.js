"use strict";
// One drawing of the wiring. Cytoscape.js draws nodes, hosts and thin lines, and finds what the pointer is at; paint.js
// draws the use of the links on a canvas behind it. Setting the style of 1024 links in every frame takes Cytoscape.js
// 100 ms; the canvas takes 2.

const NARROW = 500; // pixels

class Wiring {
  constructor(parent, model, folded, handlers) {
    this.model = model;
    this.folded = folded;
    this.handlers = handlers;
    this.view = element("div", { className: "view" });
    this.canvas = element("canvas");
    this.graph = element("div", { className: "graph", tabIndex: 0 });
    this.caption = element("div", { className: "caption" });
    this.tip = element("div", { className: "tip", hidden: true });
    this.view.append(this.canvas, this.graph, this.caption, this.tip);
    parent.append(this.view);
    this.graph.setAttribute("role", "application");
    this.cy = cytoscape({
      container: this.graph, layout: { name: "preset" }, style: this.styles(), minZoom: 0.02, maxZoom: 4,
      autoungrabify: true, boxSelectionEnabled: false, selectionType: "single", userZoomingEnabled: false,
      userPanningEnabled: matchMedia("(pointer: fine)").matches, pixelRatio: "auto",
    });
    this.painter = new Painter(this);
    this.build();
    this.fit();
    this.listen();
  }

  name(key) {
    return key[0] === "b" ? this.model.boxes[Number(key.slice(1))][0] : this.model.nodes[Number(key.slice(1))][0];
  }

  // The node that stands for a device or switch: itself, or its folded host.
  keyOf(node) {
    const box = this.model.nodes[node][4];
    return box >= 0 && this.folded.has(box) ? `b${box}` : `n${node}`;
  }

  build() {
    const { nodes, boxes, links, symbol } = this.model, elements = [];
    this.narrow = this.view.clientWidth < NARROW; // then names are numbers, and letters are larger
    this.edges = [];
    this.cells = new Map(); // for each device that is a cell of a rack, its links out of it and into it
    this.inside = boxes.map(() => []); // the links within each box
    const byPair = new Map();
    links.forEach(([src, dst, , bend], link) => {
      const a = this.keyOf(src), b = this.keyOf(dst);
      if (nodes[src][4] >= 0 && nodes[src][4] === nodes[dst][4]) this.inside[nodes[src][4]].push(link);
      if (a === b) return;
      const pair = a < b ? `${a} ${b}` : `${b} ${a}`;
      if (!byPair.has(pair)) {
        const cell = a[0] === "n" && b[0] === "n" && nodes[src][4] === nodes[dst][4] && Boolean(nodes[src][6] || nodes[dst][6]);
        byPair.set(pair, { id: `e${this.edges.length}`, a, b, there: [], back: [], cell, bend: a[0] === "n" && b[0] === "n" ? bend : 0 });
        this.edges.push(byPair.get(pair));
      }
      const edge = byPair.get(pair);
      (edge.a === a ? edge.there : edge.back).push(link);
      if (!edge.cell) return;
      const out = nodes[src][6], key = out ? a : b;
      if (!this.cells.has(key)) this.cells.set(key, [[], []]);
      this.cells.get(key)[out ? 0 : 1].push(link);
    });
    boxes.forEach(([name, x, y, width, height], box) => {
      const folded = this.folded.has(box), inside = nodes.filter((node) => node[4] === box && node[5]).length;
      const text = folded && inside ? `${name}\n${inside} devices` : name;
      elements.push({ data: { id: `b${box}`, text, width, height, font: Math.max(width / (folded ? 5.5 : 7.5), symbol * (this.narrow ? 0.8 : 0.4)) }, position: { x, y }, classes: folded ? "box folded" : "box" });
    });
    nodes.forEach(([name, label, x, y, box, isDevice, isCell], node) => {
      if (box >= 0 && this.folded.has(box)) return;
      const text = this.narrow && isDevice ? label.replace(/^.*:/, "") : label;
      const size = isDevice ? symbol : Math.max(symbol * 0.9, 11 * text.length + 16);
      const long = text.length > 3;
      const kind = isCell ? "device cell" : isDevice ? (long ? "device long" : "device") : "switch";
      const font = isCell ? symbol * 0.3 : long ? Math.min(16, symbol / 4) : symbol * 0.44;
      elements.push({ data: { id: `n${node}`, text, size, high: long || !isDevice ? 34 : symbol, font: isDevice ? (this.narrow ? Math.max(font, symbol * 0.6) : font) : this.narrow ? symbol * 0.4 : 16 }, position: { x, y }, classes: kind });
    });
    for (const { id, a, b, bend, cell } of this.edges) {
      elements.push({ data: { id, source: a, target: b, bend: -bend }, classes: cell ? "hidden" : bend ? "bent" : "" });
    }
    this.cy.batch(() => {
      this.cy.elements().remove();
      this.cy.add(elements);
    });
    this.edgeOf = new Map(this.edges.map((edge) => [edge.id, edge]));
    this.cy.elements().unselectify();
    const hosts = boxes.length ? `, ${boxes.length} boxes` : "";
    this.graph.setAttribute("aria-label", `Wiring: ${nodes.length} devices and switches, ${links.length} links${hosts}. Arrow keys go from link to link.`);
    this.mark();
  }

  styles() {
    const label = { label: "data(text)", "text-valign": "center", "text-halign": "center", "text-wrap": "wrap" };
    const ink = theme("ink"), line = theme("node-line"), { symbol } = this.model;
    return [
      { selector: "node", style: { ...label, color: ink, "font-family": "system-ui, sans-serif", "overlay-opacity": 0 } },
      { selector: ".device, .switch", style: { width: "data(size)", height: "data(high)", "font-size": "data(font)", "background-color": theme("node"), "border-width": 2, "border-color": line, shape: "ellipse", "z-index": 5 } },
      { selector: ".cell", style: { shape: "rectangle", "background-opacity": 0, "border-width": 1.5, "text-margin-y": -symbol * 0.29 } },
      { selector: ".hidden", style: { visibility: "hidden" } },
      { selector: ".long", style: { shape: "round-rectangle" } },
      { selector: ".switch", style: { shape: "rectangle", "background-color": theme("switch") } },
      { selector: ".box", style: { width: "data(width)", height: "data(height)", shape: "round-rectangle", "background-opacity": 0, "border-width": 2, "border-color": theme("line"), "font-size": "data(font)", "text-valign": "top", "text-margin-y": -2, "text-background-color": theme("panel"), "text-background-opacity": 1, "text-background-padding": 2, color: theme("soft"), "z-index": 1 } },
      { selector: ".folded", style: { "border-width": 4, "border-color": line, color: ink, "text-valign": "center", "text-margin-y": -4, "text-background-opacity": 0 } },
      { selector: "edge", style: { width: 1.4, "line-color": theme("wire"), "curve-style": "straight", "overlay-opacity": 0, "z-index": 2 } },
      { selector: "edge.bent", style: { "curve-style": "unbundled-bezier", "control-point-distances": "data(bend)", "control-point-weights": 0.5 } },
      { selector: ".dim", style: { opacity: 0.25 } },
      { selector: "edge.lost", style: { "line-style": "dashed", "line-color": theme("lost") } },
      { selector: "node.lost", style: { "border-color": theme("lost"), "border-width": 4 } },
      { selector: ".root", style: { "background-color": theme("root"), color: theme("root-ink"), opacity: 1 } },
      { selector: ".cut", style: { "border-color": theme("cut"), "border-width": 5 } },
      { selector: "edge.picked", style: { width: 4, "line-color": theme("accent"), "z-index": 4 } },
      { selector: "node.picked", style: { "border-color": theme("accent"), "border-width": 6 } },
    ];
  }

  restyle() {
    this.cy.style(this.styles());
    this.painter.restyle();
  }

  // Set the classes of roots, of the tight cut, and of what is not part of the isolated route.
  mark() {
    const { route, cut, lost } = this.handlers.state(this), failed = new Set(lost.links);
    const keys = new Set(), roots = new Set();
    const inRoute = new Set(route ? [...route.partial, ...route.final] : []);
    for (const link of inRoute) for (const end of this.model.links[link].slice(0, 2)) keys.add(this.keyOf(end));
    const names = new Map(this.model.nodes.map((node, k) => [node[0], k]));
    for (const root of route ? route.roots : []) roots.add(this.keyOf(names.get(root)));
    const tight = new Set((route ? [] : cut).flatMap((one) => one.nodes).map((node) => this.keyOf(node)));
    this.cy.batch(() => {
      this.cy.nodes().forEach((node) => {
        const key = node.id(), open = node.hasClass("box") && !node.hasClass("folded");
        node.toggleClass("dim", Boolean(route) && !keys.has(key) && !roots.has(key) && !open);
        node.toggleClass("root", roots.has(key) && !node.hasClass("box"));
        node.toggleClass("cut", tight.has(key));
        const cell = (this.cells.get(key) || []).flat().some((link) => failed.has(link));
        node.toggleClass("lost", cell || (lost.card !== null && key === this.keyOf(lost.card)));
      });
      this.cy.edges().forEach((edge) => {
        const { there, back } = this.edgeOf.get(edge.id());
        edge.toggleClass("dim", Boolean(route) && ![...there, ...back].some((link) => inRoute.has(link)));
        edge.toggleClass("lost", [...there, ...back].every((link) => failed.has(link)));
      });
    });
    this.painter.prepare(route, cut, lost.half ? new Set() : failed);
  }

  fit() {
    if (this.narrow !== this.view.clientWidth < NARROW) this.build();
    this.cy.resize();
    this.cy.fit(undefined, 26);
    if (this.cy.zoom() > 1.6) this.cy.zoom(1.6);
    this.cy.center();
    this.painter.resize();
  }

  zoom(factor) {
    const box = this.graph.getBoundingClientRect();
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: { x: box.width / 2, y: box.height / 2 } });
  }

  pick(id) {
    this.cy.elements(".picked").removeClass("picked");
    const edge = this.edgeOf.get(id), key = edge && edge.cell ? [edge.a, edge.b].find((end) => this.cells.has(end)) : id;
    if (key) this.cy.getElementById(key).addClass("picked");
  }

  listen() {
    this.cy.on("mouseover", "edge", (event) => this.handlers.point(this, event.target.id()));
    this.cy.on("mouseout", "edge", () => this.handlers.point(this, null));
    this.cy.on("mousemove", (event) => this.place(event.renderedPosition));
    this.cy.on("tap", "edge", (event) => this.handlers.choose(this, event.target.id()));
    this.cy.on("tap", ".box", (event) => this.handlers.fold(this, Number(event.target.id().slice(1))));
    // A cell stands for the first of its lines, which are not drawn.
    const line = (event) => this.edges.find(({ cell, a, b }) => cell && (a === event.target.id() || b === event.target.id())).id;
    this.cy.on("tap", ".cell", (event) => this.handlers.choose(this, line(event)));
    this.cy.on("mouseover", ".cell", (event) => this.handlers.point(this, line(event)));
    this.cy.on("mouseout", ".cell", () => this.handlers.point(this, null));
    this.cy.on("tap", ".switch", (event) => this.handlers.chooseCard(this, Number(event.target.id().slice(1))));
    this.cy.on("viewport resize", () => this.painter.draw());
    this.graph.addEventListener("keydown", (event) => this.key(event));
    this.graph.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const level = this.cy.zoom() * Math.exp(-event.deltaY / 300);
      this.cy.zoom({ level, renderedPosition: { x: event.offsetX, y: event.offsetY } });
    }, { passive: false });
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.view);
  }

  place({ x, y }) {
    const right = x > this.view.clientWidth / 2, low = y > this.view.clientHeight / 2;
    Object.assign(this.tip.style, {
      left: right ? "auto" : `${x + 14}px`, right: right ? `${this.view.clientWidth - x + 14}px` : "auto",
      top: low ? "auto" : `${y + 14}px`, bottom: low ? `${this.view.clientHeight - y + 14}px` : "auto",
    });
  }

  key(event) {
    const ids = this.edges.map((edge) => edge.id), picked = this.cy.elements(".picked");
    const now = picked.nonempty() ? picked.first().id() : "";
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && ids.length) {
      const at = ids.indexOf(now);
      this.handlers.choose(this, ids[at < 0 ? (step > 0 ? 0 : ids.length - 1) : (at + step + ids.length) % ids.length]);
    } else if (event.key.toLowerCase() === "h" && this.model.boxes.length) {
      const box = now[0] === "b" ? (Number(now.slice(1)) + 1) % this.model.boxes.length : 0;
      this.pick(`b${box}`);
      say(`${this.model.boxes[box][0]}, ${this.folded.has(box) ? "folded" : "unfolded"}`);
    } else if (event.key === "Enter" && now[0] === "b") {
      this.handlers.fold(this, Number(now.slice(1)));
      this.pick(now);
    } else return;
    event.preventDefault();
  }

  remove() {
    this.observer.disconnect();
    this.cy.destroy();
    this.view.remove();
  }
}
