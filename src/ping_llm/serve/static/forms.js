// What the forms of all views have in common.

import { h, field, notice } from "./dom.js";
import { combobox, isNode } from "./combobox.js";
import { DESTINATION, SOURCE } from "./example.js";
import { history, measurementsPanel } from "./measurements.js";
import { address, go, note, read } from "./state.js";

export function addressField(label, { role, source, value = "", info, placeholder }) {
  const box = combobox({ role, source, enabled: Boolean(info.rows), placeholder });
  box.input.value = value;
  const element = field(label, box.element);
  element.querySelector("label").htmlFor = box.input.id ||= `${box.element.id}-input`;
  const fail = (message) => {
    element.querySelector(".field-error").textContent = message;
    box.input.setAttribute("aria-invalid", String(Boolean(message)));
  };
  return {
    element,
    input: box.input,
    fail,
    check() {
      const text = box.input.value.trim();
      fail(text === "" ? "An address or a name is needed." : isNode(text) ? "" : `“${text}” is neither an address nor a name.`);
      return isNode(text) ? text : null;
    },
  };
}

// A time range: measurements outside it are not shown.
export function rangeFields(state) {
  const input = (value) => h("input", { type: "text", placeholder: "2025-03-03T12:00Z", value: value || "", maxlength: 40, autocomplete: "off" });
  const [from, until] = [input(state.from), input(state.until)];
  const [first, last] = [field("Measured from (optional)", from), field("Until (optional)", until)];
  const isTime = (text) => text === "" || !Number.isNaN(Date.parse(text));
  return {
    element: h("div", { class: "range-fields" }, first, last),
    check() {
      const [begin, end] = [from.value.trim(), until.value.trim()];
      for (const [one, text] of [[first, begin], [last, end]]) one.fail(isTime(text) ? "" : "Write a time such as 2025-03-03 or 2025-03-03T12:00Z.");
      return isTime(begin) && isTime(end) ? { from: begin, until: end } : null;
    },
  };
}

// The rows of the visitor's own measurements that lie in this range.
export function inRange(columns, state) {
  const [begin, end] = [state.from, state.until].map((text) => (text ? Date.parse(text) / 1000 : NaN));
  return columns.rtt.map((_, row) => row).filter((row) => !(columns.event_time[row] < begin) && !(columns.event_time[row] > end));
}

// The form of a view: its fields, the visitor's measurements, whether to use the server's too, and the button.
export function queryForm(info, button, fields, onsubmit) {
  const useRows = h("input", { type: "checkbox", id: "use-rows", checked: read().rows !== "0" });
  useRows.addEventListener("change", () => note({ rows: useRows.checked ? "" : "0" }));
  const also = info.rows && h("div", { class: "check" }, useRows, h("label", { for: "use-rows" }, "Use the server's measurements"));
  return h("form", { class: "card ask", novalidate: true, onsubmit: (event) => { event.preventDefault(); onsubmit(); clearIfWrong(); toResults(); } },
    fields, measurementsPanel(() => read().src && onsubmit()), also, h("button", { type: "submit", class: "main" }, button));
}

// Old results must not stand beside a form with errors.
export function clearIfWrong() {
  if (document.querySelector(".ask [aria-invalid=true]")) document.querySelector(".results")?.replaceChildren(notice("bad", h("p", {}, "Something is missing or wrong: see the form.")));
}

// Where the form is above the results, these may be out of sight.
export function toResults() {
  const results = document.querySelector(".results");
  if (results && results.getBoundingClientRect().top > innerHeight * 0.6 && !document.querySelector("[aria-invalid=true]")) results.scrollIntoView({ block: "start" });
}

export const firstWrong = (...fields) => fields.find((one) => one.input.getAttribute("aria-invalid") === "true")?.input.focus();

// What a view shows before the first query: examples to click.
export function beginning(info, title, explanation, link) {
  const pairs = info.rows ? info.rows.examples : [];
  return h("div", { class: "card empty" }, h("h2", {}, title), h("p", {}, explanation),
    pairs.length > 0 && [h("p", { class: "lead" }, "Pairs that were measured often:"),
      h("ul", { class: "chips" }, pairs.map(({ src_addr, dst_addr }) => h("li", {}, h("a", { href: link({ src: src_addr, dst: dst_addr }) }, src_addr, h("span", { class: "arrow" }, " → "), dst_addr))))],
    !pairs.length && !history() && [h("p", { class: "lead" }, "This server has no measurements of its own. Paste some, or"),
      h("ul", { class: "chips" }, h("li", {}, h("a", { href: link({ src: SOURCE, dst: DESTINATION, example: "1" }) }, "try an example")))]);
}

// Links to the other views, for first-time visitors.
export function otherViews() {
  const others = [["find", "Which destinations answer in 20 ms?", "Destinations for a round-trip time."], ["rank", "Which destination is nearest?", "Several destinations, in order."], ["matrix", "How far apart are all nodes?", "All pairs at once, measured and predicted."], ["anomalies", "What went wrong, and when?", "Results with high anomaly scores."], ["suggest", "What should be measured next?", "The most informative pairs."]];
  return h("ul", { class: "others" }, others.map(([view, question, what]) => h("li", {}, h("a", { class: "card", href: `#${view}` }, h("strong", {}, question), h("span", {}, what)))));
}

export function failure(problem, again) {
  return notice("bad", h("p", {}, problem.message || String(problem)), again && h("button", { type: "button", onclick: again }, "Try again"));
}

export { address, go };
