// The page: describes the model, and shows the view that the address names.

import { get } from "./api.js";
import { h, loading } from "./dom.js";
import { findView } from "./find.js";
import { failure } from "./forms.js";
import { day, plural } from "./format.js";
import { matrixView } from "./matrix.js";
import { fromState } from "./measurements.js";
import { predictView } from "./predict.js";
import { rankView } from "./rank.js";
import { read } from "./state.js";
import { suggestView } from "./suggest.js";
import { anomaliesView } from "./anomalies.js";

const VIEWS = { predict: predictView, rank: rankView, matrix: matrixView, find: findView, suggest: suggestView, anomalies: anomaliesView };
const main = document.getElementById("main");
let info = null;

async function start() {
  main.replaceChildren(loading("Starting …"));
  try {
    info = await get("model");
  } catch (problem) {
    document.getElementById("model").textContent = "";
    main.replaceChildren(failure(problem, start));
    return;
  }
  describe();
  if (!info.warm) watch();
  window.addEventListener("hashchange", render);
  render();
}

function describe() {
  const rows = info.rows;
  const range = rows?.end ? `, ${day(rows.begin)} to ${day(rows.end)}` : "";
  const parts = [
    h("strong", {}, info.name),
    info.kind === "completer" ? "" : ` · language model after ${plural(info.steps, "step")}`,
    rows ? ` · ${plural(rows.measurements, "measurement")} of ${plural(rows.sources, "source")}${range}` : " · no measurements of its own",
    info.warm ? "" : h("span", { class: "warming" }, " · still warming up"),
  ];
  document.getElementById("model").replaceChildren(...parts);
}

async function watch() {
  while (!info.warm) {
    await new Promise((resolve) => setTimeout(resolve, 2000));
    try {
      info.warm = (await get("model")).warm;
    } catch {
      return;
    }
  }
  describe();
}

async function render() {
  const state = read();
  if (!VIEWS[state.view]) state.view = "predict";
  document.title = `${state.view[0].toUpperCase()}${state.view.slice(1)} – ping-llm`;
  for (const link of document.querySelectorAll("nav [data-view]")) {
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    link.href = sameSubject(state, link.dataset.view);
  }
  try {
    await fromState(state);
    main.replaceChildren(VIEWS[state.view](state, info));
  } catch (problem) {
    main.replaceChildren(failure(problem, render));
  }
}

// Another view of the same nodes and measurements.
function sameSubject(state, view) {
  const kept = new URLSearchParams();
  for (const name of ["src", "dst", "example", "history", "rows"]) if (state[name] && view !== "anomalies") kept.set(name, state[name]);
  return `#${view}${kept.size ? `?${kept}` : ""}`;
}

const theme = document.getElementById("theme");
globalThis.themeButton(theme, (isDark) => { theme.textContent = isDark ? "☀" : "☾"; });
start();
