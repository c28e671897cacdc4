// A group of buttons of which one is pressed.

import { html } from "./htm-preact.js";

/** Offer a few values, of which one is chosen. */
export function Choice({ label, values, value, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${values.map((each) => html`<button aria-pressed=${each === value ? "true" : "false"} onClick=${() => onChange(each)}>${each}</button>`)}
  </div>`;
}
