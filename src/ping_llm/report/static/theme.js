"use strict";
// The button that switches between light and dark colours, which follow the system until the reader chooses. `show(isDark)`
// labels the button.

globalThis.themeButton = (button, show) => {
  const KEY = "ping-llm-theme";
  const root = document.documentElement, systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);
  try { const chosen = localStorage.getItem(KEY); if (chosen) root.dataset.theme = chosen; } catch { /* a page from a file may have no storage */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem(KEY, root.dataset.theme); } catch { /* as above */ }
    show(isDark());
  });
  systemDark.addEventListener("change", () => show(isDark()));
  show(isDark());
};
