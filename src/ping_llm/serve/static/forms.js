// What the forms of all views have in common.

import { h, field, notice } from "./dom.js";
import { combobox, isAddress } from "./combobox.js";
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
      fail(text === "" ? "An address is needed." : isAddress(text) ? "" : `“${text}” is not an IPv4 or IPv6 address.`);
      return text !== "" && isAddress(text) ? text : null;
    },
  };
}

// A form that asks: fields, the visitor's measurements, whether the server's count, and the button.
export function askingForm(info, button, fields, onsubmit) {
  const useRows = h("input", { type: "checkbox", id: "use-rows", checked: read().rows !== "0" });
  useRows.addEventListener("change", () => note({ rows: useRows.checked ? "" : "0" }));
  const also = info.rows && h("div", { class: "check" }, useRows, h("label", { for: "use-rows" }, "Use the server's measurements"));
  return h("form", { class: "card ask", novalidate: true, onsubmit: (event) => { event.preventDefault(); onsubmit(); toResults(); } },
    fields, measurementsPanel(() => read().src && onsubmit()), also, h("button", { type: "submit", class: "main" }, button));
}

// Where the form is above the results, they may be out of sight.
export function toResults() {
  const results = document.querySelector(".results");
  if (results && results.getBoundingClientRect().top > innerHeight * 0.6 && !document.querySelector("[aria-invalid=true]")) results.scrollIntoView({ block: "start" });
}

export const firstWrong = (...fields) => fields.find((one) => one.input.getAttribute("aria-invalid") === "true")?.input.focus();

// Where to begin, if there is no query yet.
export function beginning(info, title, explanation, link) {
  const pairs = info.rows ? info.rows.examples : [];
  return h("div", { class: "card empty" }, h("h2", {}, title), h("p", {}, explanation),
    pairs.length > 0 && [h("p", { class: "lead" }, "Pairs that were measured often:"),
      h("ul", { class: "chips" }, pairs.map(({ src_addr, dst_addr }) => h("li", {}, h("a", { href: link({ src: src_addr, dst: dst_addr }) }, src_addr, h("span", { class: "arrow" }, " → "), dst_addr))))],
    !pairs.length && !history() && [h("p", { class: "lead" }, "This server knows no measurements of its own. Paste some, or"),
      h("ul", { class: "chips" }, h("li", {}, h("a", { href: link({ src: SOURCE, dst: DESTINATION, example: "1" }) }, "try an example")))]);
}

// The other queries, for those who are here for the first time.
export function otherQuestions() {
  const others = [["find", "Who answers in 20 ms?", "Destinations for a round-trip time."], ["rank", "Which of them is nearest?", "Several destinations, in order."], ["anomalies", "What went wrong, and when?", "Results with high anomaly scores."]];
  return h("ul", { class: "others" }, others.map(([view, question, what]) => h("li", {}, h("a", { class: "card", href: `#${view}` }, h("strong", {}, question), h("span", {}, what)))));
}

export function failure(problem, again) {
  return notice("bad", h("p", {}, problem.message || String(problem)), again && h("button", { type: "button", onclick: again }, "Try again"));
}

export { address, go };
