// Three charts of what was seen since the page was opened, ten minutes at most.

import uPlot from "/page/vendor/uPlot.esm.js";

import { byId, element, setText } from "./dom.js";
import { bytesPerSecond, count, percent, used } from "./format.js";

const KEPT = 600;
const HEIGHT = 150;
const FABRICS = ["verbs", "ofi", "tcp", "local", "other"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

const ofRole = (overview, name, value) => value(overview.roles.find((role) => role.role === name));

function ofFabric(overview, name) {
  const known = (fabric) => (FABRICS.includes(fabric) ? fabric : "other") === name;
  const there = overview.fabrics.filter((each) => known(each.fabric));
  return there.reduce((sum, each) => sum + each.bytes_per_second, 0);
}

const CHARTS = [
  {
    title: "KV cache moved, by fabric",
    format: bytesPerSecond,
    series: FABRICS.map((name) => ({ name, value: (overview) => ofFabric(overview, name) })),
    optional: true,
  },
  {
    title: "KV blocks in use",
    format: percent,
    range: [0, 1],
    series: ["prefill", "decode"].map((name) => ({
      name,
      value: (overview) => ofRole(overview, name, used),
    })),
  },
  {
    title: "Requests running and waiting",
    format: count,
    series: ["prefill", "decode"].map((name) => ({
      name,
      value: (overview) => ofRole(overview, name, (role) => role.running + role.waiting),
    })),
  },
];

class Chart {
  constructor(parent, { title, format, range, series, optional }) {
    this.series = series;
    this.format = format;
    this.optional = optional;
    this.data = [[], ...series.map(() => [])];
    this.values = element("ul", { class: "legend" });
    this.canvas = element("div", { class: "canvas", "aria-hidden": "true" });
    parent.append(
      element("figure", { class: "card" }, element("figcaption", {}, title), this.values, this.canvas),
    );
    this.entries = series.map(({ name }) => {
      const value = element("b");
      const entry = element("li", {}, element("span", { class: `swatch ${name}` }), `${name} `, value);
      entry.hidden = Boolean(optional);
      this.values.append(entry);
      return { entry, value };
    });
    const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 } };
    this.plot = new uPlot(
      {
        width: 300,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { show: false } },
        scales: { y: { range: (_, low, high) => range ?? [0, high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, values: "{HH}:{mm}:{ss}", space: 80 },
          { ...axis, size: 76, values: (_, ticks) => ticks.map((tick) => format(tick)) },
        ],
        series: [
          {},
          ...series.map(({ name }) => ({
            stroke: () => colour(name),
            width: 2,
            points: { show: false },
            show: !optional,
          })),
        ],
        hooks: { setCursor: [() => this.#tell()] },
      },
      this.data,
      this.canvas,
    );
    new ResizeObserver(([{ contentRect }]) => {
      this.plot.setSize({ width: Math.max(Math.floor(contentRect.width), 120), height: HEIGHT });
    }).observe(this.canvas);
  }

  // `overview` is null where a connection was lost: the line breaks there.
  add(at, overview) {
    this.data[0].push(at);
    this.series.forEach(({ value }, index) => {
      this.data[index + 1].push(overview === null ? null : value(overview));
    });
    if (this.data[0].length > KEPT) for (const values of this.data) values.shift();
    this.plot.setData(this.data);
    if (this.optional) {
      this.data.slice(1).forEach((values, index) => {
        const show = values.some((each) => each > 0);
        this.entries[index].entry.hidden = !show;
        if (this.plot.series[index + 1].show !== show) this.plot.setSeries(index + 1, { show });
      });
    }
    this.#tell();
  }

  redraw() {
    this.plot.redraw(false, true);
  }

  // The values under the pointer, else the last ones.
  #tell() {
    const index = this.plot?.cursor.idx ?? this.data[0].length - 1;
    this.entries.forEach(({ value }, number) => {
      const values = this.data[number + 1];
      setText(value, values[index] === null || index < 0 ? "–" : this.format(values[index]));
    });
  }
}

export class Charts {
  #charts = CHARTS.map((chart) => new Chart(byId("charts"), chart));
  #last = 0;

  constructor() {
    const scheme = window.matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.#charts.forEach((chart) => chart.redraw()));
  }

  show(overview) {
    // One clock may be set back, and another view of the fleet is drawn at once: one point a moment.
    if (overview.at <= this.#last) return;
    this.#last = overview.at;
    this.#charts.forEach((chart) => chart.add(overview.at, overview));
  }

  // The fleet is another one, or was out of sight for a while.
  interrupt() {
    if (this.#last === 0) return;
    this.#last += 0.001;
    this.#charts.forEach((chart) => chart.add(this.#last, null));
  }
}
