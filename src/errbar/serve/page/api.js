// Requests to the service: with a token if it needs one, again if it is busy, and only the newest request.

export class Trouble extends Error {
  constructor(sentence, status) { super(sentence); this.status = status; }
}

const KEY = "errbar-token";

export function setToken(token) { sessionStorage.setItem(KEY, token); }

export function hasToken() { return Boolean(sessionStorage.getItem(KEY)); }

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

export async function ask(path, body) {
  for (let attempt = 0; ; attempt += 1) {
    const headers = {};
    const token = sessionStorage.getItem(KEY);
    if (token) headers.authorization = `Bearer ${token}`;
    if (body) headers["content-type"] = "application/json";
    let response;
    let content;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), cache: "no-store" });
      content = await response.json().catch((error) => { if (response.ok) throw error; return {}; });
    } catch {
      throw new Trouble("The service does not answer. Trying again until it does …", 0);
    }
    if (response.ok) return content;
    if ([429, 503].includes(response.status) && attempt < 3) {
      await pause(Math.min(Number(response.headers.get("retry-after")) || 1, 5));
      continue;
    }
    throw new Trouble(content.error || `The service answered ${response.status}.`, response.status);
  }
}

// Returns when the service answers again; its health needs no token.
export async function back(seconds = 1) {
  for (;;) {
    await pause(seconds);
    try {
      if ((await fetch("/healthz", { cache: "no-store" })).ok) return;
    } catch { /* still gone */ }
  }
}

// Runs `task` now, or once more after the current run: never two at once, and never an old answer last.
export function latest(task) {
  let running = null;
  let again = false;
  return function run() {
    if (running) { again = true; return running; }
    running = (async () => {
      do { again = false; await task(); } while (again);
    })().finally(() => { running = null; });
    return running;
  };
}
