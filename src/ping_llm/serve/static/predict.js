// One pair: the predicted distribution, what was measured, and how the answer grows out of what is known.

import { get, post } from "./api.js";
import { contextChart, densityChart, seriesChart } from "./charts.js";
import { field, h, loading, notice } from "./dom.js";
import { figure } from "./figure.js";
import { count, ms, percent, plural } from "./format.js";
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
    const density = figure("Predicted RTT", { name: "density-figure" });
    const series = known.rtt.length > 0 && figure("Measured before", { nearest: "both", name: "series-figure" });
    const context = h("div", { class: "context" }, h("div", { class: "card" }, loading("Asking again with fewer measurements …")));
    results.replaceChildren(headline(prediction), density.element,
      series ? series.element : neverMeasured(info), context);
    density.show(densityChart(prediction));
    series && series.show({ ...seriesChart(known, prediction), note: known.total > known.rtt.length ? `The latest ${count(known.rtt.length)} of ${count(known.total)}.` : null });
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
    ["8 of 10 between", `${ms(quantiles["0.1"]).replace(/ ms$/, "")} – ${ms(quantiles["0.9"])}`, "and one in ten on either side"],
    ["P(failed)", percent(p_failed), "no answer comes"],
  ];
  return h("dl", { class: "headline" }, figures.map(([name, value, meaning]) =>
    h("div", { class: "card" }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("small", {}, meaning)))));
}

function neverMeasured(info) {
  const what = info.kind === "completer" ? "The answer is drawn from measurements of others." : "The answer is drawn from what else the source measured.";
  return h("div", { class: "card empty small" }, h("h3", {}, "Measured before"), h("p", {}, `Never: this pair is not among the measurements that are known. ${info.rows || history() ? what : "Nothing else is known either: this is what the model takes for usual."}`));
}

// A slider over the number of measurements, which moves the density above.
function contextPart({ context, steps }, density, prediction, info) {
  const which = info.kind === "completer" ? "most telling" : "latest";
  const chart = figure("How the prediction moves as context is added", { name: "context-figure" });
  if (steps.length < 2) {
    return [h("div", { class: "card empty small" }, h("h3", {}, "How the prediction moves as context is added"), h("p", {}, "Nothing is known that bears on this pair, so there is nothing to add."))];
  }
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Measurements looked at" });
  const said = h("output", {});
  const play = h("button", { type: "button", class: "play", "aria-label": "Play", onclick: start }, "▶");
  let timer = 0;

  function set(place) {
    slider.value = place;
    const step = steps[place];
    slider.setAttribute("aria-valuetext", `${plural(step.size, "measurement")}, median ${ms(step.median)}`);
    const of = step.size ? (step.size === 1 ? `the ${which} measurement` : `the ${count(step.size)} ${which} measurements`) : "no measurement at all";
    said.replaceChildren(h("span", {}, `From ${of}: `), h("strong", {}, ms(step.median)), h("span", {}, `, P(failed) ${percent(step.p_failed)}`));
    chart.show({ ...contextChart(steps, place), note: "Bands hold 50 and 80 % of the answers. The slider also moves the distribution above." });
    const isLast = place === steps.length - 1;
    density.show(isLast ? densityChart(prediction) : { ...densityChart(step), note: `From ${of}.` });
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
    let place = +slider.value === steps.length - 1 ? 0 : +slider.value;
    set(place);
    timer = setInterval(() => {
      if (place + 1 >= steps.length || !slider.isConnected) return stop();
      set(++place);
    }, 700);
  }

  slider.addEventListener("input", () => { stop(); set(+slider.value); });
  chart.element.append(h("div", { class: "slider" }, play, slider), said);
  requestAnimationFrame(() => set(steps.length - 1));
  return [chart.element, contextTable(context, which)];
}

function contextTable(context, which) {
  const rows = context.rtt.slice(0, 12).map((rtt, place) => h("tr", {}, h("td", { class: "number" }, String(place + 1)), h("td", {}, context.src_addr[place]), h("td", {}, context.dst_addr[place]), h("td", { class: "number" }, ms(rtt))));
  return h("details", { class: "card looked" }, h("summary", {}, `What the answer is drawn from: ${plural(context.rtt.length, "measurement")}`),
    h("div", { class: "data", tabindex: "0", role: "region", "aria-label": "Measurements looked at" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "source", "destination", "RTT"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
    context.rtt.length > 12 && h("p", { class: "note" }, `… and ${count(context.rtt.length - 12)} more, the ${which} first.`));
}

async function measuredOf(src, dst, state, signal) {
  const parts = [];
  if (state.rows !== "0") parts.push(await get("history", { src_addr: src, dst_addr: dst, count: 800 }, signal));
  const own = history();
  if (own) {
    const places = own.rtt.map((_, place) => place).filter((place) => own.src_addr[place] === src && own.dst_addr[place] === dst);
    parts.push({ ...Object.fromEntries(["rtt", "event_time"].map((name) => [name, places.map((place) => own[name][place])])), total: places.length });
  }
  const joined = { rtt: parts.flatMap((part) => part.rtt), event_time: parts.flatMap((part) => part.event_time), total: parts.reduce((sum, part) => sum + part.total, 0) };
  const order = joined.rtt.map((_, place) => place).sort((a, b) => joined.event_time[a] - joined.event_time[b] || a - b);
  return { rtt: order.map((place) => joined.rtt[place]), event_time: order.map((place) => joined.event_time[place]), total: joined.total };
}
