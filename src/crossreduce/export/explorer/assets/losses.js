"use strict";
// What the plan loses if a cable or a network card fails: a table, and below the selected link its row.

class Losses {
  constructor(model, lose) {
    this.model = model.losses;
    this.lose = lose;
    this.taken = null;
    this.panel = document.getElementById("losses-panel");
    this.offered = document.getElementById("loss");
    this.panel.hidden = !this.model;
    if (!this.model) return;
    const { rows, all, more } = this.model;
    if (more) document.getElementById("losses-more").textContent = ` ${more} other kinds of parts carry less data and were not planned.`;
    const [algorithm, time, rate, ratio] = all;
    const head = ["", "without", "parts of this kind", "time", "times as long", "by", "GB/s when large", "of the bound"];
    this.buttons = rows.map((row, k) => {
      const button = element("button", { type: "button", textContent: "Take away" });
      button.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-label", `Take ${row.name} away`);
      button.addEventListener("click", () => this.take(this.taken && this.taken.row === k ? null : { row: k, name: row.name, links: row.links, card: row.card }));
      return button;
    });
    const lines = rows.map((row, k) => this.line([this.buttons[k], row.half ? `half of ${row.name}` : row.name, String(row.alike), row.duration, row.times, row.algorithm, row.rate, row.ratio]));
    document.getElementById("losses").append(
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", textContent: text })))),
      element("tbody", {}, this.line(["", "nothing", "", time, "", algorithm, rate, ratio]), ...lines),
    );
  }

  line([button, name, ...cells]) {
    return element("tr", {}, element("td", {}, button), element("th", { scope: "row", textContent: name }), ...cells.map((cell) => element("td", {}, cell)));
  }

  // The part of a link or card: its row, name, links and node. ``found`` is an entry of the model.
  part(found) {
    return found && { row: found[0], name: found[1], links: found[2], card: found[3] };
  }

  offer(links) {
    const parts = this.model ? links.map((link) => this.part(this.model.links[link])) : [];
    this.show(parts.length && parts.every((part) => part && part.name === parts[0].name) ? parts[0] : null);
  }

  offerCard(name) {
    this.show(this.model ? this.part(this.model.cards[name]) : null);
  }

  // Show, below the numbers of a link, what the plan loses without it, and a button that takes it away.
  show(part) {
    this.offered.replaceChildren();
    if (!part) return;
    const row = this.model.rows[part.row], away = Boolean(this.taken) && this.taken.name === part.name;
    const button = element("button", { type: "button", textContent: away ? "Bring it back" : "Take it away" });
    button.addEventListener("click", () => {
      this.take(away ? null : part);
      this.show(part);
    });
    this.offered.append(element("p", { textContent: `${this.text(part)} ` }, button));
  }

  text({ row, name }) {
    const { half, duration, times, algorithm, rate, ratio } = this.model.rows[row];
    const how = half ? `With half of ${name}, which the plan needs` : `Without ${name}`;
    return `${how}: ${duration} by ${algorithm} (${times}), ${rate} GB/s when large, ${ratio} of the bound with it.`;
  }

  // Take a part away, or bring back all parts.
  take(part) {
    if (!part && !this.taken) return;
    this.taken = part;
    this.buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(Boolean(part) && part.row === k && part.name === this.model.rows[k].name)));
    const note = document.getElementById("loss-text");
    note.hidden = !part;
    note.textContent = part ? `Taken away: ${part.name}. ${this.text(part)}` : "";
    if (part) say(note.textContent);
    const row = part && this.model.rows[part.row];
    this.lose(part && { links: part.links, card: part.card, half: row.half, plan: row.name === part.name ? row.plan : null });
  }
}
