// The list of clients, and one client with its topics, its last deliveries and the items that it sees.

import { html, useMemo, useState } from "./htm-preact.js";
import { post } from "./api.js";
import { FEATURES, itemHref } from "./catalog.js";
import { Choice } from "./choice.js";
import { Search } from "./search.js";
import { useData, useStateOf } from "./state.js";
import { Table } from "./table.js";
import { Block, Digest, Text, Time, clock, duration, number } from "./text.js";

const COLUMNS = [
  { title: "Name", value: (client) => client.name, cell: (client) => html`<${Text} value=${client.name || client.id} />` },
  { title: "Version", value: (client) => client.version, width: "5rem", isExtra: true },
  { title: "Era", value: (client) => client.era, width: "4.75rem", isExtra: true },
  { title: "Transport", value: (client) => client.transport, width: "6rem" },
  { title: "Principal", value: (client) => client.principal, width: "6.5rem", isExtra: true },
  { title: "Connected", value: (client) => client.connected, cell: (client) => html`<${Time} value=${client.connected} />`, width: "6.25rem", isExtra: true },
  { title: "Topics", value: (client) => client.topics, width: "4.75rem", isNumber: true, isExtra: true },
  { title: "Pending", value: (client) => client.pending, width: "5.25rem", isNumber: true },
  { title: "Delivered", value: (client) => client.delivered, width: "6rem", isNumber: true },
  { title: "Suppressed", value: (client) => client.suppressed, width: "6.75rem", isNumber: true, isExtra: true },
  { title: "Latency", value: (client) => client.latency, cell: (client) => duration(client.latency), width: "5.5rem", isNumber: true, isExtra: true },
  { title: "Slow", value: (client) => (client.isSlow ? "slow" : ""), cell: (client) => client.isSlow && html`<span class="bad">slow</span>`, width: "4rem", isExtra: true },
];

const SEARCHED = ["id", "name", "version", "era", "protocol", "transport", "principal"];

export function Clients({ id, query, go, isView }) {
  const { clients, loads } = useStateOf("clients");
  const text = query.get("text") ?? "";
  const rows = useMemo(() => {
    const all = [...clients.values()];
    if (!text) return all;
    const wanted = text.toLowerCase();
    return all.filter((client) => SEARCHED.some((name) => client[name]?.toLowerCase().includes(wanted)));
  }, [clients, text]);
  const search = (value) => {
    const path = id === null ? "clients" : `clients/${encodeURIComponent(id)}`;
    location.replace(go(path, new URLSearchParams(value ? { text: value } : {})));
  };
  return html`<section class=${id === null ? "list" : "list with-detail"}>
      <h1 class="offscreen">Clients</h1>
      <${Table}
        label="Clients"
        noun="client"
        columns=${COLUMNS}
        rows=${rows}
        rowKey=${(client) => client.id}
        href=${(client) => go(`clients/${encodeURIComponent(client.id)}`, query)}
        current=${id}
        sort=${[0, 1]}
        isMain
        isFilling
        empty=${loads > 0 ? (text ? "No client matches." : "No client is connected.") : "Loading…"}
        tools=${html`<${Search} label="Search clients" value=${text} onSearch=${search} />`}
      />
    </section>
    ${id !== null && html`<${Client} key=${id} id=${id} known=${clients.get(id)} isGone=${loads > 0 && !clients.has(id)} query=${query} go=${go} isView=${isView} />`}`;
}

const WATCHES = [
  { title: "Topic", value: (watch) => watch.topic },
  { title: "Told", value: (watch) => watch.told?.revision, cell: (watch) => html`<${Version} value=${watch.told} />`, width: "9.5rem" },
  { title: "Current", value: (watch) => watch.current?.revision, cell: (watch) => html`<${Version} value=${watch.current} />`, width: "9.5rem", isExtra: true },
  { title: "State", value: stateOf, cell: (watch) => html`<span class=${stateOf(watch) === "current" ? "muted" : "bad"}>${stateOf(watch)}</span>`, width: "6rem" },
  { title: "Last fetched", value: (watch) => (watch.lastFetched ? clock(watch.lastFetched) : ""), cell: (watch) => html`<${Time} value=${watch.lastFetched} />`, width: "7rem", isExtra: true },
];

function Version({ value }) {
  return value ? html`${value.revision} <span class="muted"><${Digest} value=${value.digest} /></span>` : html`<span class="muted">–</span>`;
}

/** Return whether the client was told of the current version. */
function stateOf(watch) {
  if (watch.isPending) return "pending";
  return !watch.told || !watch.current || watch.told.digest === watch.current.digest ? "current" : "behind";
}

const RECENT = [
  { title: "Time", value: (each) => clock(each.time), cell: (each) => html`<${Time} value=${each.time} />`, width: "5.5rem" },
  { title: "Topic", value: (each) => each.topic },
  { title: "Revision", value: (each) => each.revision, width: "5.5rem", isNumber: true },
  { title: "Latency", value: (each) => each.latency, cell: (each) => duration(each.latency), width: "5.5rem", isNumber: true },
];

function Client({ id, known, isGone, query, go, isView }) {
  const path = `clients/${encodeURIComponent(id)}`;
  const { data, error } = useData(path, known); // the server also knows some closed clients
  const { overview } = useStateOf("overview");
  const client = data ?? known;
  return html`<aside class="detail" aria-label="Client">
    <header>
      <h2><${Text} value=${client?.name || id} /></h2>
      <a class="close" href=${go("clients", query)} aria-label="Close">✕</a>
    </header>
    ${isGone && html`<p class="note" role="status">This client is no longer connected.</p>`}
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    ${client &&
    html`<div class="body">
      <dl class="facts">
        <${Fact} name="Id"><code>${client.id}</code><//>
        <${Fact} name="Version"><${Text} value=${client.version} /><//>
        <${Fact} name="Protocol">${client.era === "none" ? "–" : html`<${Text} value=${client.protocol} /> (${client.era})`}<//>
        <${Fact} name="Transport">${client.transport}<//>
        <${Fact} name="Principal"><${Text} value=${client.principal} /><//>
        <${Fact} name="Connected"><${Time} value=${client.connected} /><//>
        <${Fact} name="Last told"><${Time} value=${client.lastTold} /><//>
        <${Fact} name="Pending">${number(client.pending)}<//>
        <${Fact} name="Delivered">${number(client.delivered)}<//>
        <${Fact} name="Suppressed">${number(client.suppressed)}<//>
        <${Fact} name="Latency">${duration(client.latency)}<//>
        <${Fact} name="Reads">${client.isSlow ? html`<span class="bad">slowly: notifications wait for it</span>` : "in time"}<//>
      </dl>
      <p class="actions">
        <a class="button" href=${go(isView ? path : `${path}/view`, query)}>${isView ? "Hide what it sees" : "What does this client see?"}</a>
        ${!isGone && overview?.mode === "write" && html`<${End} path=${path} />`}
      </p>
      ${isView && html`<${View} path=${path} />`}
      <${Table} tools=${html`<h3>Topics</h3>`} label="Topics of the client" noun="topic" columns=${WATCHES} rows=${data?.watches ?? []} rowKey=${(watch) => watch.topic} sort=${null}
        empty=${data ? "It watches nothing." : "Loading…"} />
      ${data?.isTruncated && html`<p class="muted">It watches more topics than these.</p>`}
      ${data?.filter && html`<h3>Filter</h3><${Block} value=${data.filter} label="Filter" />`}
      <${Table} tools=${html`<h3>Last deliveries</h3>`} label="Last deliveries" noun="delivery" columns=${RECENT} rows=${data?.recent ?? []} rowKey=${(each) => `${each.time} ${each.topic} ${each.revision}`}
        empty=${data ? "Nothing was delivered yet." : "Loading…"} />
    </div>`}
  </aside>`;
}

function Fact({ name, children }) {
  return html`<div>
    <dt>${name}</dt>
    <dd>${children}</dd>
  </div>`;
}

/** End the stream of a client, after a second click. */
function End({ path }) {
  const [step, setStep] = useState("ready"); // "sure" after the first click, "sent" after the second
  const [error, setError] = useState(null);
  async function end() {
    setStep("sent");
    try {
      await post(`${path}/end`);
    } catch (failure) {
      setError(failure);
      setStep("ready");
    }
  }
  if (step === "sure") {
    return html`<span>End its stream? It may connect again. <button class="danger" onClick=${end}>End it</button> <button onClick=${() => setStep("ready")}>Keep it</button></span>`;
  }
  return html`<button disabled=${step === "sent"} onClick=${() => setStep("sure")}>End stream</button>
    ${error && html`<span class="error" role="alert">${error.message}</span>`}`;
}

const SEEN = [
  { title: "Name", value: (item) => item.name ?? item.key, width: "45%" },
  { title: "Description", value: (item) => item.description },
];

function View({ path }) {
  const { catalog } = useStateOf("catalog");
  const { data, error } = useData(`${path}/view`, catalog);
  const [feature, setFeature] = useState("tools");
  const items = data?.[feature] ?? [];
  if (error) return html`<p class="error" role="alert">${error.message}</p>`;
  return html`${data?.note && html`<p class="note">${data.note}</p>`}
    <${Table}
      key=${feature}
      label="Items that the client sees"
      noun="item"
      columns=${SEEN}
      rows=${items}
      rowKey=${(item) => item.key}
      href=${(item) => itemHref(feature, item.key)}
      empty=${data ? `It sees no ${feature}.` : "Loading…"}
      tools=${html`<h3>What this client sees</h3><${Choice} label="Feature" values=${FEATURES} value=${feature} onChange=${setFeature} />`}
    />`;
}
