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
    this.seconds = null; // the mean over the time of the plan
    this.playing = false;
    this.route = null;
    this.picked = null; // the links of each direction, by name, of what is selected
    this.folded = new Map([model, model.other].filter(Boolean).map((map) => { // for each wiring, its folded hosts
      const many = map.nodes.filter((node) => node[5]).length > MOST_OPEN;
      return [map, new Set(many ? map.boxes.keys() : [])];
    }));
    this.get = (id) => document.getElementById(id);
    this.details = new Details();
    this.losses = new Losses(model, (loss) => this.lose(loss));
    this.plans = new Plans(model, (k) => this.choosePlan(k));
    this.map = new LinkMap(model, (links, part) => this.chooseLinks(links, part));
    this.table = new LinkTable();
    this.wirings = [];
    this.listCuts();
    this.trees = new Trees((route) => this.isolate(route));
    this.sizes = new Sizes(model);
    this.controls();
    this.choosePlan(0);
    const beside = model.plans.findIndex((plan) => plan.beside);
    if (beside >= 0) {
      this.get("beside").value = String(beside);
      this.setBeside(String(beside));
    }
    this.drawRamp();
    document.documentElement.dataset.ready = "true";
  }

  get end() {
    const shown = [this.plan, this.second].filter(Boolean);
    return Math.max(...(this.get("run-on").checked ? this.model.plans : shown).map((plan) => plan.seconds));
  }

  cutOf(map) {
    const { value } = this.get("cut"), shown = map === this.plan.map ? value : value && "0"; // the list is that of the plan
    return shown === "all" ? map.cuts : map.cuts.filter((_, k) => String(k) === shown);
  }

  // Show a plan in the first wiring, or beside it in the second one.
  addWiring(plan, place) {
    const first = place === 0;
    if (this.wirings[place] && this.wirings[place].model === plan.map) {
      this.wirings[place].plan = plan;
      this.wirings[place].mark();
      return this.wirings[place];
    }
    const made = new Wiring(this.get("views"), plan.map, this.folded.get(plan.map), {
      state: (wiring) => ({ route: first ? this.route : null, cut: this.cutOf(plan.map), lost: this.lostIn(wiring ? wiring.plan || plan : plan, first) }),
      point: (wiring, id) => this.point(wiring, id),
      choose: (wiring, id) => this.choose(wiring, id),
      chooseCard: (wiring, node) => this.chooseCard(wiring, node),
      fold: (wiring, box) => this.fold(wiring, box),
    });
    made.plan = plan;
    if (this.wirings[place]) {
      this.get("views").insertBefore(made.view, this.wirings[place].view);
      this.wirings[place].remove();
    }
    this.wirings[place] = made;
    return made;
  }

  // The links and the network card that have failed: in a plan without them, or those that were taken away.
  lostIn(plan, first) {
    if (plan.lost) return { links: plan.lost, card: plan.card, half: plan.half };
    const loss = first && plan.map === this.model ? this.loss : null;
    return loss || { links: [], card: null, half: false };
  }

  controls() {
    const { get } = this, beside = get("beside");
    beside.addEventListener("change", () => this.setBeside(beside.value));
    get("cut").addEventListener("change", () => {
      this.mark();
      this.nameCut();
    });
    get("fold").addEventListener("click", () => this.foldAll());
    get("zoom-in").addEventListener("click", () => this.wirings.forEach((wiring) => wiring.zoom(1.4)));
    get("zoom-out").addEventListener("click", () => this.wirings.forEach((wiring) => wiring.zoom(1 / 1.4)));
    get("zoom-fit").addEventListener("click", () => this.wirings.forEach((wiring) => wiring.fit()));
    get("play").addEventListener("click", () => this.play(!this.playing));
    get("mean").addEventListener("click", () => this.mean());
    get("time").addEventListener("input", () => {
      this.play(false);
      this.at((Number(get("time").value) / 1000) * this.end);
    });
    get("run-on").addEventListener("change", () => this.again());
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
      this.again();
    });
  }

  restyle() {
    this.wirings.forEach((wiring) => wiring.restyle());
    this.map.show(this.plan);
    this.sizes.draw();
    this.details.draw();
    this.drawRamp();
    this.drawAxis();
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
      m: () => this.mean(),
      Escape: () => {
        this.trees.press(null, null);
        this.losses.take(null);
      },
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (event.target.closest("select") && event.key !== "Escape")) return;
    event.preventDefault();
    action();
  }

  step(parts) {
    this.play(false);
    this.at(Math.max(0, Math.min(this.end, (this.seconds || 0) + (parts * this.plan.seconds) / this.model.parts)));
  }

  // Show the mean over the time of the plan.
  mean() {
    this.play(false);
    this.at(null);
  }

  // Show the present time again, after a change of the plans.
  again() {
    this.at(this.seconds === null ? null : Math.min(this.seconds, this.end));
  }

  choosePlan(k) {
    const { map } = this.plan;
    this.plan = this.model.plans[k];
    if (map !== this.plan.map) {
      this.picked = null;
      this.listCuts();
    }
    this.addWiring(this.plan, 0).caption.textContent = `${this.plan.name}: ${this.plan.duration}`;
    this.listBeside();
    this.trees.show(this.plan);
    this.map.show(this.plan);
    this.table.show(this.plan);
    this.nameFold();
    this.nameCut();
    if (this.picked) this.details.show(this.plan, this.picked);
    this.again();
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
    this.second = value === "" ? null : this.model.plans[Number(value)];
    if (this.wirings[1] && !this.second) this.wirings.pop().remove();
    if (this.second) this.addWiring(this.second, 1).caption.textContent = `${this.second.name}: ${this.second.duration}`;
    this.wirings[0].fit();
    this.again();
  }

  // Take a part away, or bring it back; show the plan without it beside the plan, if the page has it.
  lose(loss) {
    this.loss = loss;
    this.mark();
    const { plans } = this.model, beside = this.get("beside");
    const value = loss && loss.plan !== null && plans[loss.plan] !== this.plan ? String(loss.plan) : "";
    if (loss ? value : this.second && this.second.lost) {
      beside.value = value;
      this.setBeside(value);
    }
  }

  isolate(route) {
    this.route = route;
    this.mark();
  }

  mark() {
    this.wirings.forEach((wiring) => wiring.mark());
  }

  fold({ model, folded }, box) {
    if (folded.has(box)) folded.delete(box);
    else folded.add(box);
    say(`${model.boxes[box][0]} is ${folded.has(box) ? "folded" : "unfolded"}.`);
    this.rebuild();
  }

  foldAll() {
    const { boxes } = this.plan.map;
    if (!boxes.length) return;
    const fold = !this.folded.get(this.plan.map).size;
    for (const [map, folded] of this.folded) {
      folded.clear();
      if (fold) map.boxes.forEach((_, box) => folded.add(box));
    }
    say(fold ? "All hosts are folded." : "All hosts are unfolded.");
    this.rebuild();
  }

  rebuild() {
    this.wirings.forEach((wiring) => wiring.build());
    this.nameFold();
    this.at(this.seconds);
  }

  // Offer each tight cut, all of them, and none. Of several, only the first one is shown at the beginning.
  listCuts() {
    const { cuts } = this.plan.map, options = cuts.map(({ name }, k) => element("option", { value: String(k), textContent: name }));
    if (cuts.length > 1) options.push(element("option", { value: "all", textContent: `all ${cuts.length}` }));
    this.get("cut").replaceChildren(...options, element("option", { value: "", textContent: "hidden" }));
  }

  toggleCut() {
    const cut = this.get("cut");
    cut.value = cut.value === "" ? "0" : "";
    cut.dispatchEvent(new Event("change"));
  }

  nameCut() {
    const { limited, cuts } = this.plan.map;
    if (!limited) return;
    const { value } = this.get("cut"), count = cuts.length;
    const which = count > 1 && value !== "" && value !== "all" ? ` One of ${count} tight cuts is shown.` : "";
    this.get("cut-text").textContent = `No plan can exceed the bound: it is limited by ${limited}.${which}`;
  }

  nameFold() {
    this.get("fold").hidden = !this.plan.map.boxes.length;
    this.get("fold").textContent = this.folded.get(this.plan.map).size ? "Unfold hosts" : "Fold hosts";
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
    wiring.tip.textContent = tipText(plan, directions, partAt(plan, this.seconds));
  }

  choose(wiring, id) {
    const plan = this.planOf(wiring), directions = directionsOf(wiring, wiring.edgeOf.get(id));
    wiring.pick(id);
    this.pick(plan, directions);
    if (wiring === this.wirings[0]) this.map.mark(directions[0][1]);
  }

  chooseCard(wiring, node) {
    wiring.pick(`n${node}`);
    if (wiring.model === this.model) this.losses.offerCard(this.model.nodes[node][0]);
  }

  // Select the links of a row of the map.
  chooseLinks(links, part) {
    const edge = links.length === 1 && this.wirings[0].edges.find(({ there, back }) => there.includes(links[0]) || back.includes(links[0]));
    this.wirings[0].pick(edge ? edge.id : null);
    if (part !== null) this.at(part * this.plan.seconds);
    this.pick(this.plan, [[links.length === 1 ? linkName(this.plan.map, links[0]) : this.map.titleOf(links), links]]);
  }

  pick(plan, directions) {
    this.picked = plan.map === this.plan.map ? directions : null;
    this.details.show(plan, directions);
    this.details.tick(this.seconds, partAt(plan, this.seconds));
    this.losses.offer(plan.map === this.model ? directions.flatMap(([, links]) => links) : []);
    say(tipText(plan, directions, partAt(plan, this.seconds)));
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
    if (this.seconds === null || this.seconds >= this.end) this.at(0);
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

  // The time axis of the slider, and above it the mean use of all links of the plan over time.
  drawAxis() {
    const { end, plan } = this, { parts } = this.model, canvas = this.get("profile"), context = canvas.getContext("2d");
    canvas.width = parts * 2;
    const share = plan.seconds / end, moved = plan.done.slice(1).map((done, k) => done - plan.done[k]), most = Math.max(...moved);
    const texts = [0, 0.25, 0.5, 0.75, 1].map((part) => durationText(part * end));
    this.get("axis").replaceChildren(...texts.map((text) => element("span", { textContent: text })));
    context.fillStyle = theme("bar");
    moved.forEach((one, part) => {
      const high = most ? (one / most) * canvas.height : 0;
      context.fillRect(part * 2 * share, canvas.height - high, 2 * share + 0.5, high);
    });
  }

  // Show everything at a simulated time, or the means if it is ``null``.
  at(seconds) {
    this.seconds = seconds;
    const clock = performance.now();
    if (!this.playing || clock - (this.shown || 0) > 50) { // 20 times a second are enough for texts
      this.shown = clock;
      const { end } = this, slider = this.get("time");
      const text = seconds === null ? `mean over ${this.plan.duration}` : `${durationText(seconds)} of ${durationText(end)}`;
      if (this.axis !== `${end} ${this.plan.name}`) {
        this.axis = `${end} ${this.plan.name}`;
        this.drawAxis();
      }
      slider.value = String(Math.round(((seconds || 0) / end) * 1000));
      slider.classList.toggle("mean", seconds === null);
      this.get("mean").setAttribute("aria-pressed", String(seconds === null));
      this.get("now").textContent = text;
      slider.setAttribute("aria-valuetext", text);
    }
    this.wirings.forEach((wiring) => {
      const plan = this.planOf(wiring);
      wiring.painter.show(plan, partAt(plan, seconds));
    });
    this.plans.tick(seconds);
    this.map.tick(seconds);
    this.details.tick(seconds, partAt(this.plan, seconds));
    this.showTip();
  }
}

start();
