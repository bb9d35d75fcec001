// Tokens, for an admin.

import { get, post } from "./api.js";
import { field, h, moment, section, select, table, trouble } from "./dom.js";

export async function tokensPage({ page, signal, caller }) {
  const list = h("div");
  const wrong = h("div");
  const name = h("input", { type: "text", maxlength: 100, autocomplete: "off" });
  const role = select([["reader", "reader: looks"], ["submitter", "submitter: also submits jobs"], ["admin", "admin: everything"]], "reader");
  const days = h("input", { type: "number", min: 1, max: 3650, step: 1, value: 90 });
  const made = h("div");

  async function look() {
    const tokens = await get("v1/tokens", signal);
    list.replaceChildren(table("Tokens", [
      { title: "Token", head: true, cell: (token) => `${token.id}` },
      { title: "Name", cell: (token) => token.name || "–" },
      { title: "Role", cell: (token) => token.role },
      { title: "State", cell: (token) => h("span", { class: `badge ${token.state === "valid" ? "finished" : "cancelled"}` }, token.state) },
      { title: "Until", wide: true, cell: (token) => (token.expires_at ? moment(token.expires_at) : "it is revoked") },
      { title: "Made", wide: true, cell: (token) => moment(token.created_at) },
      { title: "Action", cell: (token) => (token.state === "valid" && caller.name !== `token ${token.id}` ? h("button", { type: "button", "aria-label": `Revoke token ${token.id}`, onclick: () => act(() => revoke(token)) }, "Revoke") : caller.name === `token ${token.id}` ? "yours" : "") },
    ], tokens, { empty: "There are no tokens: this service answers this machine alone." }));
  }

  async function act(what) {
    wrong.replaceChildren();
    try {
      await what();
      await look();
    } catch (error) {
      wrong.replaceChildren(trouble(error));
    }
  }

  async function revoke(token) {
    if (confirm(`Revoke token ${token.id}${token.name && `, ${token.name}`}? Whoever uses it is refused from then on.`)) await post(`v1/tokens/${token.id}/revoke`);
  }

  async function make() {
    const found = await post("v1/tokens", { name: name.value, role: role.value, expires_in_days: days.value ? Number(days.value) : null });
    const text = h("input", { type: "text", readonly: true, size: 56, class: "code", value: found.token, "aria-label": "The new token", onfocus: (event) => event.target.select() });
    made.replaceChildren(h("div", { class: "doubt", role: "status" }, h("p", {}, `Token ${found.made.id} is made. Its text is shown this once: copy it now.`), text));
    name.value = "";
  }

  await look();
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); act(make); } }, h("div", { class: "fields" }, field("Name", name, "Of the client, for people"), field("Role", role), field("Valid for days", days, "Empty until it is revoked")), h("p", { class: "actions" }, h("button", { type: "submit", class: "main" }, "Make a token")));
  page.replaceChildren(h("h1", {}, "Tokens"), wrong, made, list, caller.needs_token
    ? section("A new token", form)
    : h("p", {}, "The first token is made by ", h("code", {}, "autotuner token create NAME --role admin"), ". From then on, everybody needs one."));
}
