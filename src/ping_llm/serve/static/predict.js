// One pair: the predicted distribution, its history, and how the prediction changes with its context.

import { get, post } from "./api.js";
import { contextChart, densityChart, figure, historyChart } from "./charts.js";
import { field, h, loading, notice } from "./dom.js";
import { count, interval, ms, percent, plural } from "./format.js";
import { address, addressField, askingForm, beginning, failure, firstWrong, go, otherQuestions } from "./forms.js";
import { asObjects, history } from "./measurements.js";
import { read } from "./state.js";

const DENSITY_BINS = 320;
const CONTEXT_BINS = 400;

export function predictView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Prediction" });
  const source = addressField("Source (the probe)", { role: "source", value: state.src, info, placeholder: "address that measures" });
  const destination = addressField("Destination", { role: "destination", source: () => source.input.value, value: state.dst, info, placeholder: "address that is measured" });
  const when = h("input", { type: "text", placeholder: "after everything", value: state.time || "", maxlength: 40, autocomplete: "off" });
  const time = field("Time (optional)", when, "Such as 2025-03-03T12:00Z. Nothing later is used.");
  const form = askingForm(info, "Predict", [source.element, destination.element, time], submit);
  let asking = new AbortController();

  function submit() {
    const [src, dst] = [source.check(), destination.check()];
    if (!src || !dst) return firstWrong(source, destination);
    go({ ...read(), view: "predict", src, dst, time: when.value.trim() });
  }

  async function ask(src, dst) {
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    const question = { src_addr: src, dst_addr: dst, ...(state.time ? { event_time: state.time } : {}) };
    const shared = { history: asObjects(), use_rows: state.rows !== "0" };
    results.replaceChildren(loading(info.warm ? "Predicting …" : "The model is being prepared: first answers take some seconds …"));
    results.setAttribute("aria-busy", "true");
    try {
      const { predictions } = await post("predict", { questions: [question], bins: DENSITY_BINS, ...shared }, signal);
      const known = await measuredOf(src, dst, state, signal);
      show(predictions[0], known, post("context", { question, bins: CONTEXT_BINS, ...shared }, signal));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      results.replaceChildren(failure(problem, () => ask(src, dst)));
    }
    results.removeAttribute("aria-busy");
  }

  function show(prediction, known, growing) {
    const density = figure("Predicted RTT", "density-figure");
    const series = known.rtt.length > 0 && figure("Measured before", "series-figure");
    const context = h("div", { class: "context" }, h("div", { class: "card" }, loading("Predicting again with less context …")));
    results.replaceChildren(headline(prediction), restsOn(prediction.support), density.element,
      series ? series.element : neverMeasured(info), context);
    density.show(densityChart(prediction));
    const notes = [
      known.total > known.rtt.length && `The latest ${count(known.rtt.length)} of ${count(known.total)}.`,
      known.rtt.includes(null) && "Red at the top: no answer came.",
      "On the right: the prediction, with its 50 and 90 % intervals.",
    ];
    series && series.show(historyChart(known, prediction), notes.filter(Boolean).join(" "));
    growing.then((found) => context.replaceChildren(...contextPart(found, density, prediction, info)),
      (problem) => problem.name !== "AbortError" && context.replaceChildren(failure(problem)));
  }

  if (state.src && state.dst) {
    if (source.check() && destination.check()) ask(state.src.trim(), state.dst.trim());
    else results.replaceChildren(notice("bad", h("p", {}, "These are not two addresses: see the form.")));
  } else {
    results.replaceChildren(beginning(info, "How long would a ping take?",
      "Choose who measures and who is measured. The answer is a distribution: how long it takes, how sure that is, and how likely no answer comes at all.",
      (pair) => address({ ...pair, view: "predict" })), otherQuestions());
  }
  return h("div", { class: "view" }, form, results);
}

function headline(prediction) {
  const { quantiles, median, p_failed } = prediction;
  const figures = [
    ["Median RTT", ms(median), "half of the answers are shorter"],
    ["80 % interval", interval(quantiles), "10 % are shorter, 10 % are longer"],
    ["No answer", percent(p_failed), "probability of a timeout"],
  ];
  return h("dl", { class: "headline" }, figures.map(([name, value, meaning]) =>
    h("div", { class: "card" }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("small", {}, meaning)))));
}

// What the answer of a completer was computed from, and whether that is too little.
function restsOn(support) {
  if (!support) return "";
  const { pair_measurements, src_measurements, dst_measurements, chain, extrapolating, reason } = support;
  const known = `Known: ${plural(pair_measurements, "measurement")} of this pair, ${count(src_measurements)} of the source, ${count(dst_measurements)} of the destination.`;
  const guess = extrapolating && h("strong", {}, `This is a guess: ${reason}. `);
  return h("p", { class: `support ${extrapolating ? "guess" : ""}` }, guess, known, chain > 1 && ` The shortest chain of measurements between the two has ${chain} hops.`);
}

function neverMeasured(info) {
  const what = info.kind === "completer" ? "The prediction comes from other pairs." : "The prediction comes from what else the source measured.";
  return h("div", { class: "card empty small" }, h("h3", {}, "Measured before"), h("p", {}, `Never: this pair is not among the known measurements. ${info.rows || history() ? what : "Nothing else is known either: this is what the model takes for usual."}`));
}

// A slider over the number of measurements, which moves the density above.
function contextPart({ context, steps }, density, prediction, info) {
  const which = info.kind === "completer" ? "most informative" : "latest";
  const chart = figure("How the prediction changes as context is added", "context-figure");
  if (steps.length < 2) {
    return [h("div", { class: "card empty small" }, h("h3", {}, "How the prediction changes as context is added"), h("p", {}, "No known measurement bears on this pair, so there is nothing to add."))];
  }
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Measurements in the context" });
  const said = h("output", {});
  const play = h("button", { type: "button", class: "play", "aria-label": "Play", onclick: start }, "▶");
  let timer = 0;

  function set(index) {
    slider.value = index;
    const step = steps[index];
    slider.setAttribute("aria-valuetext", `${plural(step.size, "measurement")}, median ${ms(step.median)}`);
    const of = step.size ? (step.size === 1 ? `the ${which} measurement` : `the ${count(step.size)} ${which} measurements`) : "no measurement at all";
    said.replaceChildren(h("span", {}, `From ${of}: `), h("strong", {}, ms(step.median)), h("span", {}, `, no answer: ${percent(step.p_failed)}`));
    chart.show(contextChart(steps, index), "Over the number of measurements in the context; bands are 50 and 80 % intervals. The slider also moves the distribution above.");
    const isLast = index === steps.length - 1;
    density.show(densityChart(isLast ? prediction : step), isLast ? null : `From ${of}.`);
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
  chart.element.append(h("div", { class: "slider" }, play, slider), said);
  requestAnimationFrame(() => set(steps.length - 1));
  return [chart.element, contextTable(context, which)];
}

function contextTable(context, which) {
  const rows = context.rtt.slice(0, 12).map((rtt, row) => h("tr", {}, h("td", { class: "number" }, String(row + 1)), h("td", {}, context.src_addr[row]), h("td", {}, context.dst_addr[row]), h("td", { class: "number" }, ms(rtt))));
  return h("details", { class: "card looked" }, h("summary", {}, `The context of the prediction: ${plural(context.rtt.length, "measurement")}`),
    h("div", { class: "data", tabindex: "0", role: "region", "aria-label": "Measurements in the context" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "source", "destination", "RTT"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
    context.rtt.length > 12 && h("p", { class: "note" }, `… and ${count(context.rtt.length - 12)} more, the ${which} first.`));
}

async function measuredOf(src, dst, state, signal) {
  const parts = [];
  if (state.rows !== "0") parts.push(await get("history", { src_addr: src, dst_addr: dst, count: 800 }, signal));
  const own = history();
  if (own) {
    const rows = own.rtt.map((_, row) => row).filter((row) => own.src_addr[row] === src && own.dst_addr[row] === dst);
    parts.push({ ...Object.fromEntries(["rtt", "event_time"].map((name) => [name, rows.map((row) => own[name][row])])), total: rows.length });
  }
  const joined = { rtt: parts.flatMap((part) => part.rtt), event_time: parts.flatMap((part) => part.event_time), total: parts.reduce((sum, part) => sum + part.total, 0) };
  const order = joined.rtt.map((_, row) => row).sort((a, b) => joined.event_time[a] - joined.event_time[b] || a - b);
  return { rtt: order.map((row) => joined.rtt[row]), event_time: order.map((row) => joined.event_time[row]), total: joined.total };
}
