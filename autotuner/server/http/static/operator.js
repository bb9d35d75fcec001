// An operator of a plan: its step in words, and all its measured candidates by form, with what each costs in the whole.

import { get } from "./api.js";
import { change, count, form, h, table, time, trouble } from "./dom.js";
import { badges, distribution, marked, quantile } from "./distribution.js";

const LISTED = 15;

export async function operatorPanel(panel, id, step, name, open, signal) {
  const names = step.members.filter((each) => !each.again).map((each) => each.name);
  panel.hidden = false;
  panel.setAttribute("aria-busy", "true");
  const title = h("h2", { id: "operator-title", tabindex: -1 }, names.length ? `Operator ${name}` : `Step ${step.number}: ${step.label}`);
  const others = names.length > 1 ? h("p", {}, "Its kernel computes together: ", names.map((each, place) => [place ? ", " : "", each === name ? h("strong", {}, each) : h("button", { type: "button", class: "link", onclick: () => open(step, each) }, each)])) : "";
  const words = h("div");
  const measured = h("div", {}, names.length ? h("p", { class: "quiet" }, "Reading its measurements …") : "");
  panel.replaceChildren(title, others, words, measured);
  if (!names.length) {
    words.append(h("p", {}, `This conversion takes ${time(step.predicted_us)}, ${(100 * step.share).toFixed(1)} % of the kernels' time. ${step.kernel} copies the tensor from one form to the other.`));
    panel.removeAttribute("aria-busy");
    return;
  }
  try {
    const why = await get(`v1/configurations/${id}/operators/${name}`, signal);
    words.append(h("ul", { class: "words" }, why.words.map((each) => h("li", {}, each))));
    const found = await get(`v1/configurations/${id}/operators/${name}/candidates`, signal);
    measured.replaceChildren(...candidates(found));
  } catch (error) {
    if (signal.aborted) return;
    measured.replaceChildren(trouble(error));
  }
  panel.removeAttribute("aria-busy");
}

function label(group, most = 46) {
  const forms = group.forms.map(([tensor, text]) => `${tensor} ${form(text)}`).join(", ");
  return forms.length > most ? `${forms.slice(0, most - 1)}…` : forms;
}

function extra(each, note) {
  if (each.chosen) return "chosen";
  if (each.extra_us === null) return note ? "not known" : "in no plan";
  return each.is_exact ? change(each.extra_us) : `at least ${change(each.extra_us)}`;
}

function candidates(found) {
  const timed = found.groups.filter((group) => group.candidates.length);
  const total = timed.reduce((sum, group) => sum + group.candidates.length + group.more, 0);
  if (!timed.length) return [h("p", {}, "No measurement of it is in the database.")];
  const marks = { ...marked(found), chosen: null }; // the last column has it
  const columns = [
    { title: "Forms", head: true, cell: (group) => [group.operators.length > 1 || group.operators[0] !== found.operator ? h("span", { class: "below" }, group.operators.join(" + ")) : "", h("span", { class: "forms" }, label(group, 400)), h("span", { class: "quiet below" }, [group.declared && "as declared", badges(marks, [group]), h("span", { class: "narrow" }, ` ${group.candidates[0]?.kernel ?? ""}`)])] },
    { title: "Fastest kernel", wide: true, cell: (group) => (group.candidates.length ? [group.candidates[0].kernel, h("span", { class: "quiet" }, params(group.candidates[0].params))] : "–") },
    { title: "Fastest", number: true, cell: (group) => time(group.candidates[0]?.us) },
    { title: "Median", number: true, wide: true, cell: (group) => (group.candidates.length ? time(quantile(group.candidates.map((each) => each.us), 0.5)) : "–") },
    { title: "Slowest", number: true, wide: true, cell: (group) => time(group.candidates.at(-1)?.us) },
    { title: "Timed", number: true, wide: true, cell: (group) => count(group.candidates.length + group.more) },
    { title: "Not timed", wide: true, cell: (group) => [...Object.entries(group.failed).map(([name, number]) => `${number} ${name.replaceAll("_", " ")}`), group.unknown && `${group.unknown} unknown`].filter(Boolean).join(", ") || "–" },
    { title: "In the whole", number: true, cell: (group) => (group.chosen ? [h("span", { class: "badge finished" }, "chosen"), overtaken(group)] : group.candidates.length ? extra(group.candidates[0], found.note) : "–") },
  ];
  const isMarked = (group) => Object.values(marks).some((each) => each?.group === group);
  const first = found.groups.filter((group, place) => place < LISTED || isMarked(group));
  const listed = h("div", {}, table("Candidates by form", columns, first));
  const all = first.length < found.groups.length && h("button", { type: "button", onclick: () => listed.replaceChildren(table("Candidates by form", columns, found.groups)) }, `Show all ${count(found.groups.length)} groups`);
  return [
    h("p", {}, `${count(total)} candidates have a time. Chosen: ${time(found.chosen_us)}; its own best in any form: ${time(found.best_us)}; default (alone, as declared): ${time(found.default_us)}.`),
    ...distribution(found, (group, each) => [`${each.kernel}${params(each.params)}: ${time(each.us)}`, label(group, 80), `in the whole: ${extra(each, found.note)}`]),
    h("p", { class: "quiet" }, found.note || "In the whole: what the best plan with a candidate takes more than the best plan, everything else chosen anew. Where that is far from the best, it is a lower bound. A form that no measured conversion or neighbour fits is in no plan."),
    listed, all || "",
  ];
}

// Where measurements that came later make another plan better, the chosen one has a price, too.
function overtaken(group) {
  const more = group.candidates.find((each) => each.chosen)?.extra_us ?? 0;
  return more >= 0.05 ? h("span", { class: "quiet below" }, `${change(more)} by now`) : "";
}

export function params(found) {
  const words = Object.entries(found).map(([name, value]) => `${name}=${value}`).join(", ");
  return words && ` (${words})`;
}
