// What the charts of this page show, as specifications for chart.js, which the page shares with the run report. Each
// gives { spec, table }: a chart, and the same values as columns.

import { h } from "./dom.js";
import { column, downloads, tableOf } from "./tables.js";
import { count, interval, marked, ms, percent, plural, tickMs, time } from "./format.js";

const inMs = (value) => `${tickMs(value)} ms`;
const INTERVAL = ["0.1", "0.9"];

// A card with a title, a note, the chart, and buttons that show its table instead, or save it.
export function figure(title, name) {
  const note = h("p", { class: "note" });
  const plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}. Arrow keys read single values.` });
  const data = h("div", { class: "data", hidden: true, tabindex: "0", role: "region", "aria-label": `${title}: data` });
  const toggle = h("button", { type: "button", class: "plain small", "aria-pressed": "false", onclick: flip }, "Table");
  const buttons = h("span", { class: "downloads" }, toggle, downloads(name, () => current.table()));
  const element = h("figure", { class: `card ${name}-figure` }, h("figcaption", {}, h("h3", {}, title), buttons), note, plot, data);
  let current = null;
  let drawn = null;

  function flip() {
    plot.hidden = !plot.hidden;
    data.hidden = !plot.hidden;
    toggle.setAttribute("aria-pressed", String(plot.hidden));
    toggle.textContent = plot.hidden ? "Chart" : "Table";
    draw();
  }

  function draw() {
    if (plot.hidden) data.replaceChildren(tableOf(current.table()));
    else if (drawn) drawn.update(current.spec);
    else drawn = globalThis.chart(plot, current.spec);
  }

  return {
    element,
    show(shown, text = null) {
      current = shown;
      note.replaceChildren(...[text].flat().filter(Boolean));
      note.hidden = !text;
      draw();
    },
  };
}

// Densities of ln RTT, one for each prediction, drawn smooth; the 80 % interval of a single one is darker.
export function densityChart(...predictions) {
  const shown = predictions.map((prediction) => {
    const { edges, probability } = prediction.density;
    const x = probability.map((_, bin) => Math.sqrt(edges[bin] * edges[bin + 1]));
    const cumulative = [];
    probability.reduce((sum, share, bin) => (cumulative[bin] = sum + share), 0);
    const width = Math.log(edges[1] / edges[0]);
    const y = smooth(probability, 0.1 * Math.log(prediction.quantiles["0.9"] / prediction.quantiles["0.1"]) / width).map((share) => share / width);
    return { x, y, edges, probability, cumulative, range: visible(edges, probability, cumulative) };
  });
  const [first] = shown;
  const isAlone = shown.length === 1;
  const [low, high] = INTERVAL.map((level) => predictions[0].quantiles[level]);
  const range = [Math.min(...shown.map((one) => one.range[0])), Math.max(...shown.map((one) => one.range[1]))];
  return {
    spec: {
      x: { log: true, range, format: inMs },
      y: { range: [0, 1.06 * Math.max(...shown.flatMap((one) => one.y))], hidden: true },
      series: [
        ...shown.map(({ x, y }, index) => ({ kind: "area", colour: 1 + 2 * index, x, y: isAlone ? y : y.map((value, bin) => (x[bin] >= shown[index].range[0] && x[bin] <= shown[index].range[1] ? value : null)) })),
        isAlone && { kind: "area", x: first.x, y: first.y.map((value, bin) => (first.x[bin] >= low && first.x[bin] <= high ? value : null)) },
      ].filter(Boolean),
      marks: predictions.map((prediction, index) => [prediction.median, isAlone ? `median ${ms(prediction.median)}` : "AB"[index], isAlone ? 2 : 1 + 2 * index]).sort((a, b) => a[0] - b[0]),
      ...(isAlone ? { tip: (bin) => [`${ms(first.edges[bin])} to ${ms(first.edges[bin + 1])}`, `${percent(first.probability[bin])} of the answers`, `${percent(first.cumulative[bin])} are not longer`] } : { tip: () => ["A and B", ...predictions.map((one, index) => `${"AB"[index]}: median ${ms(one.median)}`)] }),
    },
    table: () => shown.flatMap(({ edges, probability, cumulative }, index) => [
      column(`${isAlone ? "" : `${"AB"[index]} `}from`, edges.slice(0, -1), ms), column("to", edges.slice(1), ms),
      column("probability", probability, percent), column("not longer", cumulative, percent)].map((one, at) => (isAlone || at === 0 ? one : { ...one, name: `${"AB"[index]} ${one.name}` }))),
  };
}

// Smoothed with a Gaussian of this many bins: the model's bins are finer than its predictions are certain.
function smooth(values, spread) {
  const reach = Math.min(Math.ceil(3 * spread), values.length);
  if (!(reach > 0)) return values;
  const bell = [...Array(2 * reach + 1).keys()].map((at) => Math.exp(-(((at - reach) / spread) ** 2) / 2));
  const whole = bell.reduce((sum, value) => sum + value);
  return values.map((_, bin) => bell.reduce((sum, weight, at) => sum + weight * (values[bin + at - reach] ?? 0), 0) / whole);
}

// The part of the axis where the density is visible; of a long tail only the beginning.
function visible(edges, probability, cumulative) {
  const [top, whole] = [Math.max(...probability), cumulative.at(-1)];
  const seen = [...probability.keys()].filter((bin) => probability[bin] > top / 200 && cumulative[bin] > 0.005 * whole && cumulative[bin] - probability[bin] < 0.975 * whole);
  const [low, high] = [edges[seen[0]], edges[seen.at(-1) + 1]];
  const room = Math.exp(Math.max(Math.log(high / low) * 0.25, 0.06));
  return [Math.max(edges[0], low / room), Math.min(edges.at(-1), high * room)];
}

// The measurements of a pair, and beside them the prediction of the next one.
export function historyChart(measured, prediction) {
  const { rtt, event_time: times } = measured;
  const hasTimes = times.every((seconds) => seconds !== null);
  const when = hasTimes ? times : rtt.map((_, index) => index + 1);
  const span = when.at(-1) - when[0] || 1;
  const x = [...when, when.at(-1) + 0.06 * span, when.at(-1) + 0.11 * span];
  const [low, high] = shownRtts(rtt, ["0.05", "0.95"].map((level) => prediction.quantiles[level]));
  const edge = high ** 0.985 * low ** 0.015; // for timeouts, and for outliers beyond the chart
  const predicted = (level) => [...when.map(() => null), prediction.quantiles[level], prediction.quantiles[level]];
  const points = (value) => [...rtt.map(value), null, null];
  return {
    spec: {
      x: { time: hasTimes, range: [when[0] - 0.01 * span, x.at(-1) + 0.01 * span], ...(!hasTimes && { format: count }) },
      y: { log: true, range: [low, high], format: inMs },
      series: [
        { kind: "line", colour: 2, x, y: predicted("0.5") },
        ...["0.75", "0.25", "0.95", "0.05"].map((level) => ({ kind: "faint", x, y: predicted(level) })),
        { kind: "points", size: 5, x, y: points((one) => (one > 0 ? Math.min(one, edge) : null)) },
        { kind: "points", size: 7, colour: "--bad", x, y: points((one) => (one === null ? edge : null)) },
      ],
      bands: [{ upper: 1, lower: 2 }, { upper: 3, lower: 4 }],
      marks: [[when.at(-1) + 0.03 * span]],
      nearest: "point",
      tip: (index) => index < rtt.length
        ? [ms(rtt[index]), hasTimes ? time(times[index]) : `measurement ${index + 1}`]
        : [`predicted ${ms(prediction.median)}`, `80 % interval ${interval(prediction.quantiles)}`, `timeout: ${percent(prediction.p_failed)}`],
    },
    table: () => [column("time", times.map((seconds) => time(seconds))), column("RTT", rtt, ms)],
  };
}

// The range of RTTs of a chart: a few outliers must not flatten everything else.
function shownRtts(rtt, others) {
  const sorted = rtt.filter((one) => one > 0).sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.98 * sorted.length)];
  const longest = sorted.at(-1) > 3 * usual ? 1.5 * usual : sorted.at(-1);
  const [low, high] = [Math.min(sorted[0] ?? Infinity, ...others), Math.max(longest ?? 0, ...others)];
  const room = Math.exp(Math.max(Math.log(high / low) * 0.1, 0.05));
  return [low / room, high * room];
}

// The prediction over the size of its context. `at` is the step that is shown elsewhere.
export function contextChart(steps, at) {
  const x = [...steps.keys()];
  const [low, high] = INTERVAL.map((level) => steps.slice(1).map((step) => step.quantiles[level])); // without context, they are too wide for the scale
  const medians = steps.map((step) => step.median);
  const [least, most] = [Math.min(...medians, ...low), Math.max(...medians, ...high)];
  const room = Math.exp(Math.max(Math.log(most / least) * 0.15, 0.08));
  return {
    spec: {
      x: { range: [-0.3, steps.length - 0.7], format: (step) => (steps[step] ? count(steps[step].size) : "") },
      y: { log: true, range: [least / room, most * room], format: inMs },
      series: [
        { kind: "dots", colour: 2, size: 10, x, y: medians.map((median, step) => (step === at ? median : null)) },
        { kind: "line", x, y: medians },
        ...["0.75", "0.25", "0.9", "0.1"].map((level) => ({ kind: "faint", x, y: steps.map((step) => step.quantiles[level]) })),
      ],
      bands: [{ upper: 2, lower: 3 }, { upper: 4, lower: 5 }],
      marks: [[at, "", 2]],
      tip: (step) => [`from ${plural(steps[step].size, "measurement")}`, `median ${ms(medians[step])}`, `80 % interval ${interval(steps[step].quantiles)}`, `timeout: ${percent(steps[step].p_failed)}`],
    },
    table: () => [column("measurements", steps.map((step) => step.size), count), ...["0.1", "0.5", "0.9"].map((level) => column(`${100 * level} %`, steps.map((step) => step.quantiles[level]), ms)), column("timeout", steps.map((step) => step.p_failed), percent)],
  };
}

// Anomaly scores over time; those above the threshold are marked.
export function anomalyChart(scored, threshold) {
  const rows = [...scored.bits.keys()].filter((row) => scored.bits[row] !== null);
  const hasTimes = scored.event_time.every((seconds) => seconds !== null);
  const x = rows.map((row, index) => (hasTimes ? scored.event_time[row] : index + 1));
  const bits = rows.map((row) => scored.bits[row]);
  const span = x.at(-1) - x[0] || 1;
  return {
    spec: {
      x: { time: hasTimes, range: [x[0] - 0.01 * span, x.at(-1) + 0.01 * span], ...(!hasTimes && { format: count }) },
      y: { range: [Math.min(0, ...bits), 1.05 * Math.max(1.2 * threshold, ...bits)], format: (value) => `${value} bits` },
      series: [
        { kind: "points", size: 9, colour: 2, x, y: bits.map((value) => (value >= threshold ? value : null)) },
        { kind: "points", size: 5, x, y: bits.map((value) => (value < threshold ? value : null)) },
      ],
      levels: [[threshold, ""]],
      nearest: "point",
      tip: (index) => [`${bits[index].toFixed(1)} bits`, `${scored.src_addr[rows[index]]} → ${scored.dst_addr[rows[index]]}`, ms(scored.rtt[rows[index]]), time(scored.event_time[rows[index]])].filter(Boolean),
    },
    table: () => scoreColumns(scored, rows),
  };
}

// Some of the scored measurements, with what was expected of each.
export function scoreColumns(scored, rows) {
  const of = (name) => rows.map((row) => scored[name][row]);
  const known = (name, value) => column(name, value, (one) => (one === null ? "–" : ms(one)));
  return [column("pair", rows.map((row) => `${scored.src_addr[row]} → ${scored.dst_addr[row]}`)), column("bits", of("bits"), (bits) => bits.toFixed(1)), column("RTT", of("rtt"), ms),
    known("expected", of("expected")), known("10 %", of("low")), known("90 %", of("high")), column("time", of("event_time"), time)];
}

// Pairs as a table with a bar in each row. `bar(one)` gives what to draw as [class, from, to], in shares of its width.
function barCard(title, name, note, first, heads, ticks, rows, { link, label, bar, cells, columns }) {
  const across = (element, from, to = from) => { // by the object model: the page forbids style attributes
    element.style.left = `${100 * from}%`;
    element.style.width = `${100 * (to - from)}%`;
    return element;
  };
  const axis = h("div", { class: "track" }, ticks.map(([at, text]) => across(h("span", { class: "tick" }, text), at)));
  const row = (one) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: link(one) }, label(one))),
    h("td", { class: "bar" }, h("div", { class: "track", "aria-hidden": "true" }, bar(one).map(([kind, from, to]) => across(h("span", { class: kind }), from, to)))),
    cells(one).map((cell, index) => h("td", { class: "number", "data-head": heads[index] }, cell)));
  return h("figure", { class: `card ${name}-figure` }, h("figcaption", {}, h("h3", {}, title), downloads(name, columns)), h("p", { class: "note" }, note),
    h("table", { class: "bars" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, first), h("th", { class: "bar" }, axis), heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map(row))));
}

export function predictionColumns(found) {
  const of = (get) => found.map(get);
  return [column("source", of((one) => one.src_addr)), column("destination", of((one) => one.dst_addr)), column("median", of((one) => one.median)),
    ...INTERVAL.map((level) => column(`${100 * level} %`, of((one) => one.quantiles[level]))), column("timeout", of((one) => one.p_failed)),
    column("measurements", of((one) => one.support?.pair_measurements)), column("extrapolated", of((one) => one.support?.extrapolating))];
}

// Pairs by predicted RTT, each with its 50 and 80 % intervals on one axis: from 0, or logarithmic where RTTs differ much.
export function rankCard(title, note, ranking, link, { name = "rank", first = "destination", label = (one) => one.dst_addr } = {}) {
  const [least, most] = [Math.min(...ranking.map((one) => one.quantiles["0.1"])), Math.max(...ranking.map((one) => one.quantiles["0.9"]))];
  const isLog = most > 30 * least;
  const [low, high] = [isLog ? least / 1.1 : 0, most * (isLog ? 1.1 : 1.04)];
  const at = (rtt) => (isLog ? Math.log(rtt / low) / Math.log(high / low) : rtt / high);
  const ticks = isLog ? globalThis.chart.logTicks(low, high, 5) : globalThis.chart.linearTicks(0, high, 5).filter((tick) => tick < 0.97 * high);
  const range = (one, from, to) => [at(one.quantiles[from]), at(one.quantiles[to])];
  return barCard(title, name, `${note} The scale ${isLog ? "is logarithmic" : "begins at 0"}.`, first, ["median", "80 % interval", "timeout"], ticks.map((tick) => [at(tick), inMs(tick)]), ranking, {
    link, label,
    bar: (one) => [["range", ...range(one, "0.1", "0.9")], ["range inner", ...range(one, "0.25", "0.75")], ["middle", at(one.median), at(one.median)]],
    cells: (one) => [marked(one), interval(one.quantiles), percent(one.p_failed)],
    columns: () => predictionColumns(ranking),
  });
}

// Destinations by how likely they are: a full bar is certain.
export function likelyCard(title, note, found, link) {
  return barCard(title, "find", `${note} A full bar is 100 %.`, "destination", ["probability", "predicted median", "timeout"], [], found, {
    link: (one) => link(one.dst_addr), label: (one) => one.dst_addr,
    bar: (one) => [["range whole", 0, 1], ["range inner", 0, one.probability]],
    cells: (one) => [percent(one.probability), one.median ? ms(one.median) : "–", Number.isFinite(one.p_failed) ? percent(one.p_failed) : "–"],
    columns: () => ["dst_addr", "probability", "median", "p_failed"].map((name) => column(name, found.map((one) => one[name]))),
  });
}
