"use strict";
// Numbers of one link, or of all links between two folded hosts: a tip beside the pointer, a table, and a chart.

// The directions of a line of a wiring, each with its name and links.
function directionsOf(wiring, edge) {
  const a = wiring.name(edge.a), b = wiring.name(edge.b);
  return [[`${a} → ${b}`, edge.there], [`${b} → ${a}`, edge.back]].filter(([, links]) => links.length);
}

function tipText(plan, directions, part) {
  return directions.map(([name, links]) => {
    const sum = sumOf(plan, links), count = links.length > 1 ? `${links.length} links, ` : "";
    return `${name}\n${count}${speedText(sum.speed)}, ${Math.round(meanUse(plan, links, part))} % used ${part === MEAN ? "on average" : "now"}\n` +
      `${bytesText(sum.bytes)} in ${sum.transfers} transfers, busy ${sum.busy.toFixed(2)} %`;
  }).join("\n");
}

class Details {
  constructor() {
    this.place = document.getElementById("details");
    this.chartPlace = document.getElementById("link-chart");
    this.directions = null;
    this.chart = null;
    this.seconds = null;
  }

  show(plan, directions) {
    this.plan = plan;
    this.directions = directions;
    this.part = -1;
    const head = element("tr", {}, ...["Link", "GB/s", "bytes", "busy", "transfers", "used"].map((text) => element("th", { scope: "col", textContent: text })));
    this.nows = [];
    const rows = directions.map(([name, links]) => {
      const sum = sumOf(plan, links), now = element("td");
      this.nows.push(now);
      const title = links.length > 1 ? `${name} (${links.length} links)` : name;
      return element("tr", {}, element("th", { scope: "row", textContent: title }),
        element("td", { textContent: String(Number(sum.speed.toPrecision(5))) }),
        element("td", { textContent: bytesText(sum.bytes), title: `${sum.bytes} bytes` }),
        element("td", { textContent: `${sum.busy.toFixed(2)} %` }), element("td", { textContent: String(sum.transfers) }), now);
    });
    this.place.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    this.draw();
  }

  draw() {
    if (!this.directions) return;
    const { plan, directions } = this, { parts } = plan.map;
    if (this.chart) this.chart.destroy();
    const times = Array.from({ length: parts }, (_, part) => ((part + 0.5) / parts) * plan.seconds * 1e6);
    const series = directions.map(([, links]) => times.map((_, part) => (meanUse(plan, links, part) / 100) * sumOf(plan, links).speed));
    const colours = [theme("partial"), theme("final")];
    const axis = { stroke: theme("soft"), grid: { stroke: theme("line"), width: 1 }, ticks: { stroke: theme("line"), width: 1 }, font: "11px system-ui" };
    this.chart = new uPlot({
      width: Math.max(200, this.chartPlace.clientWidth), height: 150, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false, range: [0, plan.seconds * 1e6] }, y: { range: (_, low, high) => [0, high * 1.05 || 1] } },
      axes: [{ ...axis, size: 34, label: "us", labelSize: 14, labelFont: "11px system-ui" }, { ...axis, size: 46, label: "GB/s", labelSize: 14, labelFont: "11px system-ui" }],
      series: [{}, ...directions.map(([name], k) => ({ label: name, stroke: colours[k], width: 1.5, points: { show: false } }))],
      hooks: { draw: [(chart) => this.mark(chart)] },
    }, [times, ...series], this.chartPlace);
  }

  // Draw the present time into the chart.
  mark(chart) {
    if (this.seconds === null) return;
    const x = Math.round(chart.valToPos(Math.min(this.seconds, this.plan.seconds) * 1e6, "x", true)), { top, height } = chart.bbox;
    chart.ctx.fillStyle = theme("ink");
    chart.ctx.fillRect(x, top, 1.5, height);
  }

  tick(seconds, part) {
    if (!this.directions || (seconds === this.seconds && part === this.part)) return;
    const moved = part !== this.part;
    this.seconds = seconds;
    this.part = part;
    if (!moved) return;
    this.directions.forEach(([, links], k) => {
      this.nows[k].textContent = `${Math.round(meanUse(this.plan, links, part))} %`;
    });
    if (this.chart) this.chart.redraw(false);
  }
}
