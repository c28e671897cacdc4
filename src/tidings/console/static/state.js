// The state of the server as the page has it: loaded at each connection, then updated by events.

import { useEffect, useRef, useState } from "./htm-preact.js";
import { connect, get } from "./api.js";

const PAGE = 200; // changes per request
const MOST_MISSED = 1000; // the server keeps this many
const MOST_CHANGES = 10_000; // the page drops older ones, and can load them again
const RELOAD_PAUSE = 500; // milliseconds between two loads of the same data
const MOST_SAMPLES = 300; // five minutes, one sample per second

export const state = {
  connection: "connecting", // or "open" or "closed"
  retryAt: null,
  isLoaded: false,
  error: null,
  started: null,
  overview: null,
  history: { times: [], deliveries: [], p95: [] },
  changes: [], // newest first
  hasMoreChanges: false,
  clients: new Map(),
  catalog: {}, // the revision of each feature, to know when to load its items again
};

const listeners = new Map(); // part of the state → functions
const dirty = new Set();
let frame = null;

/** Render the components that use these parts of the state again, at most once per frame. */
function notify(...parts) {
  for (const part of parts) dirty.add(part);
  frame ??= requestAnimationFrame(() => {
    frame = null;
    const parts = [...dirty];
    dirty.clear();
    const called = new Set(parts.flatMap((part) => [...(listeners.get(part) ?? [])]));
    for (const listener of called) listener();
  });
}

/** Render the component again when one of these parts of the state is new, and return the state. */
export function useStateOf(...parts) {
  const [, render] = useState(0);
  useEffect(() => {
    const listener = () => render((count) => count + 1);
    for (const part of parts) {
      if (!listeners.has(part)) listeners.set(part, new Set());
      listeners.get(part).add(listener);
    }
    listener(); // the state may have changed between the first rendering and this effect
    return () => parts.forEach((part) => listeners.get(part).delete(listener));
  }, []);
  return state;
}

/**
 * Return `{data, error, reload}` of a path below `api/`, or of nothing if `path` is null.
 *
 * The path is loaded again when `version` changes. After a slow load, the next one waits longer. The old data stays until
 * the response arrives.
 */
export function useData(path, version = null) {
  const [answer, setAnswer] = useState({ path: null, data: null, error: null });
  const [attempt, setAttempt] = useState(0);
  const loaded = useRef({ path: null, next: 0 });
  useEffect(() => {
    if (path === null) return undefined;
    const controller = new AbortController();
    const isSame = loaded.current.path === path;
    const wait = isSame ? Math.max(0, loaded.current.next - Date.now()) : 0;
    const timer = setTimeout(async () => {
      const start = Date.now();
      loaded.current = { path, next: start + RELOAD_PAUSE };
      try {
        setAnswer({ path, data: await get(path, controller.signal), error: null });
        const end = Date.now();
        loaded.current.next = end + Math.max(RELOAD_PAUSE, 10 * (end - start));
      } catch (error) {
        if (error.name !== "AbortError") setAnswer((old) => ({ path, data: old.path === path ? old.data : null, error }));
      }
    }, wait);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [path, version, attempt]);
  const isCurrent = answer.path === path;
  return {
    data: isCurrent ? answer.data : null,
    error: isCurrent ? answer.error : null,
    reload: () => setAttempt((count) => count + 1),
  };
}

// The events that arrived while the snapshot was being loaded. They are applied after it, because they are newer.
let queued = null;
let loading = 0;

async function load() {
  const number = ++loading;
  queued = [];
  try {
    const [overview, changes, clients] = await Promise.all([
      get("overview"),
      get(`changes?limit=${PAGE}`),
      get("clients"),
    ]);
    if (number !== loading) return;
    const { history, ...rest } = overview;
    state.overview = rest;
    state.history = history;
    state.catalog = revisions(rest);
    state.changes = changes.changes;
    state.hasMoreChanges = changes.hasMore;
    state.clients = new Map(clients.clients.map((client) => [client.id, client]));
    state.isLoaded = true;
    state.error = null;
    connection.succeed();
  } catch (error) {
    if (number !== loading) return;
    state.error = error;
    connection.fail(); // after a delay, the next hello loads again
  }
  const events = queued;
  queued = null;
  for (const [name, data] of events) apply(name, data);
  notify("overview", "changes", "clients", "catalog");
}

function revisions(overview) {
  return Object.fromEntries(Object.entries(overview.catalog).map(([feature, each]) => [feature, each.revision]));
}

/** Load older changes. */
export async function loadOlderChanges() {
  const last = state.changes.at(-1);
  if (!last || !state.hasMoreChanges || queued) return;
  state.hasMoreChanges = false; // no second request until the response arrives
  let answer;
  try {
    answer = await get(`changes?limit=${PAGE}&before=${last.id}`);
  } catch {
    state.hasMoreChanges = true;
    return;
  }
  if (state.changes.at(-1) !== last) return; // the list was loaded again meanwhile
  state.changes = [...state.changes, ...answer.changes];
  state.hasMoreChanges = answer.hasMore && state.changes.length < MOST_CHANGES;
  notify("changes");
}

let isLoadingMissed = false;

/** Load the newest changes again. If there are many at once, the server sends only the last ones as events. */
async function loadMissedChanges() {
  if (isLoadingMissed || queued) return;
  isLoadingMissed = true;
  try {
    const { changes } = await get(`changes?limit=${MOST_MISSED}`);
    const loaded = new Map([...state.changes, ...changes].map((change) => [change.id, change]));
    state.changes = [...loaded.values()].sort((a, b) => b.id - a.id).slice(0, MOST_CHANGES);
    notify("changes");
  } catch {
    // The connection is lost too: its next hello loads everything.
  }
  isLoadingMissed = false;
}

const APPLY = {
  change(change) {
    if (state.changes.length && change.id > state.changes[0].id + 1) loadMissedChanges();
    const index = state.changes.findIndex((each) => each.id === change.id);
    const rest = index === -1 ? state.changes : state.changes.toSpliced(index, 1);
    if (rest.length >= MOST_CHANGES) state.hasMoreChanges = true;
    state.changes = [change, ...rest].sort((a, b) => b.id - a.id).slice(0, MOST_CHANGES);
    notify("changes");
  },
  changed(counts) {
    const index = state.changes.findIndex((each) => each.id === counts.id);
    if (index !== -1) state.changes = state.changes.with(index, { ...state.changes[index], ...counts });
    notify("changes");
  },
  clients({ upserted, removed }) {
    for (const client of upserted) state.clients.set(client.id, client);
    for (const id of removed) state.clients.delete(id);
    state.clients = new Map(state.clients); // a new object, so that useMemo sorts again
    notify("clients");
  },
  overview({ sample, ...overview }) {
    state.overview = overview;
    if (sample) {
      const { times, deliveries, p95 } = state.history;
      state.history = {
        times: [...times, sample.time].slice(-MOST_SAMPLES),
        deliveries: [...deliveries, sample.deliveries].slice(-MOST_SAMPLES),
        p95: [...p95, sample.p95].slice(-MOST_SAMPLES),
      };
    }
    notify("overview");
  },
  catalog({ feature, revision }) {
    state.catalog = { ...state.catalog, [feature]: revision };
    notify("catalog");
  },
};

function apply(name, data) {
  if (queued) queued.push([name, data]);
  else APPLY[name](data);
}

function onEvent(name, data) {
  if (name !== "hello") {
    apply(name, data);
    return;
  }
  // Events are lost while there is no connection, so load everything after each hello.
  state.started = data.started;
  load();
}

function onState(connectionState, retryAt) {
  state.connection = connectionState;
  state.retryAt = retryAt;
  notify("connection");
}

export const connection = connect(onEvent, onState);
