// The shell: one page per address behind the #, shown with the token of who looks.

import { Problem, get, keepToken, token } from "./api.js";
import { forgetCharts } from "./charts.js";
import { h, say, trouble } from "./dom.js";
import { comparePage, configurationsPage } from "./configurations.js";
import { fleetPage } from "./fleet.js";
import { jobPage, jobsPage } from "./jobs.js";
import { planPage } from "./plan.js";
import { submitPage } from "./submit.js";
import { tokensPage } from "./tokens.js";

const PAGES = [
  [/^\/jobs$/, jobsPage],
  [/^\/jobs\/(\d+)$/, jobPage],
  [/^\/submit$/, submitPage],
  [/^\/configurations$/, configurationsPage],
  [/^\/configurations\/(\d+)(?:\/([A-Za-z_][A-Za-z0-9_]*))?$/, planPage],
  [/^\/compare\/(\d+)\/(\d+)$/, comparePage],
  [/^\/fleet$/, fleetPage],
  [/^\/tokens$/, tokensPage],
];
const main = document.getElementById("main");
const dialog = document.getElementById("token-dialog");
const button = document.getElementById("caller");
let shown = new AbortController();
let caller = null;

async function show() {
  shown.abort();
  shown = new AbortController();
  const { signal } = shown;
  const path = location.hash.slice(1) || "/jobs";
  const found = PAGES.map(([pattern, page]) => [path.match(pattern), page]).find(([match]) => match);
  for (const link of document.querySelectorAll("nav a")) {
    const current = found && path.startsWith(link.getAttribute("href").slice(1)) && link.getAttribute("href").startsWith("#");
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  forgetCharts();
  const page = h("div", { class: "page" }, h("p", { class: "quiet" }, "Loading …"));
  main.replaceChildren(page);
  try {
    await askCaller();
    if (!found) throw new Problem(404, `there is no page ${path}`);
    const [match, make] = found;
    await make({ page, signal, caller, parts: match.slice(1) });
  } catch (error) {
    if (signal.aborted) return;
    page.replaceChildren(h("h1", {}, error.status === 401 ? "A token is needed" : "This cannot be shown"), trouble(error));
    if (error.status === 401) page.append(h("p", {}, h("button", { type: "button", class: "main", onclick: askToken }, "Give a token")));
    if (!(error instanceof Problem)) console.error(error);
  }
  if (signal.aborted) return;
  const title = page.querySelector("h1");
  document.title = title ? `${title.textContent} – autotuner` : "autotuner";
  say(document.title);
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

async function askCaller() {
  if (caller !== null) return;
  caller = await get("v1/caller");
  button.textContent = caller.needs_token ? `${caller.name}, ${caller.role}` : "no token needed";
  document.getElementById("tokens-link").hidden = caller.role !== "admin";
}

function askToken() {
  dialog.querySelector("input").value = token();
  dialog.showModal();
}

button.addEventListener("click", askToken);
dialog.addEventListener("close", () => {
  if (!["keep", "forget"].includes(dialog.returnValue)) return;
  keepToken(dialog.returnValue === "keep" ? dialog.querySelector("input").value.trim() : "");
  dialog.querySelector("input").value = "";
  caller = null;
  button.textContent = "Token";
  show();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", show);
show();
