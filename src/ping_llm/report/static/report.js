"use strict";
// The run report: theme, charts, tabs, and a search among the configuration keys.
(() => {
  const button = document.getElementById("theme");
  button.hidden = false;
  themeButton(button, (isDark) => {
    button.textContent = isDark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark ? "light" : "dark"} colours`);
  });

  // -- charts (chart.js), and the buttons that make their axes linear or logarithmic
  for (const figure of document.querySelectorAll("figure.chart")) {
    const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const drawn = chart(figure.querySelector(".plot"), spec);
    const buttons = [...figure.querySelectorAll("[data-log]")];
    for (const button of buttons)
      button.addEventListener("click", () => {
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        const log = { x: button.dataset.log.includes("x"), y: button.dataset.log.includes("y") };
        drawn.update({ ...spec, x: { ...spec.x, log: log.x }, y: { ...spec.y, log: log.y } });
      });
  }

  // -- tabs: made of panels that stand below each other without this script
  let number = 0;
  for (const group of document.querySelectorAll(".tabs")) {
    const panels = [...group.children];
    if (panels.length < 2) continue;
    const list = document.createElement("div");
    list.className = "tab-list";
    list.setAttribute("role", "tablist");
    list.setAttribute("aria-label", group.dataset.label);
    const tabs = panels.map((panel) => {
      const tab = document.createElement("button");
      tab.type = "button";
      tab.textContent = panel.dataset.title;
      tab.id = `tab-${++number}`;
      panel.id = `panel-${number}`;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-controls", panel.id);
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", tab.id);
      list.append(tab);
      return tab;
    });
    const choose = (index, focus) => {
      const chosen = (index + tabs.length) % tabs.length;
      tabs.forEach((tab, i) => { tab.setAttribute("aria-selected", String(i === chosen)); tab.tabIndex = i === chosen ? 0 : -1; });
      panels.forEach((panel, i) => panel.classList.toggle("away", i !== chosen));
      if (focus) tabs[chosen].focus();
    };
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => choose(i, false));
      tab.addEventListener("keydown", (event) => {
        const moves = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tabs.length - 1 };
        if (event.key in moves) { event.preventDefault(); choose(moves[event.key], true); }
      });
    });
    group.classList.add("made");
    group.prepend(list);
    choose(0, false);
  }

  // -- search among the keys of the configuration
  for (const input of document.querySelectorAll("[data-filter]"))
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of input.closest("details").querySelectorAll("tbody tr")) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
})();
