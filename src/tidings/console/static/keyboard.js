// The keyboard shortcuts of the page, and the dialog that lists them.

import { html, useEffect, useRef } from "./htm-preact.js";

/** The table and the filter that the shortcuts act on. The current view sets them. */
export const shortcuts = { table: null, filter: null };

const LIST = [
  ["1 2 3 4", "Overview, Changes, Clients, Catalog"],
  ["/", "Search in the view"],
  ["j k", "Next and previous row (in a focused table also the arrow keys)"],
  ["Enter", "Open the row"],
  ["Esc", "Close what is open, or leave the search"],
  ["f", "Changes: only those that a client was told of and never fetched"],
  ["c", "Copy the table"],
  ["t", "Light, dark, or as the system"],
  ["?", "This list"],
];

/** Handle the shortcuts: `actions` has `view(index)`, `close()`, `theme()` and `help()`. */
export function useShortcuts(actions) {
  useEffect(() => {
    function onKeyDown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const element = event.target;
      if (element.closest("input, textarea, select")) {
        if (event.key === "Escape") {
          element.blur();
          event.preventDefault(); // the browser would clear a search field
        }
        return;
      }
      const key = event.key;
      if (key >= "1" && key <= "4") actions.view(Number(key) - 1);
      else if (key === "/") document.querySelector("main input[type=search]")?.focus();
      else if (key === "j") shortcuts.table?.move(1);
      else if (key === "k") shortcuts.table?.move(-1);
      else if (key === "c") shortcuts.table?.copy();
      else if (key === "f") shortcuts.filter?.();
      else if (key === "t") actions.theme();
      else if (key === "?") actions.help();
      else if (key === "Escape") actions.close();
      // On a link or a button, Enter has its own meaning.
      else if (key === "Enter" && !element.closest("a, button, summary")) shortcuts.table?.open();
      else return;
      event.preventDefault();
    }
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  });
}

export function Help({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="help">
    <h2 id="help">Keyboard shortcuts</h2>
    <dl class="keys">
      ${LIST.map(
        ([keys, meaning]) =>
          html`<div>
            <dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd>`)}</dt>
            <dd>${meaning}</dd>
          </div>`,
      )}
    </dl>
    <form method="dialog"><button autofocus>Close</button></form>
  </dialog>`;
}
