// Elements of a page, and numbers as people read them. No text is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Make an element: h("a", {href: "#/", class: "x", onclick: f}, "text", other elements).
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width_percent") element.style.width = `${value}%`;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const NONE = "–";

// A time: "66.9 µs", "2.41 ms".
export function time(us) {
  if (us === null || us === undefined) return NONE;
  if (Math.abs(us) < 999.5) return `${digits(us)} µs`;
  return Math.abs(us) < 999.5e3 ? `${digits(us / 1e3)} ms` : `${digits(us / 1e6)} s`;
}

// A difference of times with its sign.
export function change(us) {
  if (us === null || us === undefined) return NONE;
  return Math.abs(us) < 0.05 ? "0 µs" : `${us > 0 ? "+" : "−"}${time(Math.abs(us))}`;
}

export function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95 || size === 0) return Math.round(value).toLocaleString("en");
  return size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(1)} %`;
}

export function bytes(count) {
  if (count === null || count === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 999.5 && unit < units.length - 1; unit += 1) count /= 1024;
  return `${unit ? digits(count) : count} ${units[unit]}`;
}

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

// A time to wait: "99 s", "10 min".
export function wait(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function moment(text) {
  if (!text) return NONE;
  const at = new Date(text);
  const words = at.toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
  return h("time", { datetime: text, title: at.toISOString() }, words);
}

// A form as people read it, without the name of its stack.
export function form(text) {
  return text.replace(/^(.*?)@.*$/, "$1");
}

// A table. Columns: {title, cell: row => content, number: true, wide: true, head: true, sort: row => number or text}.
export function table(caption, columns, rows, { empty = "Nothing is here yet.", row = () => ({}), sorts = false } = {}) {
  const body = h("tbody");
  const fill = (shown) => {
    body.replaceChildren(
      ...shown.map((each) =>
        h("tr", row(each), columns.map((column) => h(column.head ? "th" : "td", { scope: column.head ? "row" : null, class: classes(column) }, column.cell(each))))),
    );
    if (!shown.length) body.append(h("tr", {}, h("td", { colspan: columns.length, class: "quiet" }, empty)));
  };
  const heads = columns.map((column) => h("th", { scope: "col", class: classes(column) }, sorts && column.sort ? "" : column.title));
  if (sorts) {
    columns.forEach((column, place) => {
      if (!column.sort) return;
      const button = h("button", { type: "button", class: "sort" }, column.title);
      button.addEventListener("click", () => {
        const down = heads[place].getAttribute("aria-sort") !== "descending";
        heads.forEach((head) => head.removeAttribute("aria-sort"));
        heads[place].setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = rows.map((each) => [column.sort(each), each]);
        keyed.sort(([a], [b]) => compared(a, b) * (down ? -1 : 1));
        fill(keyed.map(([, each]) => each));
      });
      heads[place].append(button);
    });
  }
  fill(rows);
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), body));
}

function compared(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}

function classes(column) {
  return [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null;
}

// Names with values, as a list.
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

// A number to see first.
export function tile(name, value, words = "") {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", { class: "value" }, value), words && h("dd", { class: "quiet" }, words));
}

export function tiles(...found) {
  return h("dl", { class: "tiles" }, found);
}

export function section(title, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

export function say(words) {
  document.getElementById("said").textContent = words;
}

export function extents(found) {
  return Object.entries(found).map(([axis, value]) => `${axis}=${value}`).join(" ");
}

// A choice among values, with its label.
export function field(label, control, hint = "") {
  control.id ||= `f-${label.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  const hintId = hint && `${control.id}-hint`;
  if (hint) control.setAttribute("aria-describedby", hintId);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, hint && h("span", { class: "quiet", id: hintId }, hint));
}

export function select(values, chosen) {
  return h("select", {}, values.map(([value, words]) => h("option", { value, selected: value === chosen }, words ?? value)));
}

// What went wrong, in the sentence of the service.
export function trouble(error) {
  return h("p", { class: "problem", role: "alert" }, error.message);
}
