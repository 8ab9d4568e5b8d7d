"use strict";
// Puts the parts together: the state, the clock, and what the reader does.

const SECONDS_TO_PLAY = 10; // of the reader's time, for the plan that is shown
const MOST_OPEN = 64; // devices up to which hosts are unfolded at first

async function start() {
  const model = await readModel();
  document.getElementById("facts").append(...model.facts.flatMap(([name, text]) => [element("dt", { textContent: name }), element("dd", { textContent: text })]));
  if (!model.plans.length) return; // no data has to move
  document.getElementById("explorer").hidden = false;
  document.getElementById("explanation").open = false;
  window.explorer = new Explorer(model);
}

class Explorer {
  constructor(model) {
    this.model = model;
    this.plan = model.plans[0];
    this.seconds = 0;
    this.playing = false;
    this.route = null;
    this.picked = null; // the links of each direction, by name, of what is selected
    const many = model.nodes.filter((node) => node[5]).length > MOST_OPEN;
    this.folded = new Set(many ? model.boxes.keys() : []);
    this.get = (id) => document.getElementById(id);
    this.details = new Details(model);
    this.plans = new Plans(model, (k) => this.choosePlan(k));
    this.map = new LinkMap(model, (link, part) => this.chooseLink(link, part));
    this.table = new LinkTable(model, this.map);
    this.wirings = [];
    this.listCuts();
    this.trees = new Trees((route) => this.isolate(route));
    this.addWiring();
    this.sizes = new Sizes(model);
    this.controls();
    this.choosePlan(0);
    this.drawRamp();
    document.documentElement.dataset.ready = "true";
  }

  get end() {
    const shown = [this.plan, this.second].filter(Boolean);
    return Math.max(...(this.get("run-on").checked ? this.model.plans : shown).map((plan) => plan.seconds));
  }

  get cut() {
    const chosen = this.get("cut").value;
    return chosen === "all" ? this.model.cuts : this.model.cuts.filter((_, k) => String(k) === chosen);
  }

  addWiring() {
    const made = new Wiring(this.get("views"), this.model, this.folded, {
      state: (wiring) => ({ route: [undefined, wiring].includes(this.wirings[0]) ? this.route : null, cut: this.cut }),
      point: (wiring, id) => this.point(wiring, id),
      choose: (wiring, id) => this.choose(wiring, id),
      fold: (box) => this.fold(box),
    });
    this.wirings.push(made);
    return made;
  }

  controls() {
    const { get } = this, beside = get("beside");
    beside.addEventListener("change", () => this.setBeside(beside.value));
    get("cut").addEventListener("change", () => {
      this.mark();
      this.nameCut();
    });
    get("fold").hidden = !this.model.boxes.length;
    get("fold").addEventListener("click", () => this.foldAll());
    get("zoom-in").addEventListener("click", () => this.wirings.forEach((wiring) => wiring.zoom(1.4)));
    get("zoom-out").addEventListener("click", () => this.wirings.forEach((wiring) => wiring.zoom(1 / 1.4)));
    get("zoom-fit").addEventListener("click", () => this.wirings.forEach((wiring) => wiring.fit()));
    get("play").addEventListener("click", () => this.play(!this.playing));
    get("time").addEventListener("input", () => {
      this.play(false);
      this.at((Number(get("time").value) / 1000) * this.end);
    });
    get("run-on").addEventListener("change", () => this.at(Math.min(this.seconds, this.end)));
    document.addEventListener("keydown", (event) => this.key(event));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.restyle());
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      this.sizes.draw();
      this.details.draw();
      this.map.resize();
      this.at(this.seconds);
    });
    this.nameFold();
    this.nameCut();
  }

  restyle() {
    this.wirings.forEach((wiring) => wiring.restyle());
    this.map.show(this.plan);
    this.sizes.draw();
    this.details.draw();
    this.drawRamp();
  }

  drawRamp() {
    const context = this.get("ramp").getContext("2d");
    useRamp().forEach((colour, k, all) => {
      context.fillStyle = colour;
      context.fillRect((k * 120) / all.length, 0, 120 / all.length + 1, 10);
    });
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const typing = event.target.closest("button, select, summary, input");
    if (event.key === " " && typing) return;
    const actions = {
      " ": () => this.play(!this.playing),
      ".": () => this.step(1),
      ",": () => this.step(-1),
      f: () => this.foldAll(),
      c: () => this.toggleCut(),
      Escape: () => this.trees.press(null, null),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (event.target.closest("select") && event.key !== "Escape")) return;
    event.preventDefault();
    action();
  }

  step(parts) {
    this.play(false);
    this.at(Math.max(0, Math.min(this.end, this.seconds + (parts * this.plan.seconds) / this.model.parts)));
  }

  choosePlan(k) {
    this.plan = this.model.plans[k];
    this.listBeside();
    this.trees.show(this.plan);
    this.map.show(this.plan);
    this.table.show(this.plan);
    this.wirings[0].caption.textContent = `${this.plan.name}: ${this.plan.duration}`;
    if (this.picked) this.details.show(this.plan, this.picked);
    this.at(Math.min(this.seconds, this.end));
  }

  // Offer each plan but the one that is shown.
  listBeside() {
    const { plans } = this.model, beside = this.get("beside"), chosen = this.second === this.plan ? "" : beside.value;
    const others = [...plans.keys()].filter((k) => plans[k] !== this.plan);
    beside.replaceChildren(element("option", { value: "", textContent: "nothing" }),
      ...others.map((k) => element("option", { value: String(k), textContent: plans[k].name })));
    beside.value = chosen;
    if (this.second === this.plan) this.setBeside("");
  }

  setBeside(value) {
    if (this.wirings[1]) this.wirings.pop().remove();
    this.second = value === "" ? null : this.model.plans[Number(value)];
    if (this.second) this.addWiring().caption.textContent = `${this.second.name}: ${this.second.duration}`;
    this.wirings[0].fit();
    this.at(Math.min(this.seconds, this.end));
  }

  isolate(route) {
    this.route = route;
    this.mark();
  }

  mark() {
    this.wirings.forEach((wiring) => wiring.mark());
  }

  fold(box) {
    if (this.folded.has(box)) this.folded.delete(box);
    else this.folded.add(box);
    say(`${this.model.boxes[box][0]} is ${this.folded.has(box) ? "folded" : "unfolded"}.`);
    this.rebuild();
  }

  foldAll() {
    if (!this.model.boxes.length) return;
    if (this.folded.size) this.folded.clear();
    else this.model.boxes.forEach((_, box) => this.folded.add(box));
    say(this.folded.size ? "All hosts are folded." : "All hosts are unfolded.");
    this.rebuild();
  }

  rebuild() {
    this.wirings.forEach((wiring) => wiring.build());
    this.nameFold();
    this.at(this.seconds);
  }

  // Offer each tight cut, all of them, and none. Of several, only the first one is shown at the beginning.
  listCuts() {
    const cuts = this.model.cuts, options = cuts.map(({ name }, k) => element("option", { value: String(k), textContent: name }));
    if (cuts.length > 1) options.push(element("option", { value: "all", textContent: `all ${cuts.length}` }));
    this.get("cut").append(...options, element("option", { value: "", textContent: "hidden" }));
  }

  toggleCut() {
    const cut = this.get("cut");
    cut.value = cut.value === "" ? "0" : "";
    cut.dispatchEvent(new Event("change"));
  }

  nameCut() {
    const limited = this.model.facts.find(([name]) => name === "limited by");
    if (!limited) return;
    const { value } = this.get("cut"), count = this.model.cuts.length;
    const which = count > 1 && value !== "" && value !== "all" ? ` One of ${count} tight cuts is shown.` : "";
    this.get("cut-text").textContent = `No plan can exceed the bound: it is limited by ${limited[1]}.${which}`;
  }

  nameFold() {
    this.get("fold").textContent = this.folded.size ? "Unfold hosts" : "Fold hosts";
  }

  planOf(wiring) {
    return wiring === this.wirings[0] ? this.plan : this.second;
  }

  point(wiring, id) {
    this.pointed = id && [wiring, directionsOf(wiring, wiring.edgeOf.get(id))];
    wiring.tip.hidden = !id;
    this.showTip();
  }

  showTip() {
    if (!this.pointed) return;
    const [wiring, directions] = this.pointed, plan = this.planOf(wiring);
    wiring.tip.textContent = tipText(this.model, plan, directions, partAt(this.model, plan, this.seconds));
  }

  choose(wiring, id) {
    const plan = this.planOf(wiring), directions = directionsOf(wiring, wiring.edgeOf.get(id));
    wiring.pick(id);
    this.pick(plan, directions);
    this.map.mark(directions[0][1].length === 1 ? directions[0][1][0] : -1);
  }

  chooseLink(link, part) {
    const [src, dst] = this.model.links[link];
    const edge = this.wirings[0].edges.find(({ there, back }) => there.includes(link) || back.includes(link));
    this.wirings[0].pick(edge ? edge.id : null);
    if (part !== null) this.at(part * this.plan.seconds);
    this.pick(this.plan, [[`${this.model.nodes[src][0]} → ${this.model.nodes[dst][0]}`, [link]]]);
  }

  pick(plan, directions) {
    this.picked = directions;
    this.details.show(plan, directions);
    this.details.tick(this.seconds, partAt(this.model, plan, this.seconds));
    say(tipText(this.model, plan, directions, partAt(this.model, plan, this.seconds)));
  }

  play(on) {
    if (on === this.playing) return;
    this.playing = on;
    const button = this.get("play");
    button.textContent = on ? "Pause" : "Play";
    button.setAttribute("aria-pressed", String(on));
    if (!on) {
      this.at(this.seconds); // texts may be older than the drawing
      return;
    }
    if (this.seconds >= this.end) this.at(0);
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      const speed = (this.plan.seconds / SECONDS_TO_PLAY) * Number(this.get("speed").value);
      this.at(Math.min(this.end, this.seconds + (Math.max(0, now - before) / 1000) * speed));
      before = now;
      if (this.seconds >= this.end) this.play(false);
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // Show everything at a simulated time.
  at(seconds) {
    const { model } = this;
    this.seconds = seconds;
    const clock = performance.now();
    if (!this.playing || clock - (this.shown || 0) > 50) { // 20 times a second are enough for texts
      this.shown = clock;
      const end = this.end, slider = this.get("time"), text = `${durationText(seconds)} of ${durationText(end)}`;
      slider.value = String(Math.round((seconds / end) * 1000));
      this.get("now").textContent = text;
      slider.setAttribute("aria-valuetext", text);
    }
    this.wirings.forEach((wiring) => {
      const plan = this.planOf(wiring);
      wiring.painter.show(plan, partAt(model, plan, seconds));
    });
    this.plans.tick(seconds);
    this.map.tick(seconds);
    this.details.tick(seconds, partAt(model, this.plan, seconds));
    this.showTip();
  }
}

start();
