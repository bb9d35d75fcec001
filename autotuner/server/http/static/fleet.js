// The fleet: devices, who takes jobs for them, what they measure, and why some are idle or left out.

import { get, pause } from "./api.js";
import { STAGES } from "./jobs.js";
import { NONE, bytes, count, facts, h, moment, section, table, time } from "./dom.js";

export async function fleetPage({ page, signal }) {
  const note = h("p", { class: "quiet" });
  const content = h("div");

  async function look() {
    const [devices, running, queued] = await Promise.all([get("v1/devices", signal), get("v1/jobs?state=running&limit=200", signal), get("v1/jobs?state=queued&limit=200", signal)]);
    const workers = devices.flatMap((device) => device.workers);
    const idle = workers.filter((worker) => !running.items.some((job) => job.worker === worker.name && !job.stalled));
    const gpus = devices.flatMap((device) => device.gpus);
    note.textContent = `${count(workers.length)} ${workers.length === 1 ? "worker" : "workers"}, ${count(idle.length)} idle; ${count(gpus.length)} GPUs of fleets, ${count(gpus.filter((gpu) => !gpu.used).length)} left out; ${count(queued.items.length)} ${queued.items.length === 1 ? "job waits" : "jobs wait"}`;
    const stalled = running.items.filter((job) => job.stalled);
    if (content.contains(document.activeElement)) return;
    content.replaceChildren(
      ...stalled.map((job) => h("p", { class: "problem" }, h("a", { href: `#/jobs/${job.id}` }, `Job ${job.id}`), `: ${job.stalled}`)),
      ...(devices.length ? devices.map((device) => shown(device, running.items, queued.items)) : [h("p", { class: "quiet" }, "No device is known yet: start a worker with `autotuner worker`, or the service with `--with-worker`.")]),
      ...unserved(devices, queued.items),
    );
  }

  await look();
  page.replaceChildren(h("h1", {}, "Fleet"), note, content);
  (async () => {
    for (;;) {
      await pause(3000, signal);
      if (signal.aborted) return;
      await look().catch((error) => { if (!signal.aborted) note.textContent = error.message; });
    }
  })();
}

function shown(device, running, queued) {
  const measured = device.environments.reduce((sum, each) => sum + Object.values(each.measurements).reduce((a, b) => a + b, 0), 0);
  const parts = [];
  if (device.workers.length) {
    parts.push(table("Workers", [
      { title: "Worker", head: true, cell: (worker) => worker.name },
      { title: "Does", cell: (worker) => doing(worker, device, running, queued) },
      { title: "Memory", number: true, wide: true, cell: (worker) => bytes(worker.memory_bytes) },
      { title: "Since", wide: true, cell: (worker) => moment(worker.started_at) },
    ], device.workers));
  } else {
    parts.push(h("p", {}, "No worker takes jobs for it: it was measured on before. ", h("code", {}, "autotuner worker"), " on its machine starts one."));
  }
  if (device.gpus.length) {
    parts.push(table("GPUs of fleets", [
      { title: "GPU", head: true, cell: (gpu) => [`${gpu.host}, ${gpu.slot}`, h("span", { class: "quiet below wide" }, gpu.uuid)] },
      { title: "State", cell: (gpu) => h("span", { class: `badge ${gpu.used ? "running" : "failed"}` }, gpu.used ? "measures" : "left out") },
      { title: "Reason", cell: (gpu) => gpu.reason || NONE },
      { title: "Test product", number: true, wide: true, cell: (gpu) => time(gpu.canary_us) },
      { title: "Seen", wide: true, cell: (gpu) => moment(gpu.seen_at) },
    ], device.gpus));
  }
  const environments = device.environments.map((each) => h("details", {}, h("summary", {}, `Environment ${each.key.slice(0, 12)}: ${count(each.measurements.ok)} calls with a time, ${count(Object.entries(each.measurements).filter(([name]) => name !== "ok").reduce((sum, [, number]) => sum + number, 0))} without`), facts([...Object.entries(each.facts), ...Object.entries(each.policy).map(([name, value]) => [`policy: ${name}`, value])].map(([name, value]) => [name, String(value)]))));
  return section(device.name || `A device of type ${device.type}`, h("p", { class: "quiet" }, `type ${device.type}; ${count(measured)} measurements`), parts, environments);
}

// Jobs that wait for a device for which nobody takes jobs.
function unserved(devices, queued) {
  const served = (job) => devices.some((device) => device.workers.length && fits(job, device));
  const found = queued.filter((job) => !served(job));
  return found.length ? [section("Jobs that nobody takes", h("p", {}, "No worker is there for the device that they ask for."), h("ul", {}, found.slice(0, 20).map((job) => h("li", {}, h("a", { href: `#/jobs/${job.id}` }, `Job ${job.id}`), ` asks for ${job.device_name ?? `a device of type ${job.device_type}`}`))))] : [];
}

function fits(job, device) {
  return job.device_type === device.type && (job.device_name === null || job.device_name === device.name);
}

function doing(worker, device, running, queued) {
  const jobs = running.filter((job) => job.worker === worker.name && !job.stalled);
  if (jobs.length) {
    return jobs.map((job) => h("span", { class: "below" }, h("a", { href: `#/jobs/${job.id}` }, `job ${job.id}, ${job.model}`), job.progress ? `: ${STAGES[job.progress.stage] ?? job.progress.stage}, ${count(job.progress.done)} of ${count(job.progress.total)}${job.progress.note ? `; ${job.progress.note}` : ""}` : ": it has just begun"));
  }
  const fitting = queued.filter((job) => fits(job, device));
  const why = fitting.length
    ? fitting.every((job) => job.waits_for) ? `the ${fitting.length === 1 ? "job that waits has" : "jobs that wait have"} the same request as one that runs` : "it is about to take a job"
    : queued.length ? `${count(queued.length)} ${queued.length === 1 ? "job waits" : "jobs wait"}, for other devices` : "no job waits";
  return [h("span", { class: "badge queued" }, "idle"), h("span", { class: "quiet" }, ` ${why}`)];
}
