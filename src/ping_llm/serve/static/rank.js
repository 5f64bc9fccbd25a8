// Several destinations of one source, ordered by predicted RTT.

import { get, post } from "./api.js";
import { rankCard } from "./charts.js";
import { field, h, loading } from "./dom.js";
import { isNode } from "./combobox.js";
import { plural } from "./format.js";
import { address, addressField, beginning, failure, firstWrong, go, queryForm } from "./forms.js";
import { addressesIn } from "./find.js";
import { asObjects, history } from "./measurements.js";
import { read } from "./state.js";

export function rankView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Ranking" });
  const source = addressField("Source (the probe)", { role: "source", value: state.src, info, placeholder: "address that measures" });
  const some = h("textarea", { rows: 6, spellcheck: "false", placeholder: "one address per line" });
  some.value = addressesIn(state.among).join("\n");
  const among = field("Destinations", some, `At most ${info.limits.questions}.`);
  const fill = h("button", { type: "button", class: "small", onclick: fillIn }, "Fill in the most measured");
  const form = queryForm(info, "Rank", [source.element, among, (info.rows || history()) && fill], submit);

  async function fillIn() {
    const src = source.check();
    if (!src) return firstWrong(source);
    try {
      some.value = (await suggested(src)).join("\n");
    } catch (problem) {
      among.fail(problem.message);
    }
  }

  function submit() {
    const src = source.check();
    const destinations = addressesIn(some.value);
    const wrong = destinations.find((text) => !isNode(text));
    among.fail(!destinations.length ? "At least one address is needed." : wrong ? `“${wrong}” is neither an address nor a name.` : "");
    if (!src || !destinations.length || wrong) return firstWrong(source, { input: some });
    go({ ...read(), view: "rank", src, among: destinations.join(" ") });
  }

  async function ask(src, destinations) {
    results.replaceChildren(loading(info.warm ? "Ranking …" : "The model is warming up: the first answers take some seconds …"));
    try {
      const { ranking } = await post("rank", { src_addr: src, dst_addrs: destinations, history: asObjects(), use_rows: state.rows !== "0" });
      const link = (one) => address({ ...read(), view: "predict", src, dst: one.dst_addr });
      results.replaceChildren(rankCard(`${plural(ranking.length, "destination")} of ${src}`, "By predicted median, shortest first. Bars are 80 % intervals, thick ones 50 %. Click an address for its prediction; “?” marks extrapolated ones.", ranking, link));
    } catch (problem) {
      results.replaceChildren(failure(problem, () => ask(src, destinations)));
    }
  }

  if (state.src && source.check()) {
    const destinations = addressesIn(state.among);
    if (destinations.length) ask(state.src.trim(), destinations);
    else fillIn().then(() => some.value ? submit() : results.replaceChildren(empty()));
  } else {
    results.replaceChildren(empty());
  }

  function empty() {
    return beginning(info, "Which destination is nearest?", "Enter a source and several destinations: they are ordered by predicted round-trip time.",
      ({ src, example }) => address({ view: "rank", src, example }));
  }
  return h("div", { class: "view" }, form, results);
}

// The most measured destinations: of the visitor's measurements, then of the server's.
async function suggested(src) {
  const own = history();
  const isIpv6 = src.includes(":");
  const found = own ? [...new Set([...own.dst_addr, ...own.src_addr])].filter((text) => text !== src && text.includes(":") === isIpv6) : [];
  const { addresses } = await get("addresses", { role: "destination", source: src, count: 12 });
  return [...new Set([...found, ...addresses.map((one) => one.address)])].filter((text) => text !== src).slice(0, 12);
}
