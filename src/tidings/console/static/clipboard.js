// The clipboard.

/** Copy text, and return whether it worked. */
export async function copyText(text) {
  // Browsers offer navigator.clipboard on https and localhost only; the console is often opened at an address of the
  // network over http. There, the old command copies a selection.
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // The page has no permission: try the other way.
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "offscreen";
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}
