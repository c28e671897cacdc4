// The page: its header, and the view that the address after # names. So each view can be linked.

import { html, render, useEffect, useState } from "./htm-preact.js";
import { signOut } from "./api.js";
import { Catalog, FEATURES } from "./catalog.js";
import { Changes } from "./changes.js";
import { Clients } from "./clients.js";
import { Help, useShortcuts } from "./keyboard.js";
import { Overview } from "./overview.js";
import { connection, useStateOf } from "./state.js";
import { Text, titled } from "./text.js";
import { nextTheme, theme } from "./theme.js";

const VIEWS = ["overview", "changes", "clients", "catalog"];
const SIGNS = { system: "◐", light: "○", dark: "●" }; // the icon of each theme
const TITLES = { overview: "Overview", changes: "Changes", clients: "Clients", catalog: "Catalog" };

/** Return the address of a view, with its filters. */
function go(path, query) {
  const text = String(query ?? "");
  return `#/${path}${text && `?${text}`}`;
}

/** Split `#/clients/c12/view?text=a` into the view, the rest of the path, and the filters. */
function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view, ...rest] = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { view: VIEWS.includes(view) ? view : "overview", rest, query: new URLSearchParams(query ?? "") };
}

function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const listener = () => setHash(location.hash);
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return parse(hash);
}

function App() {
  const { view, rest, query } = useRoute();
  const { overview } = useStateOf("overview");
  const [isHelp, setHelp] = useState(false);
  const [, setTheme] = useState(theme());
  const name = overview?.server.name;
  const opened = rest.filter(Boolean);

  useEffect(() => {
    document.title = [opened.at(-1) && titled(opened.at(-1)), TITLES[view], name && titled(name), "Tidings"].filter(Boolean).join(" · ");
  });

  function changeTheme() {
    nextTheme();
    setTheme(theme());
  }
  function close() {
    if (view === "catalog") location.hash = go(`catalog/${rest[0] || "tools"}`, query);
    else location.hash = go(view, query);
  }
  useShortcuts({
    view: (index) => (location.hash = go(VIEWS[index])),
    close,
    theme: changeTheme,
    help: () => setHelp(true),
  });

  const id = rest[0] || null;
  return html`<header class="top">
      <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
      <b class="brand">Tidings</b>
      ${name && html`<span class="server"><${Text} value=${name} limit=${60} /></span>`}
      <nav aria-label="Views">
        ${VIEWS.map((each) => html`<a href=${go(each)} aria-current=${each === view ? "page" : null}>${TITLES[each]}</a>`)}
      </nav>
      <span class="tools">
        <${Status} />
        <button class="quiet" onClick=${changeTheme} title=${`Theme: ${theme()}. Another one: t`} aria-label=${`Theme: ${theme()}`}>${SIGNS[theme()]}</button>
        <button class="quiet" onClick=${() => setHelp(true)} title="Keyboard shortcuts (?)" aria-label="Keyboard shortcuts">?</button>
        ${overview?.server.login && html`<button class="quiet" onClick=${signOut}>Sign out</button>`}
      </span>
    </header>
    <${Disconnected} />
    <main id="main" tabindex="-1">
      ${view === "overview" && html`<${Overview} />`}
      ${view === "changes" && html`<${Changes} id=${id === null ? null : Number(id)} query=${query} go=${go} />`}
      ${view === "clients" && html`<${Clients} id=${id} query=${query} go=${go} isView=${rest[1] === "view"} />`}
      ${view === "catalog" && html`<${Catalog} feature=${FEATURES.includes(rest[0]) ? rest[0] : "tools"} itemKey=${rest[1] || null} query=${query} go=${go} />`}
    </main>
    ${isHelp && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

/** Move the focus to the content. The default action of the link would replace the hash, which names the view. */
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function Status() {
  const { connection } = useStateOf("connection");
  const text = { open: "Live", connecting: "Connecting…", closed: "Disconnected" }[connection];
  return html`<span class=${`status ${connection}`} role="status">${text}</span>`;
}

function Disconnected() {
  const { connection: now, retryAt, overview } = useStateOf("connection");
  const [, tick] = useState(0);
  useEffect(() => {
    if (now !== "closed") return undefined;
    const timer = setInterval(() => tick((count) => count + 1), 1000);
    return () => clearInterval(timer);
  }, [now]);
  if (now === "open" || (now === "connecting" && retryAt === null && !overview)) return null;
  const seconds = retryAt === null ? 0 : Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  return html`<div class="disconnected" role="alert">
    <span>Disconnected from the server. What you see may be out of date.</span>
    <span aria-hidden="true">${now === "closed" && seconds ? `Next attempt in ${seconds} s.` : "Connecting…"}</span>
    <button onClick=${connection.reconnect}>Connect now</button>
  </div>`;
}

render(html`<${App} />`, document.getElementById("app"));
