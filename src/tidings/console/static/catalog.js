// The catalog: the items of each feature, and one item with its definition, history, watchers, and a form to call it.

import { html, useMemo, useState } from "./htm-preact.js";
import { post } from "./api.js";
import { Choice } from "./choice.js";
import { Item } from "./difference.js";
import { SchemaForm } from "./form.js";
import { Search } from "./search.js";
import { useData, useStateOf } from "./state.js";
import { Table } from "./table.js";
import { Block, Text, Time, count, duration } from "./text.js";

export const FEATURES = ["tools", "prompts", "resources"];

export function itemHref(feature, key) {
  return `#/catalog/${feature}/${encodeURIComponent(key)}`;
}

const COLUMNS = [
  { title: "Name", value: (item) => item.name ?? item.key },
  { title: "Description", value: (item) => item.description, width: "45%", isExtra: true },
  { title: "Revision", value: (item) => item.revision, width: "7.5rem", isNumber: true },
  { title: "Watchers", value: (item) => item.watchers, width: "6rem", isNumber: true },
];

// The key of a tool or a prompt is its name.
const RESOURCE_COLUMNS = COLUMNS.toSpliced(1, 0, { title: "URI", value: (item) => item.key, width: "25%", isExtra: true });

export function Catalog({ feature, itemKey, query, go }) {
  const { catalog, watches } = useStateOf("catalog", "watches");
  const { data, error } = useData("catalog", catalog, watches);
  const text = query.get("text") ?? "";
  const items = data?.[feature]?.items ?? [];
  const rows = useMemo(() => {
    if (!text) return items;
    const wanted = text.toLowerCase();
    return items.filter((item) => [item.key, item.name, item.title, item.description].some((each) => each?.toLowerCase().includes(wanted)));
  }, [items, text]);
  const search = (value) => {
    const path = itemKey === null ? `catalog/${feature}` : `catalog/${feature}/${encodeURIComponent(itemKey)}`;
    location.replace(go(path, new URLSearchParams(value ? { text: value } : {})));
  };
  return html`<section class=${itemKey === null ? "list" : "list with-detail"}>
      <h1 class="offscreen">Catalog</h1>
      <${Table}
        key=${feature}
        label=${`Items: ${feature}`}
        noun="item"
        columns=${feature === "resources" ? RESOURCE_COLUMNS : COLUMNS}
        rows=${rows}
        rowKey=${(item) => item.key}
        href=${(item) => go(`catalog/${feature}/${encodeURIComponent(item.key)}`, query)}
        current=${itemKey}
        sort=${null}
        isMain
        isFilling
        empty=${error?.message ?? (data ? (text ? `No item of ${feature} matches.` : `The server has no ${feature}.`) : "Loading…")}
        tools=${html`<${Choice} label="Feature" values=${FEATURES} value=${feature} onChange=${(each) => (location.hash = go(`catalog/${each}`, query))} />
          <${Search} label=${`Search ${feature}`} value=${text} onSearch=${search} />`}
      />
    </section>
    ${itemKey !== null &&
    html`<${Detail} key=${`${feature} ${itemKey}`} feature=${feature} itemKey=${itemKey} close=${go(`catalog/${feature}`, query)} />`}`;
}

const WATCHERS = [
  { title: "Client", value: (client) => client.name, cell: (client) => html`<${Text} value=${client.name || client.id} />` },
  { title: "Id", value: (client) => client.id, width: "6rem" },
];

function Detail({ feature, itemKey, close }) {
  const { catalog, watches } = useStateOf("catalog", "watches");
  const { data, error } = useData(`item?${new URLSearchParams({ feature, key: itemKey })}`, catalog[feature], watches);
  const definition = data?.definition;
  return html`<aside class="detail" aria-label="Item">
    <header>
      <h2><${Text} value=${definition?.name ?? itemKey} /></h2>
      <a class="close" href=${close} aria-label="Close">✕</a>
    </header>
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    ${data &&
    html`<div class="body">
      ${definition?.description && html`<p class="description"><${Text} value=${definition.description} limit=${1000} /></p>`}
      ${definition && html`<${Use} feature=${feature} definition=${definition} />`}
      ${definition && html`<h3>Definition</h3><${Block} value=${definition} label="Definition" />`}
      <h3>History</h3>
      ${data.history.length === 0 && html`<p class="muted">No change since the server keeps its history.</p>`}
      ${data.history.map(
        (each) => html`<div class="past">
          <p class="muted"><${Time} value=${each.time} />, revision ${each.revision}</p>
          <${Item} item=${{ ...each, key: itemKey }} />
        </div>`,
      )}
      <${Table} tools=${html`<h3>Watched by</h3>`} label="Clients that watch the item" noun="client" columns=${WATCHERS} rows=${data.watchers} rowKey=${(client) => client.id}
        href=${(client) => `#/clients/${encodeURIComponent(client.id)}`} empty="No client watches it." />
    </div>`}
  </aside>`;
}

/** Return the title, button text, schema and request of the form of an item. */
function usage(feature, definition) {
  if (feature === "tools") {
    return { title: "Call", verb: "Call", schema: definition.inputSchema, send: (values) => post("call", { name: definition.name, arguments: values }) };
  }
  if (feature === "prompts") {
    const fields = definition.arguments ?? [];
    const schema = {
      type: "object",
      properties: Object.fromEntries(fields.map(({ name, title, description }) => [name, { type: "string", title, description }])),
      required: fields.filter((each) => each.required).map((each) => each.name),
    };
    return { title: "Get", verb: "Get", schema, send: (values) => post("prompt", { name: definition.name, arguments: values }) };
  }
  // The user completes the URI of a template.
  const schema = {
    type: "object",
    properties: { uri: { type: "string", title: "URI", default: definition.uri ?? definition.uriTemplate } },
    required: ["uri"],
  };
  return { title: "Read", verb: "Read", schema, send: (values) => post("read", values) };
}

function Use({ feature, definition }) {
  const { overview } = useStateOf("overview");
  const [answer, setAnswer] = useState(null); // {result, error, seconds}
  const [isBusy, setBusy] = useState(false);
  const { title, verb, schema, send } = useMemo(() => usage(feature, definition), [feature, definition]);
  async function submit(values) {
    setBusy(true);
    const start = performance.now();
    let result = null;
    let error = null;
    try {
      result = await send(values);
    } catch (failure) {
      error = failure;
    }
    setAnswer({ result, error, seconds: (performance.now() - start) / 1000 });
    setBusy(false);
  }
  if (overview && overview.mode !== "write") {
    return html`<p class="note">The console is read-only. It ${USES[feature]} if the server is started with --console=write.</p>`;
  }
  return html`<h3>${title}</h3>
    <${SchemaForm} schema=${schema} verb=${verb} isBusy=${isBusy} onSubmit=${submit} />
    <div role="status">
      ${answer?.error && html`<p class="error">${answer.error.message}</p>`}
      ${answer?.result && html`<${Result} result=${answer.result} seconds=${answer.seconds} />`}
    </div>`;
}

const USES = { tools: "calls tools", prompts: "gets prompts", resources: "reads resources" };

/** Show the result of a call, a prompt or a read: texts as texts, images as images, and the rest as JSON. */
function Result({ result, seconds }) {
  const parts = result.content ?? result.contents ?? result.messages ?? [];
  const known = ["content", "contents", "messages", "isError", "description", "resultType", "structuredContent"];
  const rest = Object.fromEntries(Object.entries(result).filter(([name]) => !known.includes(name)));
  return html`<section class="result" aria-label="Result">
    <p class=${result.isError ? "bad" : "muted"}>${result.isError ? "The tool failed" : "Done"} after ${duration(seconds)}, ${count(parts.length, "part")}</p>
    ${parts.map((part) => html`<${Part} part=${part} />`)}
    ${result.structuredContent !== undefined && html`<h4>Structured content</h4><${Block} value=${result.structuredContent} label="Structured content" />`}
    ${Object.keys(rest).length > 0 && html`<details><summary>Other members</summary><${Block} value=${rest} label="Other members" /></details>`}
  </section>`;
}

// No SVG: it can contain scripts.
const IMAGES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

function Part({ part }) {
  const content = part.content ?? part; // a message of a prompt has a role and its content
  const resource = content.resource ?? content;
  const text = resource.text;
  const data = resource.data ?? resource.blob;
  return html`<div class="part">
    ${part.role && html`<p class="muted">${part.role}</p>`}
    ${resource.uri && html`<p class="muted"><${Text} value=${resource.uri} /> <${Text} value=${resource.mimeType} /></p>`}
    ${typeof text === "string"
      ? html`<${Block} value=${text} label="Text" />`
      : typeof data === "string" && IMAGES.includes(resource.mimeType)
        ? html`<img alt="Image in the result" src=${`data:${resource.mimeType};base64,${data}`} />`
        : html`<${Block} value=${content} label="Content" />`}
  </div>`;
}
