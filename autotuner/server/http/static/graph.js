// A plan drawn: boxes for kernel calls, lines for the tensors between them. Zoom, pan, search, and the keyboard.

import { form, h, say, svg, time } from "./dom.js";

const LINE = 16;
const MANY_STEPS = 250; // above it, lines carry no names of tensors
const PHASES = [["forward", "TB"], ["backward", "BT"]];
const ROOM = 70; // between forward and backward

export function graph(plan, selected, signal) {
  const view = h("div", { class: "graph", role: "group", "aria-label": "The training step as a graph. Arrow keys go from step to step, Enter opens one, + and − zoom." });
  const message = h("p", { class: "quiet" }, `Placing ${plan.steps.length} steps …`);
  const search = h("input", { type: "search", id: "graph-search", placeholder: "operator, tensor or kernel", autocomplete: "off" });
  const found = h("span", { class: "quiet", role: "status" });
  const saved = h("input", { type: "checkbox", id: "graph-saved", onchange: () => drawing.classList.toggle("all-links", saved.checked) });
  const buttons = [["−", "Zoom out", () => zoom(1 / 1.3)], ["+", "Zoom in", () => zoom(1.3)], ["fit", "Show all of it", () => fit()], ["1:1", "Show it in full size", () => full()]]
    .map(([text, label, onclick]) => h("button", { type: "button", "aria-label": label, title: label, onclick }, text));
  const legend = h("p", { class: "legend quiet" }, [["contraction", "contraction"], ["normalisation", "normalisation"], ["element-wise", "element-wise"], ["conversion", "conversion of a tensor's form"]].map(([name, words]) => h("span", {}, h("i", { class: `key ${name}` }), words)), h("span", {}, "bold: a form that is not as declared"));
  const drawing = svg("svg", { class: "drawing" });
  const element = h("div", {},
    h("div", { class: "row" }, h("label", { for: "graph-search" }, "Search"), search, found, h("span", { class: "buttons" }, buttons), h("span", {}, saved, h("label", { for: "graph-saved" }, " tensors saved for backward"))),
    legend, view);
  view.append(message);

  const boxes = new Map();
  const links = new Map();
  let size = { width: 1, height: 1 };
  let at = { x: 0, y: 0, scale: 1 };
  let current = 1;
  let hits = [];
  let hit = -1;

  const worker = new Worker("pages/layout.js");
  signal.addEventListener("abort", () => worker.terminate());
  const { parts, tensors } = described(plan);
  worker.onmessage = ({ data }) => {
    worker.terminate();
    draw(data);
    message.remove();
    view.append(drawing);
    first();
    choose(current, false);
  };
  worker.onerror = () => { message.textContent = "The steps could not be placed; the table below lists them."; };
  worker.postMessage(parts);

  function draw(placed) {
    const middle = placed[0].width + (placed[1].nodes.length ? ROOM : 0);
    const height = Math.max(...placed.map((each) => each.height)) + 60;
    size = { width: middle + placed[1].width + 40, height };
    drawing.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    drawing.setAttribute("width", size.width);
    drawing.setAttribute("height", size.height);
    const lines = svg("g", { class: "lines", "aria-hidden": "true" });
    const all = svg("g", {});
    const far = svg("g", { class: "links", "aria-hidden": "true" });
    const places = new Map();
    placed.forEach((phase, number) => {
      const [dx, dy] = [20 + (number ? middle : 0), 40 + (number ? height - 60 - phase.height : 0)];
      if (phase.nodes.length) all.append(svg("text", { class: "phase", x: dx, y: 24 }, PHASES[number][0]));
      for (const { source, target, points } of phase.edges) {
        lines.append(svg("path", { d: curve(points.map((point) => [point.x + dx, point.y + dy])), "data-from": source, "data-to": target }));
      }
      for (const { id, x, y } of phase.nodes) places.set(id, [x + dx, y + dy]);
    });
    for (const [id, [x, y]] of places) {
      if (id[0] === "t") all.append(pill(tensors.get(id), x, y));
      else {
        const step = plan.steps[Number(id.slice(1)) - 1];
        const box = boxOf(step, x, y);
        boxes.set(step.number, box);
        all.append(box);
      }
    }
    for (const link of plan.links) {
      const from = places.get(link.source === null ? "" : `s${link.source}`);
      const to = places.get(`s${link.target}`);
      if (!from || !to) continue;
      const path = svg("path", { d: `M${from[0]} ${from[1]}C${(from[0] + to[0]) / 2} ${from[1]} ${(from[0] + to[0]) / 2} ${to[1]} ${to[0]} ${to[1]}` });
      far.append(path);
      for (const number of [link.source, link.target]) links.set(number, [...(links.get(number) ?? []), path]);
    }
    drawing.append(svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, svg("path", { d: "M0 0 8 4 0 8z", class: "head" }))), far, lines, all);
  }

  function boxOf(step, x, y) {
    const { width, height } = step.box;
    const top = y - height / 2;
    const left = x - width / 2;
    const label = `Step ${step.number}, ${step.phase}: ${step.label}, by ${step.kernel}, ${time(step.predicted_us)}, ${(100 * step.share).toFixed(1)} percent`;
    const box = svg("g", { class: `box ${step.step_class}`, role: "button", tabindex: -1, "aria-label": label, "data-step": step.number },
      svg("rect", { x: left, y: top, width, height, rx: step.step_class === "conversion" ? 14 : 5 }),
      svg("rect", { class: "share", x: left, y: top + height - 4, width: Math.max(2, width * Math.min(1, step.share * 4)), height: 4 }),
      step.box.lines.map(([words, kind, right], number) => [
        svg("text", { class: kind, x: left + 8, y: top + LINE * (number + 1) }, words),
        right && svg("text", { class: "time", x: left + width - 8, y: top + LINE * (number + 1), "text-anchor": "end" }, right),
      ]));
    box.append(svg("title", {}, label));
    return box;
  }

  function pill(flow, x, y) {
    const words = `${flow.made.tensor} ${form(flow.made.form)}`;
    const width = widthOf(words) + 8;
    return svg("g", { class: `pill${flow.made.declared ? "" : " other"}${flow.is_output ? " output" : ""}` }, svg("rect", { x: x - width / 2, y: y - 9, width, height: 18, rx: 9 }), svg("text", { x, y: y + 4, "text-anchor": "middle" }, words));
  }

  function choose(number, tell = true, center = true) {
    const box = boxes.get(number);
    if (!box) {
      current = number; // the steps are not placed yet
      return;
    }
    boxes.get(current)?.classList.remove("current");
    boxes.get(current)?.setAttribute("tabindex", -1);
    for (const path of links.get(current) ?? []) path.classList.remove("near");
    current = number;
    box.classList.add("current");
    box.setAttribute("tabindex", 0);
    for (const path of links.get(number) ?? []) path.classList.add("near");
    if (center) bring(number);
    if (tell) selected(plan.steps[number - 1]);
  }

  // Move so that a step is seen.
  function bring(number) {
    const rect = boxes.get(number).querySelector("rect");
    const [x, y] = [Number(rect.getAttribute("x")) + Number(rect.getAttribute("width")) / 2, Number(rect.getAttribute("y")) + Number(rect.getAttribute("height")) / 2];
    const [px, py] = [x * at.scale + at.x, y * at.scale + at.y];
    if (px < 60 || px > view.clientWidth - 60) at.x = view.clientWidth / 2 - x * at.scale;
    if (py < 40 || py > view.clientHeight - 40) at.y = view.clientHeight / 2 - y * at.scale;
    move();
  }

  function move() {
    drawing.style.transform = `translate(${at.x}px, ${at.y}px) scale(${at.scale})`;
  }

  function zoom(factor, x = view.clientWidth / 2, y = view.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.03, at.scale * factor));
    at = { x: x - ((x - at.x) * scale) / at.scale, y: y - ((y - at.y) * scale) / at.scale, scale };
    drawing.classList.toggle("far", at.scale < 0.35);
    move();
  }

  function fit() {
    const scale = Math.min(1, view.clientWidth / size.width, view.clientHeight / size.height);
    at = { x: (view.clientWidth - size.width * scale) / 2, y: 0, scale };
    zoom(1);
  }

  // In full size, from the top left; a small plan is centred.
  function full() {
    at = { x: Math.max(0, (view.clientWidth - size.width) / 2), y: 0, scale: 1 };
    zoom(1);
  }

  function first() {
    const whole = Math.min(view.clientWidth / size.width, view.clientHeight / size.height);
    at = { x: 0, y: 0, scale: Math.max(Math.min(1, view.clientWidth / size.width), Math.min(1, whole), 0.45) };
    if (size.width * at.scale < view.clientWidth) at.x = (view.clientWidth - size.width * at.scale) / 2;
    zoom(1);
  }

  const pointers = new Map();
  let moved = 0;
  view.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    moved = 0;
  });
  view.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.clientX - before[0], event.clientY - before[1]];
    moved += Math.abs(dx) + Math.abs(dy);
    if (moved > 4 && !view.hasPointerCapture(event.pointerId)) {
      view.setPointerCapture(event.pointerId);
      drawing.classList.add("moving");
    }
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const spread = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]);
      const frame = view.getBoundingClientRect();
      zoom(spread([event.clientX, event.clientY]) / Math.max(1, spread(before)), (event.clientX + other[0]) / 2 - frame.left, (event.clientY + other[1]) / 2 - frame.top);
    }
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    const share = pointers.size === 2 ? 0.5 : 1;
    at.x += dx * share;
    at.y += dy * share;
    move();
  });
  for (const over of ["pointerup", "pointercancel"]) {
    view.addEventListener(over, (event) => {
      pointers.delete(event.pointerId);
      drawing.classList.remove("moving");
    });
  }
  view.addEventListener("click", (event) => {
    const box = moved <= 4 && event.target.closest(".box");
    if (box) choose(Number(box.dataset.step), true, false);
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const frame = view.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 300), event.clientX - frame.left, event.clientY - frame.top);
  }, { passive: false });
  view.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (by) {
      const to = Math.min(plan.steps.length, Math.max(1, current + by));
      choose(to, false);
      boxes.get(to)?.focus({ preventScroll: true });
    } else if (event.key === "Enter" || event.key === " ") choose(current);
    else if (event.key === "+" || event.key === "=") zoom(1.3);
    else if (event.key === "-") zoom(1 / 1.3);
    else return;
    event.preventDefault();
  });
  search.addEventListener("input", () => {
    const words = search.value.trim().toLowerCase();
    hits = words ? plan.steps.filter((step) => step.searched.includes(words)).map((step) => step.number) : [];
    hit = -1;
    for (const [number, box] of boxes) {
      box.classList.toggle("hit", hits.includes(number));
      box.classList.toggle("dim", Boolean(words) && !hits.includes(number));
    }
    found.textContent = words ? `${hits.length} ${hits.length === 1 ? "step" : "steps"}${hits.length ? ", Enter goes to the next" : ""}` : "";
    if (hits.length) bring(hits[0]);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    event.preventDefault();
    hit = (hit + 1) % hits.length;
    choose(hits[hit]);
    say(boxes.get(hits[hit]).getAttribute("aria-label"));
  });
  window.addEventListener("resize", () => move(), { signal });
  return { element, choose: (number) => choose(number, false) };
}

// Boxes with their sizes, and what is to be placed.
function described(plan) {
  const named = plan.steps.length <= MANY_STEPS;
  const tensors = new Map();
  const phases = Object.fromEntries(PHASES.map(([name, direction]) => [name, { nodes: [], edges: [], direction }]));
  for (const step of plan.steps) {
    const head = [step.kernel, "head", time(step.predicted_us)];
    const tensor = (each, mark) => [`${mark} ${each.tensor} ${form(each.form)}`, each.declared ? "port" : "port other", ""];
    const lines = [head, ...(step.members.length ? step.members.map((each) => [each.name, each.again ? "member again" : "member", ""]) : [[step.label, "member", ""]])];
    lines.push(...step.reads.map((each) => tensor(each, each.role === "parameter" ? "▪" : "◂")), ...step.makes.map((each) => tensor(each, each.role === "gradient" ? "▪" : "▸")));
    const shown = lines.length > 9 ? [...lines.slice(0, 8), [`and ${lines.length - 8} more`, "port", ""]] : lines;
    step.box = { lines: shown, width: Math.max(110, ...shown.map(([words, , right]) => widthOf(words) + (right ? widthOf(right) + 14 : 0) + 18)), height: LINE * shown.length + 12 };
    step.searched = [step.label, step.kernel, ...step.members.map((each) => `${each.name} ${each.kind}`), ...step.inputs.flat(), ...step.outputs.flat()].join(" ").toLowerCase();
    phases[step.phase].nodes.push({ id: `s${step.number}`, width: step.box.width, height: step.box.height });
  }
  plan.flows.forEach((flow, number) => {
    const phase = phases[(plan.steps[(flow.source ?? flow.targets[0]) - 1] ?? plan.steps[0]).phase];
    const source = flow.source === null ? null : `s${flow.source}`;
    const targets = flow.targets.map((each) => `s${each}`);
    if (!named) {
      if (source) phase.edges.push(...targets.map((each) => [source, each]));
      return;
    }
    const id = `t${number}`;
    tensors.set(id, flow);
    phase.nodes.push({ id, width: widthOf(`${flow.made.tensor} ${form(flow.made.form)}`) + 10, height: 18 });
    if (source) phase.edges.push([source, id]);
    phase.edges.push(...targets.map((each) => [id, each]));
  });
  for (const phase of Object.values(phases)) {
    const placed = new Set(phase.nodes.map((node) => node.id));
    phase.edges = phase.edges.filter((ends) => ends.every((id) => placed.has(id)));
  }
  return { parts: PHASES.map(([name]) => phases[name]), tensors };
}

let pen = null;
const widths = new Map();

function widthOf(words) {
  if (!pen) {
    pen = document.createElement("canvas").getContext("2d");
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  }
  if (!widths.has(words)) widths.set(words, pen.measureText(words).width * 1.06);
  return widths.get(words);
}

function curve(points) {
  let d = `M${points[0].join(" ")}`;
  for (let place = 1; place < points.length - 1; place += 1) {
    const [x, y] = points[place];
    const [nx, ny] = points[place + 1];
    const end = place === points.length - 2 ? [nx, ny] : [(x + nx) / 2, (y + ny) / 2];
    d += `Q${x} ${y} ${end.join(" ")}`;
  }
  return points.length === 2 ? `${d}L${points[1].join(" ")}` : d;
}
