// A chart with all that belongs to it: title, tooltip for pointers and keys, and the table of its data.

import { h, svg } from "./dom.js";

// `draw(width)` gives { height, parts, points, summary }; a point is { x, y, lines }. `table` gives { head, rows }.
export function figure(title, { nearest = "x", name = "chart" } = {}) {
  const note = h("p", { class: "note" });
  const plot = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", hidden: true });
  const spoken = h("div", { class: "visually-hidden", "aria-live": "polite" });
  const data = h("div", { class: "data", hidden: true, tabindex: "0", role: "region", "aria-label": `${title}: data` });
  const toggle = h("button", { type: "button", class: "plain small", "aria-pressed": "false", onclick: flip }, "Table");
  const element = h("figure", { class: `card ${name}` },
    h("figcaption", {}, h("h3", {}, title), toggle), note, plot, data, spoken);
  let current = null;
  let drawn = null;
  let active = -1;
  let isTable = false;
  let lastWidth = 0;

  function flip() {
    isTable = !isTable;
    toggle.setAttribute("aria-pressed", String(isTable));
    toggle.textContent = isTable ? "Chart" : "Table";
    plot.hidden = isTable;
    data.hidden = !isTable;
    if (isTable && current) data.replaceChildren(tableOf(current.table()));
    else redraw();
  }

  function redraw() {
    const width = Math.floor(plot.clientWidth);
    if (!current || isTable || width < 50) return;
    lastWidth = width;
    drawn = current.draw(width);
    hide();
    const picture = svg("svg", { viewBox: `0 0 ${width} ${drawn.height}`, width, height: drawn.height, role: "img", tabindex: "0", "aria-label": `${title}. ${drawn.summary || ""} Arrow keys read single values.` }, ...drawn.parts);
    const cross = svg("g", { class: "cross" });
    picture.append(cross);
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      point(closest(event.clientX - box.left, event.clientY - box.top), cross);
    });
    picture.addEventListener("pointerleave", () => hide(cross));
    picture.addEventListener("blur", () => hide(cross));
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      const points = drawn.points.length;
      if (step && points) {
        event.preventDefault();
        point(Math.max(0, Math.min(points - 1, active < 0 ? (step > 0 ? 0 : points - 1) : active + step)), cross);
        spoken.textContent = drawn.points[active].lines.join(", ");
      } else if (event.key === "Escape") hide(cross);
    });
    plot.replaceChildren(picture, tip);
  }

  function closest(x, y) {
    let best = -1;
    let least = nearest === "x" ? Infinity : 40 ** 2;
    drawn.points.forEach((candidate, place) => {
      const distance = (candidate.x - x) ** 2 + (nearest === "x" ? 0 : (candidate.y - y) ** 2);
      if (distance < least) [best, least] = [place, distance];
    });
    return best;
  }

  function point(place, cross) {
    if (place < 0) return hide(cross);
    active = place;
    const { x, y, lines } = drawn.points[place];
    tip.replaceChildren(...lines.map((line, number) => h(number ? "div" : "strong", {}, line)));
    tip.hidden = false;
    const room = plot.clientWidth;
    const left = x + 14 + tip.offsetWidth > room ? Math.max(0, x - 14 - tip.offsetWidth) : x + 14;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(0, Math.min(y - tip.offsetHeight / 2, drawn.height - tip.offsetHeight))}px`;
    cross.replaceChildren(svg("circle", { cx: x, cy: y, r: 5 }));
  }

  function hide(cross) {
    active = -1;
    tip.hidden = true;
    cross?.replaceChildren();
  }

  new ResizeObserver(() => { if (Math.floor(plot.clientWidth) !== lastWidth) redraw(); }).observe(plot);

  return {
    element,
    show(chart) {
      current = chart;
      note.replaceChildren(...[chart.note].flat().filter(Boolean));
      note.hidden = !chart.note;
      if (isTable) data.replaceChildren(tableOf(chart.table()));
      else redraw();
    },
  };
}

const MOST_ROWS = 1000;

export function tableOf({ head, rows }) {
  const shown = rows.slice(0, MOST_ROWS);
  return h("table", {},
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, shown.map((row) => h("tr", {}, row.map((cell) => h("td", { class: cellClass(cell) }, cell))))),
    rows.length > MOST_ROWS && h("caption", {}, `The first ${MOST_ROWS} of ${rows.length}.`));
}

function cellClass(cell) {
  return typeof cell === "string" && /^[<]?\s?[\d.,]+( (ms|s|%|bits))?$/.test(cell) ? "number" : null;
}

// Grid and labels along both axes.
export function axes({ width, height, margin, x, y, xTicks = [], yTicks = [], xLabel = null, yLabel = null }) {
  const bottom = height - margin.bottom;
  return [
    svg("g", { class: "grid" },
      yTicks.map(([tick]) => svg("line", { x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick) })),
      xTicks.map(([tick]) => svg("line", { x1: x(tick), x2: x(tick), y1: margin.top, y2: bottom }))),
    svg("g", { class: "ticks" },
      yTicks.map(([tick, label]) => svg("text", { x: margin.left - 7, y: y(tick), dy: "0.32em", "text-anchor": "end" }, label)),
      xTicks.map(([tick, label]) => svg("text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, label)),
      xLabel && svg("text", { class: "label", x: width - margin.right, y: bottom + 34, "text-anchor": "end" }, xLabel),
      yLabel && svg("text", { class: "label", x: margin.left - 7, y: margin.top - 9, "text-anchor": "end" }, yLabel)),
    svg("line", { class: "base", x1: margin.left, x2: width - margin.right, y1: bottom, y2: bottom }),
  ];
}

export const line = (points) => points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// Thousands of dots as one path: a line of no length with round ends.
export const dots = (points) => points.map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)}h0`).join("");
