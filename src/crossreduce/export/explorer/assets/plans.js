"use strict";
// The plans on one clock, and the list of trees and rings of the plan that is shown.

class Plans {
  constructor(model, choose) {
    this.model = model;
    const place = document.getElementById("plans");
    this.bars = model.plans.map((plan, k) => {
      const radio = element("input", { type: "radio", name: "plan", value: String(k), checked: k === 0 });
      radio.addEventListener("change", () => choose(k));
      const bar = element("i"), done = element("span", { className: "done" });
      const facts = [plan.times, plan.busbw, plan.rate, plan.ratio, this.measured(plan, k)].filter(Boolean).join(", ");
      const name = k === 0 ? `${plan.name} (this plan)` : plan.name;
      place.append(element("label", { className: "plan" }, radio, element("span", { className: "name", textContent: name }),
        element("span", { className: "time", textContent: plan.duration }),
        element("span", { className: "track" }, bar),
        element("span", { className: "more", textContent: facts }), done));
      return [bar, done];
    });
  }

  // The measured time of the plan of the page, if it was measured at this size.
  measured(plan, k) {
    const row = k === 0 && this.model.measured.find(([bytes]) => bytes === this.model.bytes);
    return row ? `measured ${row[3]} (${row[6]} x)` : "";
  }

  // The part of the data that has moved. Without a time, bars are as long as plans take.
  tick(seconds) {
    const slowest = Math.max(...this.model.plans.map((plan) => plan.seconds));
    this.model.plans.forEach((plan, k) => {
      const [bar, text] = this.bars[k], done = seconds === null ? (100 * plan.seconds) / slowest : doneAt(plan, seconds);
      bar.style.transform = `scaleX(${done / 100})`;
      const now = seconds === null ? "" : seconds >= plan.seconds ? "finished" : `${Math.floor(done)} %`;
      if (text.textContent !== now) text.textContent = now;
    });
  }
}

class Trees {
  constructor(isolate) {
    this.isolate = isolate;
    this.place = document.getElementById("trees");
    this.all = document.getElementById("show-all");
    this.all.addEventListener("click", () => this.press(null, null));
  }

  show(plan) {
    this.plan = plan;
    this.press(null, null);
    if (!plan.groups.length) {
      this.place.replaceChildren(element("p", { className: "note", textContent: "This plan has too many steps for a list of its trees." }));
      return;
    }
    this.place.replaceChildren(...plan.groups.map((group, k) => {
      const folds = new Map(); // routes of one shape are one entry, which unfolds
      for (const route of group.routes) folds.set(route.fold || route, [...(folds.get(route.fold) || []), route]);
      const entry = (route) => element("li", {}, this.button(route));
      const list = element("ul", {}, ...[...folds].map(([fold, routes]) => fold === routes[0] ? entry(fold)
        : element("li", {}, element("details", {}, element("summary", { textContent: fold }), element("ul", {}, ...routes.map(entry))))));
      const rest = group.count - group.routes.length;
      if (rest) list.append(element("li", { className: "note", textContent: `and ${rest} more` }));
      const share = group.share === "1" ? "the whole buffer" : `${group.share} of the buffer`;
      return element("details", { open: k === 0 || plan.groups.length < 4 }, element("summary", { textContent: `${group.title}: ${share}` }), list);
    }));
  }

  button(route) {
    const share = route.chunks === "1 chunk" ? route.share : `${route.share}, ${route.chunks}`;
    const made = element("button", { type: "button", title: route.title }, element("span", { textContent: route.title }), element("span", { textContent: share }));
    made.setAttribute("aria-pressed", "false");
    made.addEventListener("click", () => {
      const again = made.getAttribute("aria-pressed") === "true";
      this.press(again ? null : made, again ? null : route);
    });
    return made;
  }

  press(button, route) {
    for (const other of this.place.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    this.all.disabled = !route;
    this.isolate(route);
    const text = document.getElementById("route-text");
    text.hidden = !route;
    text.textContent = route ? `Shown: ${route.title}, ${route.share === "1" ? "the whole buffer" : `${route.share} of the buffer`} in ${route.chunks}.` : "";
    if (route) say(`Only ${route.title} is shown, ${route.share} of the buffer.`);
  }
}
