// A table that renders only the rows in view, so that 10,000 rows cost as much as 50. It supports sorting, the keyboard
// and copying. It is a real <table>: a browser copies selected cells, a screen reader reads them.

import { Component, html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./htm-preact.js";
import { copyText } from "./clipboard.js";
import { shortcuts } from "./keyboard.js";
import { Text, count, visible } from "./text.js";

const ROW = 32; // pixels; style.css has the same
const OVERSCAN = 8; // rows above and below the view, so that a small scroll shows no gap
const STEP = 4; // rows: a scroll by less renders nothing
const COPIED = 2000; // milliseconds for which the result of Copy is shown

/**
 * Show rows.
 *
 * A column has `title`, `value(row)` (for sorting and copying), and may have `cell(row)` (what is shown instead),
 * `width` (CSS), `isNumber`, and `isExtra` (hidden on narrow screens).
 *
 * `rowKey(row)` identifies a row, `href(row)` is where it leads, `current` is the key of the row that is open.
 * `isMain`: the shortcuts of the page act on this table. `onEnd` is called when the last row comes into view.
 */
export function Table({ label, noun, columns, rows, rowKey, href, current, sort, isMain, isFilling, onEnd, empty, tools }) {
  const scroller = useRef(null);
  const [height, setHeight] = useState(600);
  const [first, setFirst] = useState(0);
  const [cursor, showCursor] = useState(null); // the key of the row that the keyboard is on
  const latest = useRef(null); // the same key, set before the next rendering, because another key press may come first
  const [order, setOrder] = useState(sort ?? null); // [index of the column, 1 or -1]

  const sorted = useMemo(() => {
    if (!order) return rows;
    const [column, direction] = order;
    const keyed = rows.map((row) => [sortKey(columns[column].value(row)), row]);
    keyed.sort(([a], [b]) => direction * compare(a, b));
    return keyed.map(([, row]) => row);
  }, [rows, order]);

  useEffect(() => {
    const observer = new ResizeObserver(() => setHeight(scroller.current?.clientHeight ?? 0));
    observer.observe(scroller.current);
    return () => observer.disconnect();
  }, []);

  // Keep the rows in view when rows are added above them, unless the view is at the top.
  const anchor = useRef(null);
  useLayoutEffect(() => {
    const element = scroller.current;
    const old = anchor.current;
    if (old !== null && element.scrollTop >= ROW && old.order === order && sorted[old.index] !== undefined) {
      const index = rowKey(sorted[old.index]) === old.key ? old.index : sorted.findIndex((row) => rowKey(row) === old.key);
      if (index !== -1 && index !== old.index) element.scrollTop += (index - old.index) * ROW;
    }
    remember();
  }, [sorted]);

  function remember() {
    const index = Math.floor(scroller.current.scrollTop / ROW);
    anchor.current = index < sorted.length ? { index, key: rowKey(sorted[index]), order } : null;
  }

  function onScroll() {
    remember();
    const top = scroller.current.scrollTop;
    setFirst(Math.max(0, Math.floor(top / ROW / STEP) * STEP - OVERSCAN));
    if (onEnd && top + height > sorted.length * ROW - 20 * ROW) onEnd();
  }

  function show(index) {
    const element = scroller.current;
    const top = index * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    // The header of the table covers one row.
    else if (top + 2 * ROW > element.scrollTop + element.clientHeight) element.scrollTop = top + 2 * ROW - element.clientHeight;
  }

  function move(step) {
    if (!sorted.length) return;
    const key = latest.current ?? current;
    const old = key === undefined || key === null ? -1 : sorted.findIndex((row) => rowKey(row) === key);
    const index = Math.max(0, Math.min(sorted.length - 1, old === -1 ? (step > 0 ? 0 : sorted.length - 1) : old + step));
    latest.current = rowKey(sorted[index]);
    showCursor(latest.current);
    show(index);
    // If a row is open beside the table, open the new row, without an entry in the browser history.
    if (href && current !== undefined && current !== null) location.replace(href(sorted[index]));
  }

  const actions = {
    move,
    open() {
      const row = sorted.find((each) => rowKey(each) === latest.current);
      if (row && href) location.hash = href(row);
    },
    copy: () => copy(),
  };
  // The handlers use the rows of this rendering, so set them again after each one.
  useLayoutEffect(() => {
    if (!isMain) return undefined;
    shortcuts.table = actions;
    return () => {
      if (shortcuts.table === actions) shortcuts.table = null;
    };
  });

  const [copied, setCopied] = useState(null);
  async function copy() {
    const lines = [columns.map((each) => each.title), ...sorted.map((row) => columns.map((each) => field(each.value(row))))];
    const isDone = await copyText(lines.map((line) => line.join("\t")).join("\n"));
    setCopied(isDone ? `Copied ${count(sorted.length, "row")}` : "The browser refused to copy");
    setTimeout(() => setCopied(null), COPIED);
  }

  function onKeyDown(event) {
    if (event.target !== scroller.current || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(height / ROW) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps && href) move(steps[event.key]);
    else if (event.key === "Enter") actions.open();
    else return;
    event.preventDefault();
  }

  const shown = sorted.slice(first, first + Math.ceil(height / ROW) + 2 * OVERSCAN + STEP);
  return html`<div class=${isFilling ? "table filling" : "table"}>
    <div class="bar">
      ${tools}
      <span class="end">
        <span role="status">${copied ?? count(rows.length, noun)}</span>
        <button class="quiet" onClick=${copy} disabled=${!rows.length}>Copy</button>
      </span>
    </div>
    <div class="scroller" ref=${scroller} onScroll=${onScroll} onKeyDown=${onKeyDown} tabindex="0" role="group" aria-label=${label}>
      <table aria-label=${label} aria-rowcount=${sorted.length + 1}>
        <colgroup>
          ${columns.map((each) => html`<col class=${each.isExtra ? "extra" : ""} style=${{ width: each.width ?? "auto" }} />`)}
        </colgroup>
        <thead>
          <tr aria-rowindex="1">
            ${columns.map((column, index) => {
              const direction = order?.[0] === index ? order[1] : 0;
              return html`<th
                scope="col"
                class=${classes(column)}
                aria-sort=${direction ? (direction > 0 ? "ascending" : "descending") : null}
              >
                ${sort === undefined
                  ? column.title
                  : html`<button onClick=${() => setOrder([index, direction ? -direction : column.isNumber ? -1 : 1])}>
                      ${column.title}<span aria-hidden="true">${direction ? (direction > 0 ? " ↑" : " ↓") : ""}</span>
                    </button>`}
              </th>`;
            })}
          </tr>
        </thead>
        <tbody>
          ${first > 0 && html`<tr key="above" aria-hidden="true" class="space" style=${{ height: `${first * ROW}px` }}></tr>`}
          ${shown.map((row, index) => {
            const key = rowKey(row);
            const isCurrent = current !== undefined && current !== null && key === current;
            return html`<${Row} key=${key} row=${row} place=${first + index} columns=${columns} href=${href} isCurrent=${isCurrent} isCursor=${key === cursor} />`;
          })}
          ${first + shown.length < sorted.length &&
          html`<tr key="below" aria-hidden="true" class="space" style=${{ height: `${(sorted.length - first - shown.length) * ROW}px` }}></tr>`}
        </tbody>
      </table>
      ${!rows.length && html`<p class="empty">${empty}</p>`}
    </div>
  </div>`;
}

/** One row. It is rendered again only if its data changed. */
class Row extends Component {
  shouldComponentUpdate(next) {
    return ["row", "place", "columns", "isCurrent", "isCursor"].some((name) => next[name] !== this.props[name]);
  }

  render({ row, place, columns, href, isCurrent, isCursor }) {
    const target = href?.(row);
    return html`<tr
      aria-rowindex=${place + 2}
      aria-current=${isCurrent ? "true" : null}
      class=${[href && "leads", isCurrent && "current", isCursor && "cursor"].filter(Boolean).join(" ")}
      onClick=${href && ((event) => follow(event, href(row)))}
    >
      ${columns.map((column, index) => {
        const content = column.cell ? column.cell(row) : html`<${Text} value=${column.value(row)} />`;
        return html`<td class=${classes(column)}>${index === 0 && href ? html`<a href=${target}>${content}</a>` : content}</td>`;
      })}
    </tr>`;
  }
}

function classes(column) {
  return [column.isNumber && "number", column.isExtra && "extra"].filter(Boolean).join(" ");
}

/** Return the sort key of a value. It ignores the locale: sorting 5,000 names by locale takes longer than a frame. */
function sortKey(value) {
  return typeof value === "string" ? value.toLowerCase() : value;
}

/** Compare two keys. Missing values come first. */
function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}

/** Return a value as a field of tab-separated text, in which a tab or a line break would start another cell. */
function field(value) {
  return visible(value ?? "").replace(/[\t\n]/g, " ");
}

/** Open a row that was clicked, unless the click ended a selection of text or was on a link or a button in the row. */
function follow(event, href) {
  if (event.defaultPrevented || event.target.closest("a, button")) return;
  if (String(getSelection())) return;
  location.hash = href;
}
