// A group of buttons, one of which is pressed.

import { html } from "./htm-preact.js";

/** Show a button for each value. */
export function Choice({ label, values, value, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${values.map((each) => html`<button aria-pressed=${each === value ? "true" : "false"} onClick=${() => onChange(each)}>${each}</button>`)}
  </div>`;
}
