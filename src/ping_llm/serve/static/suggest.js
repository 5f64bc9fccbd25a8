// What to measure next: the most informative pairs.

import { post } from "./api.js";
import { rankCard } from "./charts.js";
import { field, h, loading } from "./dom.js";
import { plural } from "./format.js";
import { address, failure, go, queryForm } from "./forms.js";
import { asObjects, history } from "./measurements.js";
import { read } from "./state.js";

export function suggestView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Suggestions" });
  const number = h("input", { type: "number", min: 1, max: 500, inputmode: "numeric", value: state.budget || 20 });
  const budget = field("Measurements that you can make", number);
  const form = queryForm(info, "Suggest pairs", [budget], submit);

  function submit() {
    const isGood = number.value >= 1 && number.value <= 500;
    budget.fail(isGood ? "" : "A number from 1 to 500.");
    if (isGood) go({ ...read(), view: "suggest", budget: Math.round(number.value) });
  }

  async function ask() {
    results.replaceChildren(loading("Predicting all unmeasured pairs …"));
    try {
      const { suggestions, complete } = await post("suggest", { budget: +state.budget, history: asObjects(), use_rows: state.rows !== "0" });
      if (!suggestions.length) return results.replaceChildren(h("div", { class: "card empty" }, h("p", {}, "All pairs of known sources and destinations have been measured.")));
      const note = `Most informative first: pairs with wide intervals, spread over the nodes, and links between unconnected parts of the network.${complete ? "" : " There was time for only a part of the candidates."}`;
      results.replaceChildren(rankCard(`Measure ${plural(suggestions.length, "pair")} next`, note, suggestions, ({ src_addr, dst_addr }) => address({ ...read(), view: "predict", src: src_addr, dst: dst_addr }),
        { name: "suggest", first: "pair", label: (one) => `${one.src_addr} → ${one.dst_addr}` }));
    } catch (problem) {
      results.replaceChildren(failure(problem, ask));
    }
  }

  if (state.budget && (info.rows || history())) ask();
  else results.replaceChildren(h("div", { class: "card empty" }, h("h2", {}, "What should be measured next?"), h("p", {}, "Enter how many measurements you can make. The most informative pairs are suggested."),
    !info.rows && !history() && h("ul", { class: "chips" }, h("li", {}, h("a", { href: address({ view: "suggest", example: "1", budget: 5 }) }, "try an example")))));
  return h("div", { class: "view" }, form, results);
}
