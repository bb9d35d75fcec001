// Configurations: all of them, with search, and two side by side.

import { get } from "./api.js";
import { chart, colour, timeAxis } from "./charts.js";
import { change, count, digits, extents, h, moment, percent, section, table, tile, tiles, time } from "./dom.js";

export async function configurationsPage({ page, signal }) {
  const search = h("input", { type: "search", id: "search", placeholder: "model, dtype or device", autocomplete: "off" });
  const list = h("div");
  const further = h("button", { type: "button", hidden: true }, "Show older ones");
  const compare = h("button", { type: "button", class: "main", disabled: true }, "Compare two");
  const picked = new Set();
  let found = [];
  let next = null;
  const path = () => `v1/configurations?limit=50&search=${encodeURIComponent(search.value.trim())}${next ? `&before=${next}` : ""}`;
  const columns = [
    { title: "Compare", cell: (each) => h("input", { type: "checkbox", "aria-label": `Compare configuration ${each.id}`, checked: picked.has(each.id), onchange: (event) => pick(each.id, event.target.checked) }) },
    { title: "Number", head: true, cell: (each) => h("a", { href: `#/configurations/${each.id}` }, `${each.id}`) },
    { title: "Model", cell: (each) => [h("a", { href: `#/configurations/${each.id}` }, each.model), h("span", { class: "quiet below" }, `${extents(each.extents)}, ${each.dtype}`)] },
    { title: "Device", wide: true, cell: (each) => each.device_name || each.device_type },
    { title: "Predicted", number: true, cell: (each) => time(each.total_us) },
    { title: "Measured", number: true, wide: true, cell: (each) => time(each.measured_us) },
    { title: "Against default", number: true, wide: true, cell: (each) => (each.default_us ? `${digits(each.default_us / each.total_us)}×` : "–") },
    { title: "Gap", number: true, wide: true, cell: (each) => percent(each.proven_gap) },
    { title: "Made", wide: true, cell: (each) => [moment(each.created_at), each.complete ? "" : h("span", { class: "quiet below" }, "not complete")] },
  ];

  function pick(id, chosen) {
    if (chosen) picked.add(id);
    else picked.delete(id);
    compare.disabled = picked.size !== 2;
    compare.textContent = picked.size === 2 ? `Compare ${[...picked].sort((a, b) => a - b).join(" and ")}` : `Compare two (${picked.size} chosen)`;
  }

  async function look(anew) {
    if (anew) {
      found = [];
      next = null;
    }
    const asked = search.value;
    const answer = await get(path(), signal);
    if (asked !== search.value) return;
    found.push(...answer.items);
    next = answer.next;
    further.hidden = next === null;
    list.replaceChildren(table("Configurations, the newest first", columns, found, { empty: search.value ? "Nothing fits this search." : "No configurations yet: a job makes one." }));
  }

  let timer = null;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => look(true), 200);
  });
  further.addEventListener("click", () => look(false));
  compare.addEventListener("click", () => { location.hash = `#/compare/${[...picked].sort((a, b) => a - b).join("/")}`; });
  await look(true);
  page.replaceChildren(h("h1", {}, "Configurations"), h("div", { class: "row" }, h("label", { for: "search" }, "Search"), search, compare), list, h("p", {}, further));
}

export async function comparePage({ page, signal, parts: [one, other] }) {
  const found = await get(`v1/configurations/${one}/compare/${other}`, signal);
  const worth = found.parts.filter((part) => Math.abs(part.worth_us) >= 0.05);
  const shown = worth.slice(0, 15);
  const picture = chart(
    `What each part takes more in configuration ${other}: ${shown.slice(0, 5).map((part) => `${part.name} ${change(part.worth_us)}`).join(", ")}`,
    () => ({
      type: "bar",
      data: { labels: shown.map((part) => short(part.name)), datasets: [{ label: `${other} less ${one}`, data: shown.map((part) => part.worth_us), backgroundColor: shown.map((part) => colour(part.worth_us > 0 ? "bad" : "good")) }] },
      options: {
        indexAxis: "y",
        scales: { x: timeAxis(`takes more in ${other} (right) or in ${one} (left)`), y: { ticks: { autoSkip: false } } },
        plugins: { legend: { display: false }, tooltip: { callbacks: { label: (item) => change(item.parsed.x) } } },
      },
    }),
    { tall: shown.length > 6 },
  );
  const columns = [
    { title: "Operators", head: true, sort: (part) => part.name, cell: (part) => [h("span", {}, short(part.name, 60)), h("span", { class: "quiet below" }, part.phase)] },
    { title: "Worth", number: true, sort: (part) => part.worth_us, cell: (part) => h("span", { class: Math.abs(part.worth_us) < 0.05 ? "" : part.worth_us > 0 ? "bad" : "good" }, change(part.worth_us)) },
    { title: `In ${one}`, number: true, wide: true, sort: (part) => part.one_us, cell: (part) => (part.one.length ? time(part.one_us) : "–") },
    { title: `In ${other}`, number: true, wide: true, sort: (part) => part.other_us, cell: (part) => (part.other.length ? time(part.other_us) : "–") },
    { title: `In what ${one} differs from ${other}`, cell: (part) => (part.words.length ? h("ul", {}, part.words.map((words) => h("li", {}, words.replace("the first", one).replace("the second", other)))) : h("span", { class: "quiet" }, "they run the same")) },
  ];
  const differing = found.parts.filter((part) => part.words.length);
  const rows = found.parts;
  page.replaceChildren(
    h("h1", {}, `Configurations ${one} and ${other}`),
    h("p", {}, h("a", { href: `#/configurations/${one}` }, `Plan of ${one}`), " · ", h("a", { href: `#/configurations/${other}` }, `Plan of ${other}`), " · ", h("a", { href: `#/compare/${other}/${one}` }, "The other way round")),
    tiles(
      tile(`kernels of ${one}`, time(found.one_us), "sum of their times"), tile(`kernels of ${other}`, time(found.other_us), "sum of their times"),
      tile("difference", change(found.other_us - found.one_us), percent(found.other_us / found.one_us - 1)),
      found.one_measured_us ? tile(`${one}, end to end`, time(found.one_measured_us), "measured") : "",
      found.other_measured_us ? tile(`${other}, end to end`, time(found.other_measured_us), "measured") : "",
      tile("parts in another way", `${count(differing.length)} of ${count(rows.length)}`),
    ),
    h("ul", {}, found.words.map((words) => h("li", {}, words.replace("the first", `configuration ${one}`).replace("the second", `configuration ${other}`)))),
    shown.length ? section("What each difference is worth", picture) : "",
    section("Part by part", h("p", { class: "quiet" }, "A part is the least set of operators that both compute by whole kernel calls."), table("Parts, the greatest difference first", columns, rows, { sorts: true })),
    section("Requests and environments", table("What else differs", [
      { title: "Fact", head: true, cell: (fact) => fact[0] }, { title: `${one}`, cell: (fact) => fact[1] }, { title: `${other}`, cell: (fact) => fact[2] },
    ], found.facts, { empty: "They were asked for and measured in the same way." })),
  );
}

export function short(name, most = 34) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}
