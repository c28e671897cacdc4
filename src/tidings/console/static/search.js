// A search field.

import { html, useEffect, useRef, useState } from "./htm-preact.js";

const PAUSE = 150; // milliseconds without a key before a search starts

/** Show a search field. Call `onSearch` when the user pauses. */
export function Search({ label, value, onSearch }) {
  const [typed, setTyped] = useState(value);
  const timer = useRef(null);
  const latest = useRef(null); // the callback of the newest rendering, which the timer calls
  latest.current = onSearch;
  const sent = useRef(value);
  useEffect(() => {
    if (value === sent.current) return; // the user may have typed more meanwhile
    sent.current = value; // a link or the history changed it
    setTyped(value);
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  function onInput(event) {
    const text = event.target.value;
    setTyped(text);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      sent.current = text;
      latest.current(text);
    }, PAUSE);
  }
  return html`<input type="search" aria-label=${label} placeholder=${label} value=${typed} onInput=${onInput} autocomplete="off" spellcheck=${false} />`;
}
