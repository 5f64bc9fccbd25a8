// All pairs of the busiest nodes at once, and, where locations are known, a map: measured, predicted, how uncertain.

import { get, post } from "./api.js";
import { predictionColumns } from "./charts.js";
import { field, h, loading } from "./dom.js";
import { interval, ms, percent, plural, tickMs } from "./format.js";
import { address, failure, go, queryForm, rangeFields } from "./forms.js";
import { drawMap } from "./map.js";
import { asObjects, history } from "./measurements.js";
import { asIso } from "./predict.js";
import { note, read } from "./state.js";
import { column, downloads } from "./tables.js";

const SHOWN = { best: "Measured, else predicted", measured: "Measured only", predicted: "Predicted", width: "Uncertainty: 90 % quantile / 10 % quantile", ratio: "Measured / predicted" };
const MOST_WITH_NUMBERS = 18;

export function matrixView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Matrix" });
  const number = h("input", { type: "number", min: 2, max: 100, inputmode: "numeric", value: state.count || 12 });
  const count = field("Nodes", number, "The busiest sources, and the busiest destinations.");
  const range = rangeFields(state);
  const form = queryForm(info, "Show", [count, range.element], submit);
  let asking = new AbortController();

  function submit() {
    const [isGood, limits] = [number.value >= 2 && number.value <= 100, range.check()];
    count.fail(isGood ? "" : "A number from 2 to 100.");
    if (isGood && limits) go({ ...read(), view: "matrix", count: Math.round(number.value), ...limits });
  }

  async function ask() {
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    results.replaceChildren(loading("Reading the measurements …"));
    try {
      const shared = { history: asObjects(), use_rows: state.rows !== "0" };
      const [found, { places }] = await Promise.all([
        post("matrix", { count: +state.count || 12, begin: asIso(state.from) || null, end: asIso(state.until) || null, ...shared }, signal),
        info.places ? get("places", {}, signal) : { places: [] }]);
      if (!found.sources.length) return results.replaceChildren(h("div", { class: "card empty" }, h("p", {}, "There are no measurements in this time range.")));
      const shown = matrixCard(found, places, state);
      results.replaceChildren(...shown.elements);
      for (const [row, source] of found.sources.entries()) { // row by row, so that the first predictions appear early
        const columns = [...found.destinations.keys()].filter((at) => found.destinations[at] !== source && found.destinations[at].includes(":") === source.includes(":"));
        for (let first = 0; first < columns.length; first += info.limits.questions) {
          const some = columns.slice(first, first + info.limits.questions);
          const { predictions } = await post("predict", { questions: some.map((at) => ({ src_addr: source, dst_addr: found.destinations[at] })), ...shared }, signal);
          if (!results.isConnected) return;
          predictions.forEach((prediction, at) => shown.predicted(row, some[at], prediction));
        }
      }
      shown.done();
    } catch (problem) {
      if (problem.name !== "AbortError" && results.isConnected) results.append(failure(problem, ask));
    }
  }

  if (info.rows || history()) requestAnimationFrame(ask);
  else results.replaceChildren(h("div", { class: "card empty" }, h("h2", {}, "How far apart are all nodes?"), h("p", {}, "All pairs at once, measured and predicted. This server has no measurements of its own: paste some, or"),
    h("ul", { class: "chips" }, h("li", {}, h("a", { href: address({ view: "matrix", example: "1" }) }, "try an example")))));
  return h("div", { class: "view" }, form, results);
}

function matrixCard(found, places, state) {
  const { sources, destinations } = found;
  const select = h("select", { id: "shown", onchange: () => { note({ shown: select.value }); draw(); } }, Object.entries(SHOWN).map(([name, text]) => h("option", { value: name, selected: state.shown === name }, text)));
  const status = h("output", { class: "pair" }, "Point at a cell; a click opens its pair.");
  const progress = h("p", { class: "note", role: "status" });
  const legend = h("div", { class: "legend", "aria-hidden": "true" });
  const { colour } = globalThis.heat, stops = globalThis.heat.stops(found.colours);
  const answers = sources.map(() => []);
  const place = Object.fromEntries(places.flatMap((one) => [[one.address, one], [one.name, one]]));
  const name = (node) => place[node]?.name || node;
  const link = (source, destination) => address({ ...read(), view: "predict", src: source, dst: destination });
  const cells = sources.map((source, row) => destinations.map((destination, at) => {
    if (source === destination) return h("td", { class: "nothing" });
    const anchor = h("a", { href: link(source, destination) });
    for (const event of ["pointerenter", "focus"]) anchor.addEventListener(event, () => status.replaceChildren(inWords(row, at)));
    return h("td", {}, anchor);
  }));
  const table = h("table", { class: `heat ${destinations.length > MOST_WITH_NUMBERS ? "dense" : ""}` },
    h("thead", {}, h("tr", {}, h("td", {}), destinations.map((node) => h("th", { scope: "col" }, h("span", {}, name(node)))))),
    h("tbody", {}, sources.map((source, row) => h("tr", {}, h("th", { scope: "row" }, name(source)), cells[row]))));

  const measured = (row, at) => found.median[row][at];
  const value = (row, at) => {
    const [own, answer] = [measured(row, at), answers[row][at]];
    if (select.value === "measured") return own;
    if (select.value === "predicted") return answer?.median ?? null;
    if (select.value === "width") return answer ? answer.quantiles["0.9"] / answer.quantiles["0.1"] : null;
    if (select.value === "ratio") return answer && own !== null ? own / answer.median : null;
    return own ?? answer?.median ?? null;
  };
  const text = (shown) => (["width", "ratio"].includes(select.value) ? `${+shown.toPrecision(2)}×` : +shown.toPrecision(shown < 100 ? 2 : 3));

  function inWords(row, at) {
    const [own, times, answer] = [measured(row, at), found.measurements[row][at], answers[row][at]];
    const parts = [`${name(sources[row])} → ${name(destinations[at])}:`, times ? `measured ${own === null ? "(timeouts only)" : ms(own)}, ${plural(times, "time")};` : "never measured;"];
    parts.push(answer ? `predicted ${ms(answer.median)}, 80 % interval ${interval(answer.quantiles)}, timeout ${percent(answer.p_failed)}` : "not predicted yet");
    return `${parts.join(" ")}${answer?.support?.extrapolating ? `. Extrapolated: ${answer.support.reason}` : ""}.`;
  }

  function scale() {
    if (select.value === "width") return { low: 1, high: 10, stops };
    if (select.value === "ratio") return { low: 1 / 3, high: 3, stops };
    const known = sources.flatMap((_, row) => destinations.map((_, at) => value(row, at))).filter((one) => one > 0).sort((a, b) => a - b);
    const [low, high] = [known[Math.floor(0.02 * known.length)] ?? 1, known[Math.floor(0.98 * known.length)] ?? 1];
    return { low, high: Math.max(high, 1.2 * low), stops };
  }

  function draw() {
    const ends = scale();
    cells.forEach((own, row) => own.forEach((cell, at) => {
      const anchor = cell.firstChild;
      if (!anchor) return;
      const shown = value(row, at);
      const { back, ink } = shown === null ? { back: "", ink: "" } : colour(shown, ends);
      anchor.style.backgroundColor = back;
      anchor.style.color = ink;
      anchor.className = [measured(row, at) !== null && "measured", answers[row][at]?.support?.extrapolating && "guess"].filter(Boolean).join(" ");
      anchor.textContent = shown === null || destinations.length > MOST_WITH_NUMBERS ? "" : text(shown);
      anchor.setAttribute("aria-label", inWords(row, at));
    }));
    const unit = ["width", "ratio"].includes(select.value) ? " ×" : " ms";
    legend.replaceChildren(...[...Array(7).keys()].map((step) => {
      const at = ends.low * (ends.high / ends.low) ** (step / 6);
      const one = h("span", {}, `${tickMs(+at.toPrecision(2))}${unit}`);
      Object.assign(one.style, { backgroundColor: colour(at, ends).back, color: colour(at, ends).ink });
      return one;
    }));
    map?.draw((row, at) => value(row, at), ends);
  }

  const map = places.length ? drawMap({ sources, destinations, place, say: (row, at) => inWords(row, at), link }) : null;
  const all = () => {
    const pairs = sources.flatMap((source, row) => destinations.map((destination, at) => ({ source, destination, row, at }))).filter((one) => one.source !== one.destination);
    const empty = { median: null, p_failed: null, quantiles: {} };
    const columns = predictionColumns(pairs.map(({ source, destination, row, at }) => ({ src_addr: source, dst_addr: destination, ...(answers[row][at] ?? empty) })));
    return [...columns.slice(0, 2), column("measured", pairs.map(({ row, at }) => measured(row, at))), column("times", pairs.map(({ row, at }) => found.measurements[row][at])), ...columns.slice(2)];
  };
  const card = h("figure", { class: "card matrix-figure" }, h("figcaption", {}, h("h3", {}, `${plural(sources.length, "source")} to ${plural(destinations.length, "destination")}`), downloads("matrix", all)),
    h("p", { class: "note" }, "Measured values are medians. Framed cells were measured; hatched ones are extrapolated. Predictions are of the next measurement."),
    h("div", { class: "choice" }, h("label", { for: "shown" }, "Show"), select), legend, status, h("div", { class: "data heat-room", tabindex: "0", role: "region", "aria-label": "Matrix" }, table), progress);
  progress.textContent = "Predicting …";
  draw();
  return {
    elements: map ? [card, map.element] : [card],
    predicted(row, at, prediction) {
      answers[row][at] = prediction;
      if (at === destinations.length - 1 || row === sources.length - 1 || at === destinations.length - 2) draw();
    },
    done() {
      progress.textContent = "";
      draw();
    },
  };
}
