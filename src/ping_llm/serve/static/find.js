// The inverse of a prediction: destinations that are likely to answer in about this time.

import { post } from "./api.js";
import { likelyCard } from "./charts.js";
import { field, h, loading } from "./dom.js";
import { count, ms, percent } from "./format.js";
import { address, addressField, beginning, failure, firstWrong, go, queryForm } from "./forms.js";
import { asObjects } from "./measurements.js";
import { read } from "./state.js";

export const addressesIn = (text) => (text || "").split(/[\s,;]+/).filter(Boolean);

export function findView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Destinations" });
  const source = addressField("Source (the probe)", { role: "source", value: state.src, info, placeholder: "address that measures" });
  const number = h("input", { type: "number", min: "0.01", max: "600000", step: "any", inputmode: "decimal", value: state.rtt || "20" });
  const rtt = field("RTT in ms", number);
  const some = h("textarea", { rows: 3, spellcheck: "false", placeholder: "one address per line" });
  some.value = addressesIn(state.among).join("\n");
  const among = field("Among (optional)", some, info.kind === "completer" ? "If empty: the most measured destinations." : "If empty: all addresses.");
  const form = queryForm(info, "Find destinations", [source.element, rtt, among], submit);

  function submit() {
    const src = source.check();
    rtt.fail(number.value > 0 && number.value <= 600000 ? "" : "Enter an RTT above 0.");
    if (!src || !(number.value > 0)) return firstWrong(source, { input: number });
    go({ ...read(), view: "find", src, rtt: number.value, among: addressesIn(some.value).join(" ") });
  }

  async function ask(src) {
    results.replaceChildren(loading(info.warm ? "Searching …" : "The model is warming up: the first answers take some seconds …"));
    try {
      const found = await post("destinations", { src_addr: src, rtt: +state.rtt, candidates: addressesIn(state.among), count: 12, history: asObjects(), use_rows: state.rows !== "0" });
      show(src, found);
    } catch (problem) {
      results.replaceChildren(failure(problem, () => ask(src)));
    }
  }

  function show(src, { destinations, among, candidates, covered }) {
    const note = among === "all addresses"
      ? `Probability of each among all addresses, given the RTT; the search covered ${percent(covered)} of it.`
      : info.kind === "completer" ? `The probability that the RTT is within 10 % of ${ms(+state.rtt)}, among ${count(candidates)} destinations.`
      : `Probability of each of ${count(candidates)} among all addresses, given the RTT.`;
    const link = (dst) => address({ ...read(), view: "predict", src, dst });
    results.replaceChildren(likelyCard(`Destinations at about ${ms(+state.rtt)} from ${src}`, `${note} Click an address for its prediction.`, destinations, link));
  }

  if (state.src && state.rtt) {
    if (source.check()) ask(state.src.trim());
  } else {
    results.replaceChildren(beginning(info, "Which destinations answer in about this time?",
      "Enter a source and a round-trip time: the model lists likely destinations.",
      ({ src, example }) => address({ view: "find", src, example, rtt: "20" })));
  }
  return h("div", { class: "view" }, form, results);
}
