// Charts by Chart.js, in the colours of the page, each with words for those who do not see it.

import { h, time } from "./dom.js";

const live = new Set();

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Draw a chart. `make` returns its configuration, and is called again when the colours change. Returns its figure.
export function chart(words, make, { tall = false } = {}) {
  const canvas = h("canvas", { role: "img", "aria-label": words });
  const figure = h("figure", { class: tall ? "chart tall" : "chart" }, h("div", { class: "canvas" }, canvas));
  const drawn = { canvas, make, chart: null };
  live.add(drawn);
  queueMicrotask(() => draw(drawn));
  figure.update = () => draw(drawn);
  figure.describe = (text) => canvas.setAttribute("aria-label", text);
  return figure;
}

function draw(drawn) {
  if (!live.has(drawn)) return;
  const Chart = window.Chart;
  Chart.defaults.color = colour("quiet");
  Chart.defaults.borderColor = colour("line");
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  const made = drawn.make();
  if (drawn.chart && drawn.chart.config.type === made.type) {
    drawn.chart.data = made.data;
    drawn.chart.options = options(made.options);
    drawn.chart.update("none");
    return;
  }
  drawn.chart?.destroy();
  drawn.chart = new Chart(drawn.canvas, { ...made, options: options(made.options) });
}

function options(given) {
  return { animation: false, responsive: true, maintainAspectRatio: false, ...given };
}

export function forgetCharts() {
  for (const drawn of live) drawn.chart?.destroy();
  live.clear();
}

export function timeAxis(title, more = {}) {
  return { title: { display: true, text: title }, ticks: { callback: (value) => time(value), maxTicksLimit: 8 }, ...more };
}

export function logAxis(title, words = (value) => String(value)) {
  const shown = (value, ticks) => {
    const span = ticks.at(-1).value / ticks[0].value;
    const first = span < 2 ? "123456789" : span < 6 ? "1235" : "125";
    return /^\de/.test(value.toExponential()) && first.includes(value.toExponential()[0]);
  };
  return { type: "logarithmic", title: { display: true, text: title }, ticks: { callback: (value, _, ticks) => (shown(value, ticks) ? words(value) : null), maxRotation: 0 } };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.forEach(draw));
