// One pair: the predicted distribution, its history, and how the prediction changes with its context.

import { get, post } from "./api.js";
import { contextChart, densityChart, figure, historyChart, predictionColumns } from "./charts.js";
import { field, h, loading, notice } from "./dom.js";
import { count, interval, marked, ms, percent, plural, time } from "./format.js";
import { address, addressField, beginning, failure, firstWrong, go, inRange, otherViews, queryForm, rangeFields } from "./forms.js";
import { asObjects, history } from "./measurements.js";
import { read } from "./state.js";
import { column, downloads, tableCard } from "./tables.js";

const DENSITY_BINS = 320;
const CONTEXT_BINS = 400;

export function predictView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Prediction" });
  const source = addressField("Source (the probe)", { role: "source", value: state.src, info, placeholder: "address that measures" });
  const destination = addressField("Destination", { role: "destination", source: () => source.input.value, value: state.dst, info, placeholder: "address that is measured" });
  const when = h("input", { type: "text", placeholder: "after everything", value: state.time || "", maxlength: 40, autocomplete: "off" });
  const at = field("Time (optional)", when, "Such as 2025-03-03T12:00Z. Nothing later is used.");
  const range = rangeFields(state);
  const other = { src2: ["Source", state.src], dst2: ["Destination", state.dst], time2: ["Time", state.time || "after everything"] };
  const inputs = Object.fromEntries(Object.entries(other).map(([name, [, same]]) => [name, h("input", { type: "text", placeholder: same || "the same", value: state[name] || "", maxlength: 255, autocomplete: "off", spellcheck: "false" })]));
  const compare = h("details", { class: "own", open: isComparison(state) }, h("summary", {}, "Compare with another pair or time"), Object.entries(other).map(([name, [label]]) => field(`${label} of B`, inputs[name])), h("p", { class: "hint" }, "Empty fields are as above."));
  const shown = h("details", { class: "own", open: Boolean(state.from || state.until) }, h("summary", {}, "Time range of the chart"), range.element);
  const form = queryForm(info, "Predict", [source.element, destination.element, at, compare, shown], submit);
  let asking = new AbortController();

  function submit() {
    const [src, dst] = [source.check(), destination.check()];
    const limits = range.check();
    if (!src || !dst || !limits) return firstWrong(source, destination);
    go({ ...read(), view: "predict", src, dst, time: when.value.trim(), ...limits, ...Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim()])) });
  }

  async function ask(src, dst) {
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    const question = questionOf(src, dst, state.time);
    const questions = isComparison(state) ? [question, questionOf(state.src2 || src, state.dst2 || dst, state.time2 || state.time)] : [question];
    const shared = { history: asObjects(), use_rows: state.rows !== "0" };
    results.replaceChildren(loading(info.warm ? "Predicting …" : "The model is warming up: the first answers take some seconds …"));
    results.setAttribute("aria-busy", "true");
    try {
      const { predictions } = await post("predict", { questions, bins: DENSITY_BINS, ...shared }, signal);
      if (predictions.length > 1) return await showBoth(predictions, signal);
      const known = await measuredOf(src, dst, state, signal);
      show(predictions[0], known, post("context", { question, bins: CONTEXT_BINS, ...shared }, signal));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      results.replaceChildren(failure(problem, () => ask(src, dst)));
    }
    results.removeAttribute("aria-busy");
  }

  async function showBoth(predictions, signal) {
    const measured = await Promise.all(predictions.map((one) => measuredOf(one.src_addr, one.dst_addr, state, signal)));
    const density = figure("Predicted RTTs", "density");
    const series = measured.map((known, index) => known.rtt.length > 0 && figure(`Measured before: ${"AB"[index]}`, "series"));
    results.replaceChildren(comparison(predictions), density.element, ...series.map((one) => one && one.element).filter(Boolean));
    density.show(densityChart(...predictions), "The higher, the likelier. Lines are the medians.");
    series.forEach((one, index) => one && one.show(historyChart(measured[index], predictions[index]), historyNote(measured[index])));
    results.removeAttribute("aria-busy");
  }

  function show(prediction, known, growing) {
    const density = figure("Predicted RTT", "density");
    const series = known.rtt.length > 0 && figure("Measured before", "series");
    const context = h("div", { class: "context" }, h("div", { class: "card" }, loading("Predicting again with less context …")));
    results.replaceChildren(headline(prediction), restsOn(prediction.support), density.element,
      series ? series.element : neverMeasured(info, state, prediction), context);
    density.show(densityChart(prediction));
    series && series.show(historyChart(known, prediction), historyNote(known));
    growing.then((found) => context.replaceChildren(...contextPart(found, density, prediction, info)),
      (problem) => problem.name !== "AbortError" && context.replaceChildren(failure(problem)));
  }

  if (state.src && state.dst) {
    if (source.check() && destination.check()) ask(state.src.trim(), state.dst.trim());
    else results.replaceChildren(notice("bad", h("p", {}, "Source or destination is invalid: see the form.")));
  } else {
    results.replaceChildren(beginning(info, "How long would a ping take?",
      "Choose a source and a destination. The prediction is a distribution: how long a ping takes, how certain that is, and how likely a timeout is.",
      (pair) => address({ ...pair, view: "predict" })), otherViews());
  }
  return h("div", { class: "view" }, form, results);
}

const isComparison = (state) => Boolean(state.src2 || state.dst2 || state.time2);

const questionOf = (src, dst, time) => ({ src_addr: src, dst_addr: dst, ...(time ? { event_time: time } : {}) });

function historyNote(known) {
  return [
    known.total > known.rtt.length && `The latest ${count(known.rtt.length)} of ${count(known.total)}.`,
    known.rtt.includes(null) && "Red at the top: timeouts.",
    "On the right: the prediction, with its 50 and 90 % intervals.",
  ].filter(Boolean).join(" ");
}

// Two predictions, and the difference between them.
function comparison(predictions) {
  const name = (one) => `${one.src_addr} → ${one.dst_addr}${one.event_time === null ? "" : `, ${time(one.event_time)}`}`;
  const [a, b] = predictions.map((one) => one.median);
  const longer = a === b ? "Both medians are the same." : `The median of ${a > b ? "A" : "B"} is ${ms(Math.abs(a - b))} longer: ${(Math.max(a, b) / Math.min(a, b)).toFixed(2)} times that of ${a > b ? "B" : "A"}.`;
  const rows = predictions.map((one, index) => h("tr", {}, h("th", { scope: "row" }, h("i", { class: `key-${"ab"[index]}` }), `${"AB"[index]}: ${name(one)}`), [marked(one), interval(one.quantiles), percent(one.p_failed)].map((cell) => h("td", { class: "number" }, cell))));
  return h("div", { class: "card compared" }, h("div", { class: "caption" }, h("h3", {}, "A and B"), downloads("comparison", () => [column("name", ["A", "B"]), ...predictionColumns(predictions)])), h("p", { class: "note" }, longer),
    h("div", { class: "data" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "median", "80 % interval", "timeout"].map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, rows))),
    predictions.map((one, index) => one.support?.extrapolating && h("p", { class: "support guess" }, h("strong", {}, `${"AB"[index]} is extrapolated: ${one.support.reason}.`))));
}

function headline(prediction) {
  const { quantiles, median, p_failed } = prediction;
  const figures = [
    ["Median RTT", ms(median), "half of the answers are faster"],
    ["80 % interval", interval(quantiles), "1 answer in 10 is faster, 1 in 10 is slower"],
    ["Timeout", percent(p_failed), "probability that no answer comes"],
  ];
  return h("dl", { class: "headline" }, figures.map(([name, value, meaning]) =>
    h("div", { class: "card" }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("small", {}, meaning)))));
}

// The measurements that a prediction of the completer is based on, and whether it is extrapolated.
function restsOn(support) {
  if (!support) return "";
  const { pair_measurements, src_measurements, dst_measurements, chain, extrapolating, reason } = support;
  const known = `Known: ${plural(pair_measurements, "measurement")} of this pair, ${count(src_measurements)} of the source, ${count(dst_measurements)} of the destination.`;
  const guess = extrapolating && h("strong", {}, `Extrapolated: ${reason}. `);
  return h("p", { class: `support ${extrapolating ? "guess" : ""}` }, guess, known, chain > 1 && ` The shortest chain of measurements between the two has ${chain} hops.`);
}

function neverMeasured(info, state, prediction) {
  if (state.from || state.until) return h("div", { class: "card empty small" }, h("h3", {}, "Measured before"), h("p", {}, "Nothing in this time range."));
  const what = info.kind === "completer" ? "The prediction comes from other pairs." : "The prediction comes from what else the source measured.";
  if (prediction.support?.pair_measurements) return h("div", { class: "card empty small" }, h("h3", {}, "Measured before"), h("p", {}, "Only in the other direction."));
  return h("div", { class: "card empty small" }, h("h3", {}, "Measured before"), h("p", {}, `Never: this pair is not among the known measurements. ${info.rows || history() ? what : "Nothing else is known either: the prediction is the model's prior."}`));
}

// A slider over the number of measurements, which moves the density above.
function contextPart({ context, steps }, density, prediction, info) {
  const which = info.kind === "completer" ? "most informative" : "latest";
  const chart = figure("How the prediction changes as context is added", "context");
  if (steps.length < 2) {
    return [h("div", { class: "card empty small" }, h("h3", {}, "How the prediction changes as context is added"), h("p", {}, "No known measurement is informative about this pair, so there is no context to add."))];
  }
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Measurements in the context" });
  const status = h("output", {});
  const play = h("button", { type: "button", class: "play", "aria-label": "Play", onclick: start }, "▶");
  let timer = 0;
  let at = steps.length - 1; // what the distribution above shows

  function set(index) {
    slider.value = index;
    const step = steps[index];
    slider.setAttribute("aria-valuetext", `${plural(step.size, "measurement")}, median ${ms(step.median)}`);
    const of = step.size ? (step.size === 1 ? `the ${which} measurement` : `the ${count(step.size)} ${which} measurements`) : "no measurement at all";
    status.replaceChildren(h("span", {}, `From ${of}: `), h("strong", {}, ms(step.median)), h("span", {}, `, timeout: ${percent(step.p_failed)}`));
    chart.show(contextChart(steps, index), "Over the number of measurements in the context; bands are 50 and 80 % intervals. The slider also moves the distribution above.");
    const isLast = index === steps.length - 1;
    if (index !== at) density.show(densityChart(isLast ? prediction : step), isLast ? null : `From ${of}.`);
    at = index;
  }

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶";
    play.setAttribute("aria-label", "Play");
  }

  function start() {
    if (timer) return stop();
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "Stop");
    let step = +slider.value === steps.length - 1 ? 0 : +slider.value;
    set(step);
    timer = setInterval(() => {
      if (step + 1 >= steps.length || !slider.isConnected) return stop();
      set(++step);
    }, 700);
  }

  slider.addEventListener("input", () => { stop(); set(+slider.value); });
  chart.element.append(h("div", { class: "slider" }, play, slider), status);
  requestAnimationFrame(() => set(steps.length - 1));
  return [chart.element, contextTable(context, which)];
}

function contextTable(context, which) {
  return tableCard(`The context of the prediction: ${plural(context.rtt.length, "measurement")}`, "context-table", `The ${which} first.`, [
    column("source", context.src_addr), column("destination", context.dst_addr), column("RTT", context.rtt, ms), column("time", context.event_time, time)]);
}

export const asIso = (text) => (text ? new Date(text).toISOString() : "");

async function measuredOf(src, dst, state, signal) {
  const parts = [];
  if (state.rows !== "0") parts.push(await get("history", { src_addr: src, dst_addr: dst, count: 800, begin: asIso(state.from), end: asIso(state.until) }, signal));
  const own = history();
  if (own) {
    const rows = inRange(own, state).filter((row) => own.src_addr[row] === src && own.dst_addr[row] === dst);
    parts.push({ ...Object.fromEntries(["rtt", "event_time"].map((name) => [name, rows.map((row) => own[name][row])])), total: rows.length });
  }
  const joined = { rtt: parts.flatMap((part) => part.rtt), event_time: parts.flatMap((part) => part.event_time), total: parts.reduce((sum, part) => sum + part.total, 0) };
  const order = joined.rtt.map((_, row) => row).sort((a, b) => joined.event_time[a] - joined.event_time[b] || a - b);
  return { rtt: order.map((row) => joined.rtt[row]), event_time: order.map((row) => joined.event_time[row]), total: joined.total };
}
