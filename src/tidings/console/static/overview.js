// The state of the whole server: rates, latency, streams, problems of the workspace, webhooks, replicas.

import { html, useEffect, useRef } from "./htm-preact.js";
import { FEATURES } from "./catalog.js";
import { useStateOf } from "./state.js";
import { Table } from "./table.js";
import { Digest, Text, Time, clock, count, duration, number } from "./text.js";

export function Overview() {
  const { overview, history, error } = useStateOf("overview");
  if (!overview) return html`<section class="page"><h1 class="offscreen">Overview</h1><p class="empty">${error?.message ?? "Loading…"}</p></section>`;
  const { server, latency, catalog, problems, webhooks, replicas } = overview;
  const suppressed = total(overview.suppressed);
  return html`<section class="page">
    <h1 class="offscreen">Overview</h1>
    <dl class="tiles">
      <${Tile} name="Clients" value=${number(overview.clients)} note=${`watch ${count(overview.watched, "topic")}`} href="#/clients" />
      <${Tile} name="Deliveries per second" value=${number(overview.deliveriesPerSecond)} note=${`${number(overview.delivered)} since the start`} />
      <${Tile} name="Latency, median" value=${duration(latency?.p50)} note=${`p95 ${duration(latency?.p95)}, p99 ${duration(latency?.p99)}`} />
      <${Tile} name="Pending" value=${number(overview.pending)} note=${`${count(overview.slow, "slow client")}`} isBad=${overview.slow > 0} />
      <${Tile} name="Suppressed" value=${number(suppressed)} note=${reasons(overview.suppressed)} />
      <${Tile} name="Failures" value=${number(total(overview.failures))} note=${reasons(overview.failures)} isBad=${total(overview.failures) > 0} />
    </dl>
    <div class="charts">
      <${Chart} title="Deliveries per second" times=${history.times} values=${history.deliveries} format=${number} />
      <${Chart} title="Latency, 95th percentile" times=${history.times} values=${history.p95} format=${duration} />
    </div>
    <${Table} tools=${html`<h2>Problems of the workspace</h2>`} label="Problems" noun="problem" columns=${PROBLEMS} rows=${problems} rowKey=${(each) => `${each.file}:${each.line}:${each.text}`} empty="No problem." />
    <${Table} tools=${html`<h2>Catalog</h2>`} label="Catalog" noun="feature" columns=${FEATURE} rows=${FEATURES.map((name) => ({ name, ...catalog[name] }))} rowKey=${(each) => each.name}
      href=${(each) => `#/catalog/${each.name}`} />
    <${Table} tools=${html`<h2>Webhooks</h2>`} label="Webhooks" noun="webhook" columns=${WEBHOOKS} rows=${webhooks} rowKey=${(each) => each.name} empty="No webhook." />
    <${Table} tools=${html`<h2>Replicas</h2>`} label="Replicas" noun="replica" columns=${replicaColumns(replicas)} rows=${replicas} rowKey=${(each) => each.id} empty="This server runs alone." />
    <p class="muted footer">
      <${Text} value=${server.name} /> <${Text} value=${server.version} />, Tidings ${server.tidings}, started <${Time} value=${server.started} />, revision ${overview.revision}
    </p>
  </section>`;
}

function total(counts) {
  return Object.values(counts ?? {}).reduce((sum, each) => sum + each, 0);
}

function reasons(counts) {
  const named = Object.entries(counts ?? {}).filter(([, value]) => value > 0);
  return named.length ? named.map(([name, value]) => `${name} ${number(value)}`).join(", ") : "none";
}

function Tile({ name, value, note, href, isBad }) {
  return html`<div class="tile">
    <dt>${name}</dt>
    <dd><b>${href ? html`<a href=${href}>${value}</a>` : value}</b><span class=${isBad ? "bad" : "muted"}>${note}</span></dd>
  </div>`;
}

const place = (problem) => [problem.file, problem.line, problem.column].filter((each) => each !== null && each !== undefined).join(":");

const PROBLEMS = [
  { title: "File and line", value: place, width: "16rem" },
  { title: "Problem", value: (problem) => problem.text },
  { title: "Since", value: (problem) => clock(problem.since), cell: (problem) => html`<${Time} value=${problem.since} />`, width: "6rem", isExtra: true },
];

const FEATURE = [
  { title: "Feature", value: (each) => each.name },
  { title: "Items", value: (each) => each.items, width: "6rem", isNumber: true },
  { title: "Revision", value: (each) => each.revision, width: "7.5rem", isNumber: true },
  { title: "Digest", value: (each) => each.digest, cell: (each) => html`<${Digest} value=${each.digest} />`, width: "9rem", isExtra: true },
];

const WEBHOOKS = [
  { title: "Name", value: (hook) => hook.name, width: "9rem" },
  { title: "URL", value: (hook) => hook.url, isExtra: true },
  { title: "State", value: (hook) => hook.state, cell: (hook) => html`<span class=${hook.state === "active" ? "" : "bad"}>${hook.state}</span>`, width: "6rem" },
  { title: "Attempts", value: (hook) => hook.attempts, width: "6rem", isNumber: true, isExtra: true },
  { title: "Last error", value: (hook) => hook.lastError },
  { title: "Next attempt", value: (hook) => (hook.nextAttempt ? clock(hook.nextAttempt) : ""), cell: (hook) => html`<${Time} value=${hook.nextAttempt} />`, width: "7.5rem", isExtra: true },
];

/** Return the columns of replicas. A digest that differs from that of this replica is marked. */
function replicaColumns(replicas) {
  const own = replicas.find((each) => each.isSelf)?.digests ?? {};
  return [
    { title: "Replica", value: (each) => each.id, cell: (each) => html`<${Text} value=${each.id} />${each.isSelf && html`<span class="muted"> this one</span>`}` },
    { title: "Host", value: (each) => `${each.host}:${each.pid}`, width: "9rem", isExtra: true },
    { title: "Streams", value: (each) => each.streams, width: "5.5rem", isNumber: true },
    { title: "Lag", value: (each) => each.lag, width: "4rem", isNumber: true, isExtra: true },
    ...FEATURES.map((feature) => ({
      title: feature,
      value: (each) => each.digests?.[feature],
      cell: (each) => {
        const digest = each.digests?.[feature];
        const isDifferent = digest && own[feature] && digest !== own[feature];
        return html`<span class=${isDifferent ? "bad" : ""}><${Digest} value=${digest} />${isDifferent && " differs"}</span>`;
      },
      width: "8.5rem",
      isExtra: feature !== "tools",
    })),
  ];
}

const HEIGHT = 150; // pixels

/** Draw values over time. The last and the largest value are also text, for screen readers. */
function Chart({ title, times, values, format }) {
  const element = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    function create() {
      plot.current?.destroy();
      plot.current = new globalThis.uPlot(options(element.current, title, format), [times, values], element.current);
    }
    create();
    const resized = new ResizeObserver(() => plot.current.setSize({ width: element.current.clientWidth, height: HEIGHT }));
    resized.observe(element.current);
    // A canvas keeps its colours, so draw it again when the theme changes.
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", create);
    addEventListener("themechange", create);
    return () => {
      resized.disconnect();
      dark.removeEventListener("change", create);
      removeEventListener("themechange", create);
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData([times, values]), [times, values]);
  const known = values.filter((value) => value !== null);
  const description = known.length ? `now ${format(values.at(-1))}, at most ${format(Math.max(...known))}` : "no data yet";
  return html`<figure>
    <figcaption>${title}<span class="muted">${description}</span></figcaption>
    <div class="chart" ref=${element} role="img" aria-label=${`${title}: ${description}`}></div>
  </figure>`;
}

/** Return the options of a chart, with the colours that the page has now. */
function options(element, title, format) {
  const style = getComputedStyle(element); // style.css gives the chart these colours
  const accent = style.color;
  const line = style.borderTopColor;
  const muted = style.outlineColor;
  const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width: element.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-6) * 1.1] } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB")), space: 90, size: 28 },
      { ...axis, values: (_, ticks) => ticks.map(format), size: 64 },
    ],
    series: [{}, { label: title, stroke: accent, width: 1.5, points: { show: false }, spanGaps: true }],
  };
}
