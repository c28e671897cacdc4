// The clipboard.

/** Copy text, and return whether it worked. */
export async function copyText(text) {
  // Browsers offer navigator.clipboard only on https and localhost. At other http addresses, use execCommand.
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // The page has no permission: use execCommand.
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
