// Requests to the service, with the token of who looks. It is kept for this tab alone.

const KEY = "autotuner token";

export class Problem extends Error {
  constructor(status, detail, errors = []) {
    super(detail);
    this.status = status;
    this.errors = errors;
  }
}

export function token() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepToken(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  return token() ? { Authorization: `Bearer ${token()}`, ...more } : more;
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the service does not answer: it may be starting anew");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Problem(response.status, problem.detail ?? response.statusText, problem.errors);
}

export async function get(path, signal) {
  return (await answered(path, { headers: headers(), signal })).json();
}

export async function post(path, body, more = {}) {
  const options = { method: "POST", headers: headers(more) };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = headers({ "Content-Type": "application/json", ...more });
  }
  return (await answered(path, options)).json();
}

// Follow a job by server-sent events, which EventSource cannot ask for with a token. Ends when the job has ended.
export async function follow(path, told, signal) {
  let last = "";
  for (;;) {
    try {
      const response = await answered(path, { headers: headers(last ? { "Last-Event-ID": last } : {}), signal });
      if (response.status === 204) return;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const events = (text + part.value).split("\n\n");
        text = events.pop();
        for (const event of events) {
          const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
          if (!fields.data) continue;
          last = fields.id;
          told(JSON.parse(fields.data));
          if (fields.event !== "progress") return;
        }
      }
    } catch (error) {
      if (signal.aborted || [401, 403, 404].includes(error.status)) throw error;
    }
    await pause(2000, signal);
  }
}

// Wait, also until the page is looked at again.
export async function pause(ms, signal) {
  await new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      document.addEventListener("visibilitychange", resolve, { once: true });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}

export function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
