// A map of the nodes with a known location, in the colours of the matrix. It loads no tiles.

import { h } from "./dom.js";
import { LAND } from "./land.js";

const { colour } = globalThis.heat;
const svg = (tag, attributes, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

export function drawMap({ sources, destinations, place, say, link }) {
  const from = [...sources.keys()].filter((row) => place[sources[row]]);
  const to = [...destinations.keys()].filter((at) => place[destinations[at]]);
  const status = h("output", { class: "pair" }, "Point at a place; click it to see RTTs from there.");
  const select = h("select", { id: "map-from", onchange: () => draw() }, from.map((row) => h("option", { value: row }, place[sources[row]].name)));
  const all = [...new Set([...from.map((row) => sources[row]), ...to.map((at) => destinations[at])])].map((node) => place[node]);
  const view = frame(all);
  const size = view[2] / 60; // of a dot
  const x = (one) => 2 * one.longitude;
  const y = (one) => -2 * one.latitude;
  const lines = svg("g", {});
  const dots = svg("g", {});
  const world = svg("svg", { viewBox: view.join(" "), class: "map", role: "img", "aria-label": "Map of the nodes" },
    svg("path", { d: LAND, class: "land" }),
    svg("g", { class: "graticule", "stroke-width": view[2] / 2000 }, ...[...Array(13).keys()].map((step) => svg("path", { d: `M${60 * step - 360} -180V180` })), ...[-60, -30, 0, 30, 60].map((degrees) => svg("path", { d: `M-360 ${2 * degrees}H360` }))),
    lines, dots);
  const element = h("figure", { class: "card map-figure" }, h("figcaption", {}, h("h3", {}, "Map")), h("div", { class: "choice" }, h("label", { for: "map-from" }, "From"), select), status, world);
  let latest = null;

  function draw(value = latest?.[0], ends = latest?.[1]) {
    latest = [value, ends];
    if (!from.length || !value) return;
    const row = +select.value;
    const origin = place[sources[row]];
    const shown = to.filter((at) => destinations[at] !== sources[row]);
    lines.replaceChildren(...shown.map((at) => {
      const [own, one] = [value(row, at), place[destinations[at]]];
      return svg("path", { d: `M${x(origin)} ${y(origin)}L${x(one)} ${y(one)}`, stroke: own === null ? "transparent" : colour(own, ends).back, "stroke-width": size / 5, fill: "none" });
    }));
    dots.replaceChildren(...shown.map((at) => {
      const [own, one] = [value(row, at), place[destinations[at]]];
      const dot = svg("circle", { cx: x(one), cy: y(one), r: size / 1.6, fill: own === null ? "var(--faint)" : colour(own, ends).back, "stroke-width": size / 8 }, svg("title", {}, say(row, at)));
      const anchor = svg("a", { href: link(sources[row], destinations[at]), "aria-label": say(row, at) }, dot);
      for (const event of ["pointerenter", "focus"]) anchor.addEventListener(event, () => status.replaceChildren(say(row, at)));
      anchor.addEventListener("click", (event) => {
        const other = sources.indexOf(destinations[at]);
        if (!from.includes(other)) return;
        event.preventDefault();
        select.value = other;
        draw();
      });
      return anchor;
    }), svg("circle", { cx: x(origin), cy: y(origin), r: size, class: "origin", "stroke-width": size / 4 }));
  }

  return { element, draw };
}

// The visible part of the world, in half degrees: all nodes with a margin, at least 40 degrees across.
function frame(places) {
  const [longitudes, latitudes] = [places.map((one) => 2 * one.longitude), places.map((one) => -2 * one.latitude)];
  const middle = (values) => (Math.min(...values) + Math.max(...values)) / 2;
  const reach = (values) => Math.max(...values) - Math.min(...values);
  const width = Math.min(720, Math.max(80, 1.25 * reach(longitudes), 2.5 * reach(latitudes)));
  const height = Math.min(330, Math.max(width / 2, 1.25 * reach(latitudes)));
  return [Math.max(-360, Math.min(360 - width, middle(longitudes) - width / 2)), Math.max(-170, Math.min(180 - height, middle(latitudes) - height / 2)), width, height];
}
