// Requests to the server, and the connection on which the server sends events.

// The modules are in /console/static/, below whatever prefix the app is mounted at.
const ROOT = new URL("../", import.meta.url);
const HEADERS = { "X-Tidings-Console": "1" }; // a form of another site cannot send it
// The server sends an event or a heartbeat every 10 seconds. After this many milliseconds without one, reconnect.
const SILENCE = 25_000;
const RETRY_FIRST = 500;
const RETRY_LONGEST = 15_000;
const EVENTS = ["hello", "change", "changed", "clients", "overview", "catalog"];

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(new URL(`api/${path}`, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. The page tries again.", 0);
  }
  if (response.status === 401) {
    location.reload(); // the server responds with its login form
  }
  let body;
  try {
    body = await response.json();
  } catch {
    throw new ApiError(`The server answered with status ${response.status} and no JSON.`, response.status);
  }
  if (!response.ok) throw new ApiError(body.error ?? `The server answered with status ${response.status}.`, response.status);
  return body;
}

/** Return the JSON of a path below `api/`. */
export function get(path, signal) {
  return request(path, { signal, headers: { Accept: "application/json" } });
}

/** Send JSON to a path below `api/`, and return the JSON of the response. */
export function post(path, body = {}) {
  return request(path, {
    method: "POST",
    headers: { ...HEADERS, "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** End the session of the login form. */
export async function signOut() {
  await fetch(new URL("logout", ROOT), { method: "POST", headers: HEADERS });
  location.reload();
}

/**
 * Keep a connection for events, and open it again after a failure, with growing delays.
 *
 * `onEvent(name, data)` gets each event; `onState(state, retryAt)` gets "connecting", "open" or "closed". EventSource
 * reconnects by itself, but not after an error status, and not if a connection is silent. The caller reports whether it
 * could load the data: `fail()` reconnects after a delay, `succeed()` resets the delay.
 */
export function connect(onEvent, onState) {
  let source = null;
  let delay = RETRY_FIRST;
  let retry = null;
  let silence = null;

  function resetSilence() {
    clearTimeout(silence);
    silence = setTimeout(fail, SILENCE);
  }

  function open() {
    clearTimeout(retry);
    source?.close();
    onState("connecting", null);
    source = new EventSource(new URL("api/events", ROOT));
    source.onerror = fail;
    for (const name of EVENTS) {
      source.addEventListener(name, (event) => {
        resetSilence();
        if (name === "hello") onState("open", null);
        onEvent(name, JSON.parse(event.data));
      });
    }
    resetSilence();
  }

  function fail() {
    clearTimeout(silence);
    clearTimeout(retry);
    source.close();
    // EventSource hides the status. If the login has expired, this request gets 401 and loads the login form.
    get("overview").catch(() => {});
    onState("closed", Date.now() + delay);
    retry = setTimeout(open, delay);
    delay = Math.min(delay * 2, RETRY_LONGEST);
  }

  addEventListener("online", open);
  open();
  return {
    reconnect: open,
    fail,
    succeed() {
      delay = RETRY_FIRST;
    },
  };
}
