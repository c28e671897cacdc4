// The list of changes, and one change with its deliveries.

import { html, useEffect, useMemo, useState } from "./htm-preact.js";
import { loadOlderChanges, useData, useStateOf } from "./state.js";
import { Choice } from "./choice.js";
import { Item } from "./difference.js";
import { shortcuts } from "./keyboard.js";
import { Search } from "./search.js";
import { Table } from "./table.js";
import { Digest, Text, Time, clock, duration, number } from "./text.js";

const COLUMNS = [
  { title: "Time", value: (change) => clock(change.time), cell: (change) => html`<${Time} value=${change.time} />`, width: "5.75rem" },
  { title: "Topic", value: (change) => change.topic, width: "6.25rem" },
  { title: "Change", value: summary, cell: (change) => html`<${Summary} change=${change} />` },
  { title: "Told", value: (change) => change.told, width: "4rem", isNumber: true },
  { title: "Pending", value: (change) => change.pending, width: "5rem", isNumber: true, isExtra: true },
  { title: "Suppressed", value: (change) => change.suppressed, width: "6.5rem", isNumber: true, isExtra: true },
  { title: "Not fetched", value: (change) => change.notFetched, width: "6.5rem", isNumber: true, isExtra: true },
  { title: "Latency", value: (change) => change.latency?.p50, cell: (change) => duration(change.latency?.p50), width: "5.5rem", isNumber: true, isExtra: true },
];

/** Return a change on one line: the first items, and the number of the others. */
function summary(change) {
  const items = change.items ?? [];
  const named = items.slice(0, 3).map((item) => {
    const fields = item.operation === "updated" ? (item.fields ?? []).map((field) => field.path) : [];
    return `${item.operation} ${item.key}${fields.length ? ` (${fields.slice(0, 4).join(", ")})` : ""}`;
  });
  return named.join(", ") + (items.length > 3 ? `, and ${items.length - 3} more` : "");
}

function Summary({ change }) {
  const items = change.items ?? [];
  const [item] = items;
  if (!item) return html`<span class="muted">–</span>`;
  const fields = item.operation === "updated" ? (item.fields ?? []).map((field) => field.path).slice(0, 4) : [];
  return html`<span class="operation">${item.operation}</span> <${Text} value=${item.key} limit=${80} />${" "}
    ${items.length > 1 && html`<span class="muted">and ${number(items.length - 1)} more</span>`}
    ${items.length === 1 && fields.length > 0 && html`<span class="muted"><${Text} value=${fields.join(", ")} limit=${80} /></span>`}`;
}

export function Changes({ id, query, go }) {
  const { changes, loads } = useStateOf("changes");
  const isFiltered = query.has("notFetched");
  const text = query.get("text") ?? "";
  const search = new URLSearchParams(query);
  const path = isFiltered || text ? `changes?limit=1000&${search}` : null;
  // The server searches, because it has more changes than the page. Search again when `changes` is new.
  const found = useData(path, changes);
  const rows = path ? (found.data?.changes ?? []) : changes;

  function filter(name, value) {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value);
    else next.delete(name);
    location.replace(go(id === null ? "changes" : `changes/${id}`, next));
  }
  shortcuts.filter = () => filter("notFetched", isFiltered ? "" : "1");
  useEffect(() => () => (shortcuts.filter = null), []);

  return html`<section class=${id === null ? "list" : "list with-detail"}>
      <h1 class="offscreen">Changes</h1>
      <${Table}
        label="Changes"
        noun="change"
        columns=${COLUMNS}
        rows=${rows}
        rowKey=${(change) => change.id}
        href=${(change) => go(`changes/${change.id}`, query)}
        current=${id}
        isMain
        isFilling
        onEnd=${path ? null : loadOlderChanges}
        empty=${found.error?.message ?? emptyText(path, loads > 0 && (!path || found.data))}
        tools=${html`<${Search} label="Search changes" value=${text} onSearch=${(value) => filter("text", value)} />
          <label class="check">
            <input type="checkbox" checked=${isFiltered} onChange=${(event) => filter("notFetched", event.target.checked ? "1" : "")} />
            Told but never refetched
          </label>`}
      />
    </section>
    ${id !== null && html`<${Change} key=${id} id=${id} known=${changes.find((change) => change.id === id)} close=${go("changes", query)} />`}`;
}

function emptyText(path, isLoaded) {
  if (!isLoaded) return "Loading…";
  return path ? "No change matches." : "No change yet. When an item of the server changes, it appears here.";
}

const STATES = ["all", "told", "pending", "suppressed", "not refetched"];

const DELIVERIES = [
  { title: "Client", value: (each) => each.name, cell: (each) => html`<${Text} value=${each.name || each.client} />`, width: "28%" },
  { title: "Id", value: (each) => each.client, width: "10%", isExtra: true },
  {
    title: "State",
    value: (each) => (each.reason ? `${each.state}: ${each.reason}` : each.state),
    cell: (each) => html`<span class=${`state ${each.state}`}>${each.state}</span>${each.reason && html`<span class="muted">${" "}<${Text} value=${each.reason} /></span>`}`,
    width: "27%",
  },
  { title: "Latency", value: (each) => each.latency, cell: (each) => duration(each.latency), width: "18%", isNumber: true },
  {
    title: "Refetched",
    value: (each) => (each.fetched === "yes" ? each.fetchedAfter : each.fetched),
    cell: (each) => html`<span class=${each.fetched === "no" ? "bad" : ""}>${FETCHED[each.fetched]?.(each) ?? each.fetched}</span>`,
    width: "27%",
  },
];
const FETCHED = {
  yes: (each) => `after ${duration(each.fetchedAfter)}`,
  no: () => "not in 30 s",
  waiting: () => "not yet",
  "not applicable": () => "–",
};

function Change({ id, known, close }) {
  const { data, error } = useData(`changes/${id}`, known);
  const [shown, setShown] = useState("all");
  const deliveries = data?.deliveries ?? [];
  const rows = useMemo(() => deliveries.filter((each) => matches(each, shown)), [data, shown]);
  const change = data ?? known;
  return html`<aside class="detail" aria-label="Change">
    <header>
      <h2>Change ${id}</h2>
      <a class="close" href=${close} aria-label="Close">✕</a>
    </header>
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    ${change &&
    html`<div class="body">
      <ol class="flow" aria-label="Delivery">
        <li><span class="name">Source</span><b><${Text} value=${change.source} /></b><span class="muted"><${Time} value=${change.time} /></span></li>
        <li>
          <span class="name">Digest</span><b><${Digest} value=${change.digest} /></b>
          <span class="muted"><${Text} value=${change.topic} limit=${40} />, revision ${change.revision}</span>
        </li>
        <li>
          <span class="name">Clients</span><b>${number(change.told)} told</b>
          <span class="muted">${number(change.pending)} pending, ${number(change.suppressed)} suppressed</span>
        </li>
        <li>
          <span class="name">Refetched</span><b>${number(change.fetched)} within 30 s</b>
          <span class=${change.notFetched ? "bad" : "muted"}>${number(change.notFetched)} not</span>
        </li>
      </ol>
      <h3>What changed</h3>
      ${(change.items ?? []).map((item) => html`<${Item} item=${item} />`)}
      <${Table}
        label="Deliveries"
        noun="client"
        columns=${DELIVERIES}
        rows=${rows}
        rowKey=${(each) => each.client}
        href=${(each) => `#/clients/${encodeURIComponent(each.client)}`}
        sort=${null}
        empty=${data ? "No client." : "Loading…"}
        tools=${html`<h3>Deliveries</h3><${Choice} label="State of the delivery" values=${STATES} value=${shown} onChange=${setShown} />`}
      />
      ${data?.isTruncated && html`<p class="muted">Some items or deliveries of this change are not shown.</p>`}
    </div>`}
  </aside>`;
}

function matches(delivery, shown) {
  if (shown === "all") return true;
  return shown === "not refetched" ? delivery.fetched === "no" : delivery.state === shown;
}
