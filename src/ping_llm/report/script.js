"use strict";
(() => {
  const root = document.documentElement;

  // -- theme: the system's, until somebody chooses
  const button = document.getElementById("theme");
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`); };
  try { const chosen = localStorage.getItem("ping-llm-theme"); if (chosen) root.dataset.theme = chosen; } catch { /* a page from a file may have no storage */ }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("ping-llm-theme", root.dataset.theme); } catch { /* as above */ }
    label();
  });
  systemDark.addEventListener("change", label);
  label();

  // -- numbers, as scales.py shows them
  const minus = (text) => text.replace("-", "−");
  function short(value) {
    for (const [size, prefix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= size * 0.9995) return `${+(value / size).toPrecision(3)}${prefix}`;
    return String(+value.toPrecision(3));
  }
  function shown(value, style) {
    if (value === null) return "–";
    if (style === "percent") return `${+(100 * value).toPrecision(3)} %`;
    if (style === "count") return Number.isInteger(value) ? value.toLocaleString("en") : short(value);
    if (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return minus(value.toPrecision(3));
    return minus((+value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 8 }));
  }

  // -- charts: a cross-hair with the values of all lines, by pointer or by arrow keys
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }
  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const plot = figure.querySelector(".plot"), tip = plot.querySelector(".tip"), cross = plot.querySelector(".cross");
    if (!data.lines.length) continue;
    const guide = data.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
    let at = -1;
    const view = () => plot.querySelector(".view:not([hidden])");
    const place = (value, [low, high, log]) => log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const back = (share, [low, high, log]) => log ? low * Math.pow(high / low, share) : low + share * (high - low);

    function show(index) {
      at = Math.max(0, Math.min(guide.length - 1, index));
      const x = guide[at], axis = JSON.parse(view().dataset.x), left = place(x, axis);
      if (!(left >= -0.001 && left <= 1.001)) return;
      cross.style.left = `${100 * left}%`;
      cross.hidden = tip.hidden = false;
      tip.replaceChildren();
      const head = document.createElement("b");
      head.textContent = `${data.x} ${data.xStyle === "percent" ? shown(x, "percent") : x.toLocaleString("en")}`;
      tip.append(head);
      const reach = (guide[guide.length - 1] - guide[0]) / 25;
      const width = plot.clientWidth, lines = data.lines.filter((line) => line.kind !== "quiet" || width > 420);
      for (const line of lines) {
        const i = nearest(line.x, x);
        if (Math.abs(line.x[i] - x) > reach) continue;
        const row = document.createElement("span"), key = document.createElement("i"), name = document.createElement("span"), value = document.createElement("b");
        key.className = `key ${line.kind}`;
        key.style.setProperty("--colour", `var(--series-${line.colour})`);
        name.textContent = line.kind === "dots" && line.x[i] !== x ? `${line.name} (${data.x} ${line.x[i].toLocaleString("en")})` : line.name;
        value.textContent = shown(line.y[i], data.style);
        row.append(key, name, value);
        tip.append(row);
      }
      // beside the cross-hair, on the side that has room, and never beyond the chart
      const here = left * width, size = tip.offsetWidth, side = here + 12 + size <= width ? here + 12 : here - 12 - size;
      tip.style.left = `${Math.max(-plot.offsetLeft + 4, Math.min(side, width - size))}px`;
    }
    const hide = () => { cross.hidden = tip.hidden = true; };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      show(nearest(guide, back(Math.max(0, Math.min(1, share)), JSON.parse(view().dataset.x))));
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const stride = event.shiftKey ? Math.max(1, Math.round(guide.length / 20)) : Math.max(1, Math.round(guide.length / 200));
      const moves = { ArrowLeft: -stride, ArrowRight: stride, Home: -guide.length, End: guide.length };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      show((at < 0 ? (moves[event.key] < 0 ? guide.length : -stride) : at) + moves[event.key]);
    });
    for (const choice of figure.querySelectorAll("[data-show]"))
      choice.addEventListener("click", () => {
        hide();
        for (const other of figure.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === choice));
        for (const one of plot.querySelectorAll(".view")) one.hidden = one.dataset.view !== choice.dataset.show;
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
