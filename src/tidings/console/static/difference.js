// The fields that an operation on an item changed, with their values before and after.

import { html } from "./htm-preact.js";
import { Block, Text, asText, visible } from "./text.js";

/** Show an operation on an item, with each field that differs. */
export function Item({ item }) {
  return html`<article class="item">
    <h4><span class="operation">${item.operation}</span> <${Text} value=${item.key} /></h4>
    ${(item.fields ?? []).map(
      (field) => html`<div class="field">
        <code><${Text} value=${field.path} /></code>
        <${Difference} before=${field.before} after=${field.after} />
      </div>`,
    )}
  </article>`;
}

const LONGEST_COMPARED = 5000; // characters; longer values are shown one after the other, without marks

function Difference({ before, after }) {
  const [isMissingBefore, isMissingAfter] = [before, after].map((value) => value === undefined || value === null);
  const [old, fresh] = [before, after].map((value) => visible(asText(value)));
  if (isMissingBefore || isMissingAfter || old.length > LONGEST_COMPARED || fresh.length > LONGEST_COMPARED) {
    return html`${!isMissingBefore && html`<div class="before"><${Block} value=${before} label="Before" /></div>`}
    ${!isMissingAfter && html`<div class="after"><${Block} value=${after} label="After" /></div>`}`;
  }
  const [start, end] = common(old, fresh);
  return html`<pre class="before" tabindex="0" role="group" aria-label="Before"><bdi>${old.slice(0, start)}<del>${old.slice(start, old.length - end)}</del>${old.slice(old.length - end)}</bdi></pre>
    <pre class="after" tabindex="0" role="group" aria-label="After"><bdi>${fresh.slice(0, start)}<ins>${fresh.slice(start, fresh.length - end)}</ins>${fresh.slice(fresh.length - end)}</bdi></pre>`;
}

/** Return how many characters two texts have in common at the start and at the end. */
function common(a, b) {
  const shortest = Math.min(a.length, b.length);
  let start = 0;
  while (start < shortest && a[start] === b[start]) start++;
  let end = 0;
  while (end < shortest - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  return [start, end];
}
