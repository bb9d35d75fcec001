// The plan of a configuration: the report as a page.

import { get, token } from "./api.js";
import { chart, colour, logAxis } from "./charts.js";
import { bytes, change, count, digits, facts, h, percent, section, table, tile, tiles, time, trouble } from "./dom.js";
import { graph } from "./graph.js";
import { operatorPanel, params } from "./operator.js";

let kept = null; // the plan that is shown, so that another operator of it needs no other page

export async function planPage(context) {
  const { page, signal, parts: [id, operator] } = context;
  const plan = await get(`v1/configurations/${id}/plan`, signal);
  kept = plan;
  const panel = h("section", { class: "panel", "aria-labelledby": "operator-title", hidden: true });
  const steps = h("div", {}, stepsTable(plan, null, open));
  const short = h("div", {}, inShort(plan, null, open));
  const drawn = graph(plan, (step) => open(step), signal);
  let opened = new AbortController();

  function open(step, name) {
    opened.abort();
    opened = new AbortController();
    signal.addEventListener("abort", () => opened.abort());
    const own = step.members.filter((each) => !each.again);
    drawn.choose(step.number);
    operatorPanel(panel, id, step, name ?? own[0]?.name, open, opened.signal);
    panel.scrollIntoView({ block: "nearest" });
    panel.querySelector("h2").focus({ preventScroll: true });
  }

  page.replaceChildren(
    h("div", { class: "title" }, h("h1", {}, `Plan ${id}: ${plan.reference}`), h("span", { class: "quiet" }, plan.dtype)),
    h("p", { class: "lead" }, plan.lead.replace(/ This is doubtful\..*/, "")),
    plan.doubts.length ? h("details", { class: "doubt" }, h("summary", {}, "These times are doubtful: measuring again may change the plan"), h("ul", {}, plan.doubts.map((each) => h("li", {}, each)))) : "",
    tiles(plan.figures.map((figure) => tile(figure.name, figure.value, figure.words))),
    section("In short", short),
    section("The training step", h("p", { class: "quiet" }, "A box is a kernel call with the operators that it computes. Click one to see its candidates. Drag to move, Ctrl and the wheel zoom."), drawn.element),
    panel,
    section("Steps", steps),
    section("Where the time goes", whereTime(plan)),
    section("Roofline", roofline(plan, open)),
    section("Memory over the step", memory(plan)),
    section("Fused sets", table("Sets of operators that one kernel could compute", [
      { title: "Operators", head: true, cell: (set) => set.operators.join(" + ") },
      { title: "Kernel", wide: true, cell: (set) => set.kernel || "none works" },
      { title: "Fused", number: true, sort: (set) => set.best_us, cell: (set) => time(set.best_us) },
      { title: "Taken now", number: true, sort: (set) => set.instead_us, cell: (set) => time(set.instead_us) },
      { title: "One by one", number: true, wide: true, sort: (set) => set.alone_us, cell: (set) => time(set.alone_us) },
      { title: "Chosen", cell: (set) => (set.chosen ? h("span", { class: "badge finished" }, "chosen") : "") },
    ], plan.fused_sets, { sorts: true, empty: "No kernel computes several of its operators." })),
    section("What could still overtake", plan.overtaking.length ? [h("p", { class: "quiet" }, `${count(plan.overtaking_count)} candidates could be better within the intervals of what was measured; the likeliest are listed.`), h("ul", {}, plan.overtaking.map((each) => h("li", {}, `${each.alternative.operators.join(" + ")} ${each.words}`)))] : h("p", {}, "Nothing, within the intervals of what was measured.")),
    section("Totals", table("Times of the whole training step", [
      { title: "Strategy", head: true, cell: (total) => total.name }, { title: "Time", number: true, cell: (total) => time(total.us) },
      { title: "Against the plan", number: true, cell: (total) => (total.against === null ? "–" : `${digits(total.against)}×`) }, { title: "Meaning", wide: true, cell: (total) => total.words },
    ], plan.totals), h("ul", {}, plan.remarks.map((each) => h("li", {}, each)))),
    section("Counts and facts", facts(plan.counts.filter((each) => each.tuned !== null).map((each) => [each.name, count(each.tuned)])), ...Object.entries(plan.facts).map(([name, pairs]) => h("details", {}, h("summary", {}, name), facts(pairs))), h("p", { class: "actions" }, h("button", { type: "button", onclick: () => download(id) }, "Download the configuration"))),
  );
  if (operator) {
    const step = plan.steps.find((each) => each.members.some((member) => member.name === operator && !member.again));
    if (step) setTimeout(() => open(step, operator));
    else page.prepend(trouble(new Error(`this plan has no operator ${operator}`)));
  }
  get(`v1/configurations/${id}/steps`, signal).then((measured) => {
    if (kept !== plan) return;
    steps.replaceChildren(...stepsTable(plan, measured, open));
    short.replaceChildren(...inShort(plan, measured, open));
  }).catch((error) => {
    if (!signal.aborted) steps.append(trouble(error));
  });
}

// The least time by the measured ceilings; null where they are not known.
function least(plan, step) {
  const { gb_per_s: moved, tflop_per_s: rates } = plan.ceilings;
  const rate = rates[plan.dtype] ?? Math.max(0, ...Object.values(rates));
  if (!moved || !rate) return null;
  return Math.max(step.moved_bytes / moved / 1e3, step.step_class === "contraction" ? step.flop / rate / 1e6 : 0);
}

// What a person asks first.
function inShort(plan, measured, open) {
  const total = plan.steps.reduce((sum, step) => sum + step.predicted_us, 0);
  const room = plan.steps.filter((step) => step.members.length).map((step) => ({ step, least: least(plan, step) })).filter((each) => each.least !== null)
    .map((each) => ({ ...each, gain: Math.max(0, each.step.predicted_us - each.least) })).sort((a, b) => b.gain - a.gain).slice(0, 5);
  const fallback = [...plan.steps].sort((a, b) => b.predicted_us - a.predicted_us).slice(0, 5).map((step) => ({ step, least: null, gain: null }));
  const rows = room.length ? room : fallback;
  const standard = plan.totals.find((each) => each.name === "default");
  const declared = measured?.declared_us ?? null;
  const conversions = plan.steps.filter((step) => step.step_class === "conversion");
  const wins = [];
  if (standard) wins.push(`Every operator alone, as declared, would take ${time(standard.us)}: the plan takes ${time(total)}, ${change(total - standard.us)}.`);
  if (declared !== null) wins.push(declared - total > 0.05
    ? `The best plan with every tensor as declared, fused kernels included, takes ${time(declared)}: so the choice of layouts wins ${time(declared - total)}, ${percent(1 - total / declared)} of it.`
    : `The best plan with every tensor as declared takes ${time(declared)}: the choice of layouts wins nothing here, the rest is fused kernels and faster ones.`);
  else if (measured) wins.push("No plan was measured with every tensor as declared, so what the layouts win is not known apart.");
  else wins.push("Reading the measurements …");
  wins.push(conversions.length ? `${count(conversions.length)} conversions between layouts take ${time(conversions.reduce((sum, step) => sum + step.predicted_us, 0))} of it.` : "No tensor is converted.");
  return [
    h("h3", {}, "Which operator would gain most from a faster kernel?"),
    h("p", {}, room.length
      ? [stepLink(rows[0].step, open), ` would: it takes ${time(rows[0].step.predicted_us)}, and ${time(rows[0].least)} by the measured ceilings of the device.`]
      : "The ceilings of this device were not measured, so what a step could gain is not known. These take longest."),
    table(room.length ? "Steps with the most to gain" : "Longest steps", [
      { title: "Step", head: true, cell: ({ step }) => stepLink(step, open) }, { title: "Takes", number: true, cell: ({ step }) => time(step.predicted_us) },
      ...(room.length ? [{ title: "By the ceilings", number: true, wide: true, cell: (row) => time(row.least) }, { title: "Could gain", number: true, cell: (row) => time(row.gain) }] : []),
    ], rows),
    h("h3", {}, "What did the choice of layouts win?"), h("ul", {}, wins.map((each) => h("li", {}, each))),
  ];
}

function stepLink(step, open) {
  return h("button", { type: "button", class: "link", onclick: () => open(step) }, step.label);
}

function stepsTable(plan, measured, open) {
  const rows = plan.steps.map((step, place) => ({ step, row: measured?.steps[place] ?? null }));
  const best = ({ step, row }) => (row ? row.best?.us ?? null : step.best_us);
  const high = Math.max(2, ...rows.map((each) => (best(each) ? Math.max(each.step.predicted_us, each.row?.default_us ?? 0, each.row?.worst?.us ?? 0) / best(each) : 1)));
  return [
    h("p", { class: "quiet" }, measured ? "Best, worst and default are of what was measured for the same operators, in any form. Times in microseconds." : "Reading the measurements …"),
    table("Steps in running order", [
      { title: "Step", number: true, sort: ({ step }) => step.number, cell: ({ step }) => step.number },
      { title: "Operators", head: true, sort: ({ step }) => step.label, cell: ({ step }) => [stepLink(step, open), h("span", { class: "quiet below" }, `${step.phase}, ${step.kernel}${params(step.params)}`)] },
      { title: "Chosen", number: true, sort: ({ step }) => step.predicted_us, cell: ({ step }) => digits(step.predicted_us) },
      { title: "Share", number: true, wide: true, sort: ({ step }) => step.share, cell: ({ step }) => percent(step.share) },
      { title: "Best", number: true, sort: best, cell: (each) => (best(each) ? digits(best(each)) : "–") },
      { title: "Default", number: true, wide: true, sort: ({ row }) => row?.default_us ?? null, cell: ({ row }) => (row?.default_us ? digits(row.default_us) : "–") },
      { title: "Worst", number: true, wide: true, sort: ({ row }) => row?.worst?.us ?? null, cell: ({ row }) => (row?.worst ? digits(row.worst.us) : "–") },
      { title: "In multiples of the best", wide: true, cell: (each) => range(each.step, each.row, best(each), high) },
      { title: "Timed", number: true, wide: true, sort: ({ row }) => row?.measured ?? null, cell: ({ row }) => (row ? `${count(row.measured)} of ${count(row.candidates)}` : "–") },
      { title: "Without it", number: true, wide: true, sort: ({ step }) => step.other?.alternative.extra_us ?? null, cell: ({ step }) => (step.other ? change(step.other.alternative.extra_us) : "–") },
    ], rows, { sorts: true }),
  ];
}

// Best to worst on a logarithmic scale, as the meter of one step.
function range(step, row, best, high) {
  if (!best || !row) return "–";
  const place = (us) => (us ? Math.min(100, Math.max(0, (100 * Math.log(us / best)) / Math.log(high))) : null);
  const mark = (name, us) => {
    if (!us) return "";
    const found = h("i", { class: name });
    found.style.left = `${place(us)}%`;
    return found;
  };
  const line = h("i", { class: "line", width_percent: row.worst ? place(row.worst.us) : 0 });
  return h("span", { class: "range", role: "img", "aria-label": `chosen ${digits(step.predicted_us / best)} times the best${row.default_us ? `, default ${digits(row.default_us / best)} times` : ""}${row.worst ? `, worst ${digits(row.worst.us / best)} times` : ""}` }, line, mark("default", row.default_us), mark("chosen", step.predicted_us));
}

function whereTime(plan) {
  const longest = Math.max(...plan.kernels.map((each) => each.us), 1e-9);
  return [
    table("By class of operator", [
      { title: "Class", head: true, cell: (each) => each.name }, { title: "Steps", number: true, cell: (each) => count(each.steps) },
      { title: "Time", number: true, cell: (each) => time(each.forward_us + each.backward_us) }, { title: "Share of time", number: true, cell: (each) => percent(each.share) },
      { title: "Of flop", number: true, wide: true, cell: (each) => percent(each.flop_share) }, { title: "Of bytes moved", number: true, wide: true, cell: (each) => percent(each.bytes_share) },
    ], plan.classes),
    table("By kernel", [
      { title: "Kernel", head: true, cell: (each) => each.name }, { title: "Calls", number: true, cell: (each) => count(each.number) }, { title: "Time", number: true, cell: (each) => time(each.us) },
      { title: "Beside the longest", wide: true, cell: (each) => h("span", { class: "meter", "aria-hidden": "true" }, h("i", { width_percent: (100 * each.us) / longest })) },
    ], plan.kernels),
  ];
}

function roofline(plan, open) {
  const points = plan.steps.filter((step) => step.moved_bytes && step.predicted_us).map((step) => ({ step, x: step.flop / step.moved_bytes, y: step.flop / step.predicted_us / 1e3 })).filter((point) => point.x > 0);
  const { gb_per_s: moved, tflop_per_s: rates } = plan.ceilings;
  if (!points.length) return h("p", {}, "No step computes anything.");
  const [low, high] = [Math.min(...points.map((point) => point.x)) / 2, Math.max(...points.map((point) => point.x)) * 2];
  const classes = [["contraction", "accent"], ["normalisation", "good"], ["element-wise", "declared"]];
  const roofs = moved ? Object.entries(rates).map(([dtype, rate]) => ({ dtype, line: [low, Math.min(high, Math.max(low, (rate * 1e3) / moved)), high].map((x) => ({ x, y: Math.min(rate * 1e3, x * moved) })) })) : [];
  const picture = chart(`Roofline: flop per byte against rate, of ${points.length} steps`, () => ({
    type: "scatter",
    data: { datasets: [
      ...classes.map(([name, shade]) => ({ label: name, data: points.filter((point) => point.step.step_class === name), backgroundColor: colour(shade), pointRadius: 5, pointHoverRadius: 7 })),
      ...roofs.map(({ dtype, line }) => ({ label: `measured ceilings, ${dtype}`, data: line, type: "line", borderColor: colour("bound"), backgroundColor: colour("bound"), borderWidth: 2, pointRadius: 0 })),
    ] },
    options: {
      scales: { x: logAxis("flop per byte moved"), y: logAxis("Gflop/s", (value) => digits(value)) },
      onClick: (_, [hit], drawn) => { const step = hit && drawn.data.datasets[hit.datasetIndex].data[hit.index].step; if (step) open(step); },
      plugins: { tooltip: { callbacks: { label: ({ raw }) => (raw.step ? [raw.step.label, `${time(raw.step.predicted_us)}, ${digits(raw.y)} Gflop/s, ${digits(raw.step.moved_bytes / raw.step.predicted_us / 1e3)} GB/s`] : "") } } },
    },
  }));
  return [picture, h("p", { class: "quiet" }, moved ? `Ceilings as measured: ${digits(moved)} GB/s${Object.entries(rates).map(([dtype, rate]) => `, ${digits(rate)} Tflop/s in ${dtype}`).join("")}. A point far below its ceiling has time to gain.` : "The ceilings of this device were not measured, so there is no roof.")];
}

function memory(plan) {
  const labels = plan.memory.map((each) => (each.step ? plan.steps[each.step - 1].label : "between forward and backward"));
  const layers = [["saved_bytes", "saved for backward", "accent"], ["working_bytes", "needed for the moment", "declared"], ["output_bytes", "handed out", "good"]];
  const sums = plan.memory.map((each) => each.saved_bytes + each.working_bytes + each.output_bytes);
  const peak = sums.indexOf(Math.max(...sums));
  const picture = chart(`Bytes that exist at each step: at most ${bytes(sums[peak])}, at ${labels[peak]}`, () => ({
    type: "line",
    data: { labels: plan.memory.map((each) => each.step || ""), datasets: [
      ...layers.map(([name, label, shade]) => ({ label, data: plan.memory.map((each) => each[name]), borderColor: colour(shade), backgroundColor: `${colour(shade)}aa`, fill: true, stepped: "middle", pointRadius: 0, borderWidth: 1 })),
      ...(plan.budget_bytes ? [{ label: "budget", data: plan.memory.map(() => plan.budget_bytes), borderColor: colour("bad"), borderDash: [6, 4], pointRadius: 0, borderWidth: 2, stack: "budget" }] : []),
    ] },
    options: {
      interaction: { mode: "index", intersect: false },
      scales: { x: { title: { display: true, text: "step" }, ticks: { maxTicksLimit: 20 } }, y: { stacked: true, beginAtZero: true, ticks: { callback: (value) => bytes(value), maxTicksLimit: 8 } } },
      plugins: { tooltip: { callbacks: { title: ([item]) => labels[item.dataIndex], label: (item) => `${item.dataset.label}: ${bytes(item.parsed.y)}` } } },
    },
  }));
  const [unit, per] = plan.tokens ? ["tokens", plan.tokens] : ["training steps", 1];
  const perSecond = (us) => (1e6 * per) / us;
  const front = plan.front.length > 1 ? [chart(`${unit} per second against memory, of ${plan.front.length} plans: ${plan.front.map((point) => `${rate(perSecond(point.predicted_us))} at a peak of ${bytes(point.peak_bytes)}`).join(", ")}`, () => ({
    type: "scatter",
    data: { datasets: [["held_bytes", "saved for backward", "accent", "circle"], ["peak_bytes", "peak", "declared", "rect"]].map(([name, label, shade, pointStyle]) => ({ label, data: plan.front.map((point) => ({ x: point[name], y: perSecond(point.predicted_us), us: point.predicted_us })), backgroundColor: colour(shade), borderColor: colour(shade), borderWidth: 1, showLine: true, pointRadius: 5, pointStyle })) },
    options: {
      scales: { x: { title: { display: true, text: "memory beside parameters and inputs" }, ticks: { callback: (value) => bytes(value), maxTicksLimit: 6 } }, y: { title: { display: true, text: `${unit} per second` }, ticks: { callback: (value) => rate(value) } } },
      plugins: { legend: { labels: { usePointStyle: true } }, tooltip: { callbacks: { label: ({ dataset, parsed, raw }) => `${rate(parsed.y)} ${unit} per second, ${time(raw.us)}, ${dataset.label} ${bytes(parsed.x)}` } } },
    },
  })), table("Leaner plans: less memory for more time", [
    { title: "Plan", head: true, cell: (point) => (point === plan.front[0] ? "this one" : `leaner ${plan.front.indexOf(point)}`) }, { title: "Kernels", number: true, cell: (point) => time(point.predicted_us) },
    ...(plan.tokens ? [{ title: "Tokens per second", number: true, cell: (point) => rate(perSecond(point.predicted_us)) }] : []),
    { title: "Steps per second", number: true, wide: true, cell: (point) => digits(1e6 / point.predicted_us) }, { title: "Saved for backward", number: true, cell: (point) => bytes(point.held_bytes) }, { title: "Peak", number: true, wide: true, cell: (point) => bytes(point.peak_bytes) },
  ], plan.front), plan.tokens ? h("p", { class: "quiet" }, `A training step is of ${count(plan.tokens)} tokens, batch times length. The rate is that of this graph alone, by the sum of its kernels' times.`) : ""] : "";
  const needs = plan.needs.length ? table("What a training step needs, beside parameters and inputs", [{ title: "Of", head: true, cell: (need) => need.name }, { title: "Bytes", number: true, cell: (need) => bytes(need.count) }, { title: "Meaning", wide: true, cell: (need) => need.words }], plan.needs) : "";
  return [picture, h("p", { class: "quiet" }, `The most is ${bytes(sums[peak])}, at step ${plan.memory[peak].step || "the boundary"} (${labels[peak]}), without the kernels' workspaces.`), front, needs];
}

// A rate: "945", "12.4K", "3.05M".
function rate(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

async function download(id) {
  const response = await fetch(`v1/configurations/${id}`, { headers: token() ? { Authorization: `Bearer ${token()}` } : {} });
  const found = await response.json();
  const url = URL.createObjectURL(new Blob([JSON.stringify(found.configuration, null, 1)], { type: "application/json" }));
  h("a", { href: url, download: `configuration-${id}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

