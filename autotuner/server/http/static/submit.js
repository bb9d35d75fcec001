// Submitting a job: a model of the service with a preset, or the content of a model file.

import { get, post, randomKey } from "./api.js";
import { field, h, select, trouble } from "./dom.js";

const DTYPES = ["float32", "bfloat16", "float16", "float64"];

export async function submitPage({ page, signal, caller }) {
  const [models, devices] = await Promise.all([get("v1/models", signal), get("v1/devices", signal)]);
  const key = randomKey();
  const model = select(models.map((each) => [each.name]), models[0]?.name);
  const preset = h("select");
  const axes = h("div", { class: "fields" });
  const options = h("div", { class: "fields" });
  const known = h("fieldset", {}, h("legend", {}, "Model"), h("div", { class: "fields" }, field("Model", model), field("Preset", preset)), axes, h("details", {}, h("summary", {}, "Options of the model"), options));
  const text = h("textarea", { rows: 14, spellcheck: "false", class: "code", placeholder: "version: 1\nname: my-layer\naxes: {b: batch, h: hidden}\n…" });
  const file = h("input", { type: "file", accept: ".yaml,.yml,.json" });
  const pastedPreset = h("input", { type: "text", autocomplete: "off" });
  const pasted = h("fieldset", { hidden: true }, h("legend", {}, "Model file"), field("Content of the model file", text, "YAML or JSON, as autotuner submit takes it"), field("Or read a file", file), field("Preset of the file", pastedPreset, "Empty for its own extents"));
  const ways = h("fieldset", { class: "ways" }, h("legend", {}, "What is tuned"), ...[["known", "A model of the service"], ["pasted", "A model file"]].map(([value, words], place) => h("label", {}, h("input", { type: "radio", name: "way", value, checked: place === 0, onchange: choose }), ` ${words}`)));
  const names = devices.flatMap((device) => (device.name ? [[`${device.type} ${device.name}`, `${device.type}: ${device.name}`]] : []));
  const types = [...new Set(["cpu", "cuda", ...devices.map((device) => device.type)])].map((type) => [type, `any device of type ${type}`]);
  const busy = devices.find((each) => each.workers.length);
  const device = select([...types, ...names], busy ? busy.type : "cpu");
  const dtype = select([["", "as the model says"], ...DTYPES.map((each) => [each])], "");
  const gap = number("0", "any");
  const seconds = number("1", "any");
  const measurements = number("1");
  const budget = number("1", "any");
  const priority = h("input", { type: "number", min: -100, max: caller.role === "admin" ? 100 : 0, step: 1, value: 0 });
  const exhaustive = h("input", { type: "checkbox", id: "f-exhaustive" });
  const endToEnd = h("input", { type: "checkbox", id: "f-end", checked: true });
  const wrong = h("div");
  const send = h("button", { type: "submit", class: "main" }, "Submit the job");

  function number(min, step = "1") {
    return h("input", { type: "number", min, step, inputmode: "decimal" });
  }

  function chosen() {
    return models.find((each) => each.name === model.value);
  }

  function choose() {
    const way = ways.querySelector("input:checked").value;
    known.hidden = way !== "known";
    pasted.hidden = way !== "pasted";
  }

  function fillPresets() {
    const presets = Object.keys(chosen()?.presets ?? {});
    preset.replaceChildren(...presets.map((each) => h("option", { value: each }, each)));
    options.replaceChildren(...Object.entries(chosen()?.options ?? {}).map(([name, option]) => field(name, "choices" in option
      ? select(option.choices.map((each) => [String(each)]), String(option.default))
      : h("input", { type: "text", value: String(option.default), autocomplete: "off" }))));
    [...options.querySelectorAll("select, input")].forEach((each, place) => { each.dataset.option = Object.keys(chosen().options)[place]; });
    fillAxes();
  }

  function fillAxes() {
    const values = chosen()?.presets[preset.value] ?? {};
    axes.replaceChildren(...Object.entries(chosen()?.axes ?? {}).map(([axis, words]) => {
      const input = h("input", { type: "number", min: 1, step: 1, value: values[axis] ?? "", id: `extent-${axis}`, required: values[axis] === undefined ? null : true });
      input.dataset.axis = axis;
      return field(`${axis}: ${words}`, input);
    }));
  }

  function request() {
    const [type, ...name] = device.value.split(" ");
    const body = { device: { type, name: name.join(" ") || null }, priority: Number(priority.value || 0), exhaustive: exhaustive.checked, end_to_end: endToEnd.checked };
    if (dtype.value) body.dtype = dtype.value;
    if (gap.value) body.gap = Number(gap.value) / 100;
    if (budget.value) body.budget_bytes = Math.round(Number(budget.value) * 2 ** 20);
    body.limits = { seconds: seconds.value ? Number(seconds.value) : null, measurements: measurements.value ? Number(measurements.value) : null };
    if (pasted.hidden) {
      const values = chosen().presets[preset.value] ?? {};
      const own = [...axes.querySelectorAll("input")].filter((each) => each.value && Number(each.value) !== values[each.dataset.axis]);
      body.model = preset.value ? `${model.value}:${preset.value}` : model.value;
      body.extents = Object.fromEntries(own.map((each) => [each.dataset.axis, Number(each.value)]));
      body.options = Object.fromEntries([...options.querySelectorAll("select, input")].map((each) => [each.dataset.option, read(each.value, chosen().options[each.dataset.option].default)]).filter(([each, value]) => value !== chosen().options[each].default));
    } else {
      body.model = window.jsyaml.load(text.value);
      if (pastedPreset.value) body.preset = pastedPreset.value;
      if (typeof body.model !== "object" || body.model === null) throw new Error("this is no model file: it has no fields");
    }
    return body;
  }

  model.addEventListener("change", fillPresets);
  preset.addEventListener("change", fillAxes);
  file.addEventListener("change", async () => { if (file.files.length) text.value = await file.files[0].text(); });
  fillPresets();
  const form = h("form", { onsubmit: submit, novalidate: false },
    ways, known, pasted,
    h("fieldset", {}, h("legend", {}, "Where, and in which dtype"), h("div", { class: "fields" }, field("Device", device), field("Dtype", dtype))),
    h("fieldset", {}, h("legend", {}, "When it ends"),
      h("div", { class: "fields" }, field("Gap, in percent", gap, "It ends once the plan is proven to be so near the best"), field("Seconds", seconds, "It answers with the best plan by then"), field("Measurements", measurements, "At most so many new ones")),
      h("p", {}, exhaustive, h("label", { for: "f-exhaustive" }, " measure also what is proven to make no difference")),
      h("p", {}, endToEnd, h("label", { for: "f-end" }, " time the plan end to end against torch"))),
    h("fieldset", {}, h("legend", {}, "Memory and order"), h("div", { class: "fields" }, field("Memory budget, in MiB", budget, "Empty for no limit"), field("Priority", priority, "Higher ones are taken first"))),
    wrong, h("p", { class: "actions" }, send),
  );

  async function submit(event) {
    event.preventDefault();
    wrong.replaceChildren();
    send.disabled = true;
    try {
      await loadYaml(pasted.hidden);
      const job = await post("v1/jobs", request(), { "Idempotency-Key": key });
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      wrong.replaceChildren(trouble(error), ...(error.errors ?? []).slice(0, 10).map((each) => h("p", { class: "quiet" }, `${each.field}: ${each.message}`)));
    }
    send.disabled = false;
  }

  page.replaceChildren(h("h1", {}, "Submit a job"), caller.role === "reader" ? h("p", { class: "problem" }, "Your token is of role reader: a submitter may submit jobs.") : "", form);
}

function read(text, like) {
  return typeof like === "number" ? Number(text) : typeof like === "boolean" ? text === "true" : text;
}

// Only who pastes a model file needs a reader of YAML.
async function loadYaml(without) {
  if (without || window.jsyaml) return;
  await new Promise((resolve, reject) => {
    document.head.append(h("script", { src: "pages/vendor/js-yaml.js", onload: resolve, onerror: () => reject(new Error("the reader of YAML cannot be loaded")) }));
  });
}
