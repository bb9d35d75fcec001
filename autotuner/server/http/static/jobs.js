// Jobs: all of them, and one as it runs.

import { follow, get, pause, post } from "./api.js";
import { chart, colour, timeAxis } from "./charts.js";
import { NONE, count, extents, facts, h, moment, percent, say, section, select, table, tile, tiles, time, wait, trouble } from "./dom.js";

export const STAGES = {
  space: "enumerating the search space", search: "searching launch parameters", ceilings: "measuring ceilings", compile: "compiling",
  measure: "measuring", confirm: "confirming", solve: "solving", end_to_end: "timing end to end", done: "done",
};
const STATES = ["queued", "running", "finished", "failed", "cancelled", "interrupted"];
const FAILED = { refused: "refused by a kernel", wrong: "wrong results", error: "errors", timeout: "timeouts", crashed: "crashed", out_of_memory: "out of memory" };

export function badge(job) {
  const words = job.cancelling && job.state === "running" ? "cancelling" : job.stalled ? "stalled" : job.state;
  return h("span", { class: `badge ${words}` }, words);
}

function bar(progress, label) {
  const known = progress && progress.total > 0;
  return h("progress", { max: known ? progress.total : 1, value: known ? progress.done : 0, "aria-label": label });
}

export async function jobsPage({ page, signal }) {
  let state = "";
  let oldest = null;
  let more = [];
  const list = h("div");
  const counts = h("p", { class: "quiet" });
  const filter = select([["", "all states"], ...STATES.map((each) => [each, each])], "");
  filter.setAttribute("aria-label", "Show only jobs of a state");
  const further = h("button", { type: "button", hidden: true }, "Show older jobs");
  const query = (before) => `v1/jobs?limit=25${state && `&state=${state}`}${before ? `&before=${before}` : ""}`;
  const columns = [
    { title: "Job", head: true, cell: (job) => h("a", { href: `#/jobs/${job.id}` }, `${job.id}`) },
    { title: "Model", cell: (job) => [h("a", { href: `#/jobs/${job.id}` }, job.model), h("span", { class: "quiet below wide" }, `${extents(job.extents)}, ${job.dtype}`)] },
    { title: "State", cell: (job) => [badge(job), job.state === "running" && bar(job.progress, `Job ${job.id}, calls of this stage`)] },
    { title: "Best plan", number: true, cell: (job) => time(job.progress?.best_us) },
    { title: "Gap", number: true, cell: (job) => percent(job.progress?.gap) },
    { title: "Left", number: true, wide: true, cell: (job) => (job.state === "running" ? wait(job.progress?.left_s) : NONE) },
    { title: "Device", wide: true, cell: (job) => job.device_name ?? job.device_type },
    { title: "Submitted", wide: true, cell: (job) => moment(job.created_at) },
  ];
  const fill = (jobs) => list.replaceChildren(table("Jobs, the newest first", columns, jobs, { empty: "No jobs yet: submit one." }));
  let drawn = "";
  const look = async () => {
    const [found, health] = await Promise.all([get(query(), signal), get("v1/healthz", signal)]);
    counts.textContent = `${health.queued} waiting, ${health.running} running, ${health.workers} ${health.workers === 1 ? "worker" : "workers"}`;
    if (!more.length) {
      oldest = found.next;
      further.hidden = oldest === null;
    }
    const now = JSON.stringify(found.items);
    if (now === drawn || list.contains(document.activeElement)) return;
    drawn = now;
    fill([...found.items, ...more]);
  };
  filter.addEventListener("change", async () => {
    state = filter.value;
    more = [];
    await look();
  });
  further.addEventListener("click", async () => {
    const found = await get(query(oldest), signal);
    more.push(...found.items);
    oldest = found.next;
    further.hidden = oldest === null;
    drawn = "";
    further.blur();
    await look();
  });
  await look();
  page.replaceChildren(
    h("div", { class: "title" }, h("h1", {}, "Jobs"), h("a", { class: "button main", href: "#/submit" }, "Submit a job")),
    h("div", { class: "row" }, counts, filter), list, h("p", {}, further),
  );
  (async () => {
    for (;;) {
      await pause(2000, signal);
      if (signal.aborted) return;
      await look().catch((error) => { if (!signal.aborted) counts.textContent = error.message; });
    }
  })();
}

export async function jobPage({ page, signal, caller, parts: [id] }) {
  let job = await get(`v1/jobs/${id}`, signal);
  const points = (await get(`v1/jobs/${id}/trace`, signal)).points.map((point) => ({ ...point, at: Date.parse(point.at) }));
  const state = h("span");
  const live = h("div");
  const about = h("div");
  const end = h("div");
  const failed = h("div");
  const cancel = h("button", { type: "button" }, "Cancel the job");
  const started = () => Date.parse(job.started_at ?? job.created_at);
  const series = (name) => points.filter((point) => point[name] !== null && point[name] !== undefined).map((point) => ({ x: (point.at - started()) / 1000, y: point[name] }));
  const picture = chart("The best plan and the bound over time", () => ({
    type: "line",
    data: {
      datasets: [
        { label: "best plan so far", data: series("best_us"), borderColor: colour("accent"), backgroundColor: colour("soft"), stepped: true, pointRadius: 0, borderWidth: 2, fill: "+1" },
        { label: "proven bound", data: series("bound_us"), borderColor: colour("bound"), backgroundColor: colour("bound"), stepped: true, pointRadius: 0, borderWidth: 2, borderDash: [6, 4] },
      ],
    },
    options: {
      interaction: { mode: "nearest", axis: "x", intersect: false },
      scales: { x: { type: "linear", min: 0, title: { display: true, text: "seconds since it was started" } }, y: timeAxis("predicted time of a training step", { beginAtZero: true }) },
      plugins: { tooltip: { callbacks: { title: ([item]) => wait(item.parsed.x), label: (item) => `${item.dataset.label}: ${time(item.parsed.y)}` } } },
    },
  }));
  const noChart = h("p", { class: "quiet" });
  let step = null;
  let spoken = "";

  // Until the plan is chosen, or until the job's limit, whichever comes first.
  function timeLeft(progress) {
    const known = progress.left_s ?? progress.eta_s;
    const limit = job.limits.seconds && Math.max(0, job.limits.seconds - (Date.now() - started()) / 1000);
    if (limit !== null && (known === null || limit < known)) return [wait(limit), "until the limit of the job"];
    return [wait(known), progress.left_s ? "until the plan is chosen" : "of this stage"];
  }

  function fill() {
    const progress = job.progress;
    const running = job.state === "running";
    state.replaceChildren(badge(job));
    cancel.hidden = !["queued", "running"].includes(job.state) || caller.role === "reader";
    cancel.disabled = job.cancelling;
    const stage = progress && (STAGES[progress.stage] ?? progress.stage);
    live.replaceChildren(
      job.stalled && h("p", { class: "problem" }, job.stalled),
      job.message && h("p", { class: job.state === "finished" ? "doubt" : "problem" }, job.message),
      job.state === "queued" && h("p", {}, job.waits_for ? ["It waits for ", h("a", { href: `#/jobs/${job.waits_for}` }, `job ${job.waits_for}`), ", which has the same request."] : ["It waits for a worker. ", h("a", { href: "#/fleet" }, "The fleet"), " shows who takes jobs."]),
      progress && running && h("div", { class: "progress" }, bar(progress, "Calls of this stage"), h("p", {}, `${stage}: ${count(progress.done)} of ${count(progress.total)}`, progress.note && `; ${progress.note}`)),
      progress && tiles(
        tile("best plan so far", time(progress.best_us), "predicted, of a training step"),
        tile("proven gap", percent(progress.gap), progress.bound_us ? `no plan takes less than ${time(progress.bound_us)}` : job.finished_at ? "it ended before one was proven" : "not known yet"),
        progress.estimated_gap !== null && running ? tile("estimated gap", percent(progress.estimated_gap), "by learned costs") : "",
        tile("measured", count(progress.measured), "calls of this job"),
        tile("reused", count(progress.reused), "known from earlier jobs"),
        tile("refused or failed", count(progress.failed), "calls without a time"),
        running ? tile("time left", ...timeLeft(progress)) : "",
      ),
    );
    for (const child of [...live.childNodes]) if (child.nodeType === Node.TEXT_NODE) child.remove();
    const any = points.some((point) => point.best_us !== null);
    noChart.hidden = any;
    noChart.textContent = ["queued", "running"].includes(job.state) ? "There is no plan yet: the chart begins with the first one." : "How it came along was not noted.";
    picture.hidden = !any;
    if (any) {
      const last = points.at(-1);
      picture.describe(`The best plan takes ${time(last.best_us)}, the bound is ${time(last.bound_us)}, after ${wait((last.at - started()) / 1000)}.`);
      picture.update();
    }
    end.replaceChildren();
    if (job.configuration_id !== null) {
      end.append(h("p", { class: "actions" }, h("a", { class: "button main", href: `#/configurations/${job.configuration_id}` }, "Open the plan"), h("span", { class: "quiet" }, `configuration ${job.configuration_id}`)));
    }
    const split = Object.entries(FAILED).map(([name, words]) => [words, job.counts[`status_${name}`]]).filter(([, number]) => number);
    failed.replaceChildren();
    if (split.length) failed.append(section("Calls without a time", facts(split.map(([words, number]) => [words, count(number)]))));
    about.replaceChildren(facts([
      ["model", job.model], ["extents", extents(job.extents)], ["dtype", job.dtype],
      Object.keys(job.options).length && ["options", Object.entries(job.options).map(([name, value]) => `${name}=${value}`).join(", ")],
      ["device", job.device_name ?? `any of type ${job.device_type}`], ["worker", job.worker ?? "none yet"],
      ["ends early at", [job.gap !== null && `a gap of ${percent(job.gap)}`, job.limits.seconds && wait(job.limits.seconds), job.limits.measurements && `${count(job.limits.measurements)} measurements`].filter(Boolean).join(", ") || "nothing: it measures all that matters"],
      job.budget_bytes && ["memory budget", `${count(job.budget_bytes)} bytes`],
      ["submitted", moment(job.created_at)], ["started", moment(job.started_at)], ["ended", moment(job.finished_at)],
      job.client && ["by", job.client], job.attempt > 1 && ["attempt", job.attempt], job.priority && ["priority", job.priority],
    ]));
    const words = `Job ${job.id} is ${job.state}${stage && running ? `, ${stage}` : ""}`;
    if (words !== spoken) say(words);
    spoken = words;
  }

  function heard(found) {
    job = found;
    const progress = job.progress;
    const now = progress && ["best_us", "bound_us", "measured"].map((name) => progress[name]).join();
    if (progress && now !== step) points.push({ at: Date.now(), ...progress });
    step = now;
    fill();
  }

  cancel.addEventListener("click", async () => {
    cancel.disabled = true;
    try {
      heard(await post(`v1/jobs/${id}/cancel`));
    } catch (error) {
      cancel.after(trouble(error));
    }
  });
  fill();
  page.replaceChildren(
    h("div", { class: "title" }, h("h1", {}, `Job ${job.id}: ${job.model}`), state, cancel),
    end, live,
    section("Best plan and bound over time", picture, noChart, h("p", { class: "quiet" }, "The gap between the lines is what a better plan could still win. The job ends when they meet, or earlier if it was asked to.")),
    failed, section("Request", about),
  );
  if (["queued", "running"].includes(job.state)) {
    follow(`v1/jobs/${id}/events`, heard, signal).catch((error) => {
      if (!signal.aborted) page.append(trouble(error));
    });
  }
}

