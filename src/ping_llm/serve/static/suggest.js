// What to measure next: the pairs whose measurement would say most.

import { post } from "./api.js";
import { rankCard } from "./charts.js";
import { field, h, loading } from "./dom.js";
import { plural } from "./format.js";
import { address, askingForm, failure, go } from "./forms.js";
import { asObjects, history } from "./measurements.js";
import { read } from "./state.js";

export function suggestView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Suggestions" });
  const number = h("input", { type: "number", min: 1, max: 500, inputmode: "numeric", value: state.budget || 20 });
  const budget = field("Measurements that you can make", number);
  const form = askingForm(info, "Suggest pairs", [budget], submit);

  function submit() {
    const isGood = number.value >= 1 && number.value <= 500;
    budget.fail(isGood ? "" : "A number from 1 to 500.");
    if (isGood) go({ ...read(), view: "suggest", budget: Math.round(number.value) });
  }

  async function ask() {
    results.replaceChildren(loading("Weighing all pairs that were never measured …"));
    try {
      const { suggestions, complete } = await post("suggest", { budget: +state.budget, history: asObjects(), use_rows: state.rows !== "0" });
      if (!suggestions.length) return results.replaceChildren(h("div", { class: "card empty" }, h("p", {}, "Every pair of a known source and destination was measured already.")));
      const note = `The most valuable first: wide intervals, spread over the nodes, and links between parts that nothing links yet.${complete ? "" : " There was time for a part of all pairs only."}`;
      results.replaceChildren(rankCard(`Measure ${plural(suggestions.length, "pair")} next`, note, suggestions, ({ src_addr, dst_addr }) => address({ ...read(), view: "predict", src: src_addr, dst: dst_addr }),
        { name: "suggest", first: "pair", label: (one) => `${one.src_addr} → ${one.dst_addr}` }));
    } catch (problem) {
      results.replaceChildren(failure(problem, ask));
    }
  }

  if (state.budget && (info.rows || history())) ask();
  else results.replaceChildren(h("div", { class: "card empty" }, h("h2", {}, "What should be measured next?"), h("p", {}, "Say how many measurements you can make. The answer names the pairs whose measurement would say most about all others."),
    !info.rows && !history() && h("ul", { class: "chips" }, h("li", {}, h("a", { href: address({ view: "suggest", example: "1", budget: 5 }) }, "try an example")))));
  return h("div", { class: "view" }, form, results);
}
