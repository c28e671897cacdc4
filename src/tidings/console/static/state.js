// The state of the server as the page has it: loaded at each connection, then updated by events.

import { useEffect, useRef, useState } from "./htm-preact.js";
import { connect, get } from "./api.js";

const PAGE = 200; // changes per request
const MOST_MISSED = 1000; // the server keeps this many
const MOST_CHANGES = 10_000; // the page drops older ones, and can load them again
const RELOAD_PAUSE = 500; // milliseconds between two loads of the same data
const HISTORY = 300; // seconds that the charts show

export const state = {
  connection: "connecting", // or "open" or "closed"
  retryAt: null,
  loads: 0, // how many times all of this was loaded: once for each connection
  error: null,
  overview: null,
  history: { times: [], deliveries: [], p95: [] },
  changes: [], // newest first
  hasMoreChanges: false,
  clients: new Map(),
  catalog: {}, // the revision of each feature, to know when to load its items again
  watches: 0, // it grows when a client watches more or fewer topics
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
 * Return `{data, error}` of a path below `api/`, or of nothing if `path` is null.
 *
 * The path is loaded again when a version changes, and after each reconnection. The old data stays until the response
 * arrives.
 */
export function useData(path, ...versions) {
  const { loads } = useStateOf("loads");
  const [answer, setAnswer] = useState({ path: null, data: null, error: null });
  const loader = useRef(null);
  useEffect(() => {
    if (path === null) return undefined;
    loader.current = createLoader(path, setAnswer);
    return loader.current.stop;
  }, [path]);
  useEffect(() => {
    if (path !== null && loads > 0) loader.current.request();
  }, [path, loads, ...versions]);
  return answer.path === path ? answer : { data: null, error: null };
}

/** Load a path one request at a time. After a slow response, the next request waits longer. */
function createLoader(path, setAnswer) {
  const controller = new AbortController();
  let timer = null;
  let isWaiting = false; // for a response, or until the pause after it is over
  let isDue = false;

  async function request() {
    if (isWaiting) {
      isDue = true;
      return;
    }
    isWaiting = true;
    isDue = false;
    const start = Date.now();
    try {
      setAnswer({ path, data: await get(path, controller.signal), error: null });
    } catch (error) {
      if (controller.signal.aborted) return;
      setAnswer((old) => ({ path, data: old.path === path ? old.data : null, error }));
    }
    timer = setTimeout(
      () => {
        isWaiting = false;
        if (isDue) request();
      },
      Math.max(RELOAD_PAUSE, 10 * (Date.now() - start)),
    );
  }

  function stop() {
    clearTimeout(timer);
    controller.abort();
  }
  return { request, stop };
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
    state.loads += 1;
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
  notify("overview", "changes", "clients", "catalog", "loads");
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
  if (state.changes.at(-1)?.id !== last.id) return; // the list was loaded again meanwhile
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
    // `topics` is a number: one topic instead of another is not noticed.
    const haveWatchesChanged = removed.length > 0 || upserted.some((client) => client.topics !== state.clients.get(client.id)?.topics);
    if (haveWatchesChanged) state.watches += 1;
    for (const client of upserted) state.clients.set(client.id, client);
    for (const id of removed) state.clients.delete(id);
    state.clients = new Map(state.clients); // a new object, so that useMemo sorts again
    notify("clients", "watches");
  },
  overview({ sample, ...overview }) {
    state.overview = overview;
    if (sample) {
      const { times, deliveries, p95 } = state.history;
      let start = 0;
      while (times[start] < sample.time - HISTORY) start++;
      state.history = {
        times: [...times.slice(start), sample.time],
        deliveries: [...deliveries.slice(start), sample.deliveries],
        p95: [...p95.slice(start), sample.p95],
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
  // Events are lost while there is no connection, so load everything after each hello.
  if (name === "hello") load();
  else apply(name, data);
}

function onState(connectionState, retryAt) {
  state.connection = connectionState;
  state.retryAt = retryAt;
  notify("connection");
}

export const connection = connect(onEvent, onState);
