// How the times of an operator's candidates are distributed by form: violins with each candidate in them, and a table.

import { chart, colour, logAxis } from "./charts.js";
import { count, field, form, h, say, select, table, time } from "./dom.js";

const ROWS = 14;
const OTHER_ROWS = 5;
const OUTLINED = 5; // so many candidates of different times make an outline; fewer stand alone
const STEPS = 48;
const HALF = 0.4;
const LABEL = 22;
const MARKS = [["chosen", "accent", "rectRot", 0], ["own best", "good", "triangle", -0.3], ["default", "declared", "rect", 0.3]];

// The candidates that are marked, by the mark's name; null where one has no time.
export function marked(found) {
  const own = found.groups[0].operators.join();
  const all = found.groups.flatMap((group) => group.candidates.map((each) => ({ group, each })));
  const first = (holds) => all.find(holds) ?? null;
  return {
    chosen: first(({ each }) => each.chosen),
    "own best": first(({ group, each }) => group.operators.join() === own && each.us === found.best_us),
    default: first(({ group, each }) => group.operators.join() === found.operator && group.declared && each.us === found.default_us),
  };
}

export function badges(marks, groups) {
  return MARKS.filter(([name]) => groups.includes(marks[name]?.group)).map(([name]) => [" ", h("span", { class: `badge mark ${name.replace(" ", "-")}` }, name)]);
}

export function distribution(found, tip) {
  const marks = marked(found);
  const own = found.groups[0].operators.join();
  const timed = found.groups.filter((group) => group.candidates.length);
  const same = timed.filter((group) => group.operators.join() === own);
  const others = otherWork(found, timed.filter((group) => group.operators.join() !== own));
  const tensors = spread(same);
  const by = select([...tensors.map((name) => [name, `forms of ${name}`]), ["", "forms of all tensors together"]], tensors[0] ?? "");
  let rows = rowsBy(by.value, same, others, marks);
  const picture = chart("", () => violins(rows.drawn, marks, tip));
  const numbers = h("div");
  const told = h("p", { class: "quiet" });
  const show = () => {
    rows = rowsBy(by.value, same, others, marks);
    const what = by.value ? `forms of ${by.value}` : "forms of all tensors";
    picture.classList.toggle("tall", rows.drawn.length > 6);
    picture.describe(`Distribution of times by ${what}, ${count(rows.drawn.length)} rows. ${MARKS.map(([name]) => `${name} ${time(marks[name]?.each.us)}`).join(", ")}. The table In numbers has each row.`);
    picture.update();
    told.textContent = `Each dot is a candidate. A row with ${OUTLINED} different times or more has an outline: the wider, the more candidates take such a time.${others.length ? " Kernels that compute other operators with it, or it alone, have rows of their own, below." : ""}${rows.all.length > rows.drawn.length ? ` ${count(rows.drawn.length)} of ${count(rows.all.length)} rows are drawn, all are in the table.` : ""}`;
    numbers.replaceChildren(numbersTable(`Times by ${what}`, rows.all, marks));
  };
  show();
  by.addEventListener("change", () => {
    show();
    say(`${count(rows.drawn.length)} rows, ${by.selectedOptions[0].textContent}`);
  });
  return [tensors.length ? h("div", { class: "row" }, field("Rows of the chart", by)) : "", picture, told, h("details", {}, h("summary", {}, "In numbers"), numbers)];
}

// Tensors of several forms, those with most forms first; of as many, what is written before what is read.
function spread(groups) {
  const forms = new Map();
  for (const group of groups) for (const [tensor, text] of group.forms) forms.set(tensor, (forms.get(tensor) ?? new Set()).add(form(text)));
  const names = [...forms.keys()].filter((name) => forms.get(name).size > 1).reverse();
  return names.sort((a, b) => forms.get(b).size - forms.get(a).size);
}

// A row for each other set of operators that a kernel computes with this one; alone comes first.
function otherWork(found, groups) {
  const label = (operators) => (operators.length === 1 ? "alone, any form" : `${operators.length} fused: with ${operators.filter((each) => each !== found.operator).join(", ")}`);
  const rows = rowsOf(groups, (group) => group.operators.join(), (group) => label(group.operators));
  return rows.sort((a, b) => a.groups[0].operators.length === 1 ? -1 : b.groups[0].operators.length === 1 ? 1 : a.us[0] - b.us[0]);
}

function rowsBy(tensor, same, others, marks) {
  const formOf = (group) => group.forms.find(([name]) => name === tensor)?.[1];
  const key = tensor ? (group) => form(formOf(group) ?? "inside the kernel") : (group) => group.forms.map(([, text]) => form(text)).join(" ");
  const forms = rowsOf(same, key, key);
  const isChosen = (row) => row.groups.includes(marks.chosen?.group);
  forms.sort((a, b) => isChosen(b) - isChosen(a) || a.us[0] - b.us[0]);
  const any = forms.length > 1 ? rowsOf(same, () => "", () => "all forms") : [];
  return { all: [...any, ...forms, ...others], drawn: [...any, ...forms.slice(0, ROWS), ...others.slice(0, OTHER_ROWS)] };
}

function rowsOf(groups, key, label) {
  const rows = new Map();
  for (const group of groups) {
    const row = rows.get(key(group)) ?? { label: label(group), groups: [], points: [], more: 0 };
    row.groups.push(group);
    row.points.push(...group.candidates.map((each) => ({ group, each })));
    row.more += group.more;
    rows.set(key(group), row);
  }
  return [...rows.values()].map((row) => ({ ...row, us: row.points.map(({ each }) => each.us).sort((a, b) => a - b) }));
}

// The value below which a share of sorted values lies.
export function quantile(sorted, share) {
  const place = (sorted.length - 1) * share;
  const low = Math.floor(place);
  return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

// A smooth density of times on a logarithmic scale: pairs of a time and its density, of which the largest is 1.
function density(us) {
  const logs = us.map(Math.log);
  const mean = logs.reduce((sum, each) => sum + each, 0) / logs.length;
  const deviation = Math.sqrt(logs.reduce((sum, each) => sum + (each - mean) ** 2, 0) / logs.length);
  const range = (quantile(logs, 0.75) - quantile(logs, 0.25)) / 1.34;
  const [low, high] = [logs[0], logs.at(-1)];
  const width = Math.max(0.9 * Math.min(deviation, range || deviation) * logs.length ** -0.2, (high - low) / 40);
  const found = Array.from({ length: STEPS + 1 }, (_, step) => {
    const at = low + ((high - low) * step) / STEPS;
    return [Math.exp(at), logs.reduce((sum, each) => sum + Math.exp(-(((at - each) / width) ** 2) / 2), 0)];
  });
  const most = Math.max(...found.map(([, value]) => value));
  return found.map(([at, value]) => [at, value / most]);
}

function outline(row, place) {
  const found = density(row.us);
  const half = (side) => found.map(([x, value]) => ({ x, y: place + side * HALF * value }));
  const closed = [...half(-1), ...half(1).reverse()];
  return [...closed, closed[0]];
}

function violins(rows, marks, tip) {
  const outlined = rows.map((row, place) => [row, place]).filter(([row]) => new Set(row.us).size >= OUTLINED);
  const at = (row, place, point, number) => ({ x: point.each.us, y: place + (row.points.length > 1 ? (((number * 7) % 11) - 5) * 0.03 : 0), ...point });
  const dots = rows.flatMap((row, place) => row.points.map((point, number) => at(row, place, point, number)));
  const names = rows.map(({ label }) => (label.length > LABEL ? `${label.slice(0, LABEL - 1)}…` : label));
  const mark = ([name, shade, style, shift]) => {
    const place = marks[name] && rows.flatMap((row, number) => (row.groups.includes(marks[name].group) ? [number] : []));
    return { label: name, data: (place ?? []).map((number) => ({ x: marks[name].each.us, y: number + shift, ...marks[name] })), backgroundColor: colour(shade), borderColor: colour("paper"), borderWidth: 1, pointStyle: style, pointRadius: 6, pointHoverRadius: 8 };
  };
  return {
    type: "scatter",
    data: { datasets: [
      ...MARKS.map(mark),
      { label: "candidate", data: dots, backgroundColor: colour("dot"), borderWidth: 0, pointRadius: dots.length > 300 ? 1.5 : 2.5, pointHoverRadius: 5 },
      ...outlined.map(([row, place]) => ({ label: "", data: outline(row, place), showLine: true, fill: "shape", backgroundColor: colour("soft"), borderColor: colour("dot"), borderWidth: 1, pointRadius: 0, pointHitRadius: 0, pointHoverRadius: 0 })),
    ] },
    options: {
      scales: {
        x: logAxis("time of the kernel", time),
        y: { min: -0.6, max: rows.length - 0.4, reverse: true, afterBuildTicks: (axis) => { axis.ticks = rows.map((_, value) => ({ value })); }, ticks: { autoSkip: false, callback: (value) => names[value] ?? "" } },
      },
      plugins: {
        legend: { onClick: () => {}, labels: { usePointStyle: true, filter: (item) => item.text !== "" } },
        tooltip: { filter: ({ raw }) => Boolean(raw.each), callbacks: { label: ({ raw }) => tip(raw.group, raw.each) } },
      },
    },
  };
}

function numbersTable(caption, rows, marks) {
  return table(caption, [
    { title: "Form", head: true, cell: (row) => [h("span", { class: "forms" }, row.label), badges(marks, row.groups)] },
    { title: "Timed", number: true, sort: (row) => row.us.length + row.more, cell: (row) => count(row.us.length + row.more) },
    { title: "Fastest", number: true, sort: (row) => row.us[0], cell: (row) => time(row.us[0]) },
    { title: "Lower quartile", number: true, wide: true, cell: (row) => time(quantile(row.us, 0.25)) },
    { title: "Median", number: true, sort: (row) => quantile(row.us, 0.5), cell: (row) => time(quantile(row.us, 0.5)) },
    { title: "Upper quartile", number: true, wide: true, cell: (row) => time(quantile(row.us, 0.75)) },
    { title: "Slowest", number: true, wide: true, sort: (row) => row.us.at(-1), cell: (row) => time(row.us.at(-1)) },
  ], rows, { sorts: true });
}
