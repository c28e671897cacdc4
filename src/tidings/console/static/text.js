// Formatting: untrusted text, times, durations and numbers.
//
// Every string of a server or a client becomes a text node, so it cannot contain markup. Two dangers remain: hidden
// characters, which are invisible or change the text direction, and length. `visible` and `Text` handle both.

import { html, useState } from "./htm-preact.js";

// Characters that are not visible: control characters, lone surrogates, separators of lines and paragraphs, marks of
// annotations (fff9 to fffb), and those that Unicode calls default-ignorable, such as direction marks and tags. Not
// joiners and variation selectors, which scripts and emoji need.
const HIDDEN = /(?![\t\n\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f\u{e0100}-\u{e01ef}])[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\ufff9-\ufffb]/gu;
const SHORT = 200; // characters of a name in a table: more than any column shows
const LONG = 2000; // characters of a value before "Show all"

/** Return the text with each hidden character written as an escape such as \x1b. */
export function visible(text) {
  return String(text).replace(HIDDEN, (character) => {
    const code = character.codePointAt(0).toString(16);
    if (code.length > 4) return `\\u{${code}}`;
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

/** Return at most `limit` characters, with an ellipsis if there were more. */
export function shorten(text, limit = SHORT) {
  return text.length > limit ? `${text.slice(0, limit)}…` : text;
}

/** Return a title for the document: one short line. */
export function titled(text) {
  return shorten(visible(text).replace(/\s+/g, " "), 60);
}

/** Show a name on one line. `bdi` keeps a right-to-left name from moving its neighbours. */
export function Text({ value, limit = SHORT }) {
  if (value === null || value === undefined || value === "") return html`<span class="muted">–</span>`;
  const text = visible(value).replace(/[\t\n]/g, " ");
  return html`<bdi title=${text.length > 20 ? shorten(text, 1000) : null}>${shorten(text, limit)}</bdi>`;
}

/** Show a value of several lines as it is, with a button for what is too long to show at once. */
export function Block({ value, label }) {
  const [isWhole, setWhole] = useState(false);
  const text = visible(asText(value));
  const isLong = text.length > LONG;
  return html`<div class="block">
    <pre tabindex="0" role="group" aria-label=${label}><bdi>${isWhole ? text : shorten(text, LONG)}</bdi></pre>
    ${isLong &&
    html`<button class="link" onClick=${() => setWhole(!isWhole)}>
      ${isWhole ? "Show less" : `Show all ${number(text.length)} characters`}
    </button>`}
  </div>`;
}

/** Return a string as it is, and any other value as JSON. */
export function asText(value) {
  if (typeof value === "string") return value;
  return value === undefined ? "" : JSON.stringify(value, null, 2);
}

// Created once, because toLocaleString creates a new format for each value.
const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const DAY = new Intl.DateTimeFormat("sv-SE"); // 2026-11-18

export function number(value) {
  return value === null || value === undefined ? "–" : NUMBER.format(value);
}

/** Return a duration in seconds with a unit that fits, such as 0.4 ms. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toPrecision(seconds < 0.1 ? 2 : 3).replace(/\.0$/, "")} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** Return a local time, without the date if it is today. */
export function clock(iso) {
  if (!iso) return "–";
  const time = new Date(iso);
  const clock = CLOCK.format(time);
  return time.toDateString() === new Date().toDateString() ? clock : `${DAY.format(time)} ${clock}`;
}

export function Time({ value }) {
  return value ? html`<time datetime=${value} title=${value}>${clock(value)}</time>` : html`<span class="muted">–</span>`;
}

/** Show the start of a digest. */
export function Digest({ value }) {
  return value ? html`<code title=${value}>${shorten(visible(value), 10)}</code>` : html`<span class="muted">–</span>`;
}

/** Return a number with its noun, in the singular or plural. */
export function count(value, noun) {
  return `${number(value)} ${value === 1 ? noun : noun.replace(/y$/, "ie") + "s"}`;
}
