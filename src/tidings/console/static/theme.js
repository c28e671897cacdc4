// The theme: light, dark, or that of the system.

const THEMES = ["system", "light", "dark"];
const NAME = "tidings-theme";

/** Return the theme that the user chose. */
export function theme() {
  const chosen = localStorage.getItem(NAME);
  return THEMES.includes(chosen) ? chosen : "system";
}

export function setTheme(name) {
  localStorage.setItem(NAME, name);
  document.documentElement.dataset.theme = name;
  dispatchEvent(new Event("themechange")); // for the charts
}

export function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
}

setTheme(theme());
