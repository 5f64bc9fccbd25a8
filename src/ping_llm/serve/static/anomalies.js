// Measurements that the model did not expect: anomaly scores over time, and the highest of them.

import { send } from "./api.js";
import { anomalyChart, figure } from "./charts.js";
import { field, h, loading } from "./dom.js";
import { exampleText } from "./example.js";
import { count, ms, plural, time } from "./format.js";
import { address, failure, toResults } from "./forms.js";
import { read } from "./state.js";

const held = { name: "", bytes: null, found: null };

export function anomaliesView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Anomaly scores" });
  const file = h("input", { type: "file", accept: ".csv,.tsv,.json,.jsonl,.ndjson,.parquet" });
  const chosen = field("File of measurements", file, `CSV, Parquet, JSON lines or RIPE Atlas JSON, up to ${count(info.limits.history)} measurements. It is read and forgotten.`);
  const limit = h("input", { type: "number", min: 1, max: info.limits.scored, inputmode: "numeric", value: state.last || (info.kind === "completer" ? Math.min(100, info.limits.scored) : Math.min(2000, info.limits.scored)) });
  const last = field("Score the latest", limit, info.kind === "completer" ? "The completer takes about a tenth of a second for each." : "A language model reads thousands in seconds.");
  const form = h("form", { class: "card ask", novalidate: true, onsubmit: (event) => { event.preventDefault(); submit(); toResults(); } },
    chosen, last, h("button", { type: "submit", class: "main" }, "Score them"));

  async function submit() {
    chosen.fail("");
    if (file.files.length) {
      if (file.files[0].size > info.limits.body_bytes) return chosen.fail(`That file is larger than the ${count(info.limits.body_bytes / 1e6)} MB that this server takes.`);
      Object.assign(held, { name: file.files[0].name, bytes: await file.files[0].arrayBuffer() });
    }
    if (!held.bytes) return chosen.fail("Choose a file first.");
    ask();
  }

  async function ask() {
    results.replaceChildren(loading(`Scoring ${held.name} …`));
    results.setAttribute("aria-busy", "true");
    try {
      const latest = Math.max(1, Math.min(info.limits.scored, Math.round(+limit.value) || 1));
      held.found = await send(`anomalies/file?last=${latest}`, held.bytes);
      show();
    } catch (problem) {
      results.replaceChildren(failure(problem));
    }
    results.removeAttribute("aria-busy");
  }

  function show() {
    const found = held.found;
    const known = found.bits.map((bits, row) => [bits, row]).filter(([bits]) => bits !== null);
    const sorted = [...known].sort((a, b) => b[0] - a[0]);
    const usual = sorted[Math.floor(sorted.length / 2)][0];
    const threshold = usual + 10;
    const chart = figure(`Anomaly scores of ${held.name}`, "anomalies-figure");
    const high = sorted.filter(([bits]) => bits >= threshold);
    const said = [
      `${plural(known.length, "measurement")} of ${count(found.total)} scored${found.complete ? "" : " before the time was up, the latest first"}.`,
      `The median score is ${usual.toFixed(1)} bits; ten more bits are a thousand times less likely, and are marked: ${count(high.length)}.`,
    ];
    results.replaceChildren(chart.element, worst(sorted.slice(0, 12), found, threshold));
    chart.show(anomalyChart(found, threshold), said.join(" "));
  }

  function worst(sorted, found, threshold) {
    const link = (row) => address({ view: "predict", src: found.src_addr[row], dst: found.dst_addr[row], example: read().example });
    const rows = sorted.map(([bits, row]) => h("tr", { class: bits >= threshold ? "high" : null },
      h("td", { class: "number" }, bits.toFixed(1)), h("td", { class: "number" }, ms(found.rtt[row])),
      h("td", {}, h("a", { href: link(row) }, found.src_addr[row], h("span", { class: "arrow" }, " → "), found.dst_addr[row])), h("td", {}, time(found.event_time[row]))));
    return h("div", { class: "card worst" }, h("h3", {}, "Highest scores"), h("div", { class: "data", tabindex: "0", role: "region", "aria-label": "Highest scores" },
      h("table", {}, h("thead", {}, h("tr", {}, ["bits", "RTT", "pair", "time"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))));
  }

  if (state.example && held.name !== "example") {
    Object.assign(held, { name: "example", bytes: new TextEncoder().encode(exampleText()), found: null });
    ask();
  } else if (held.found) {
    requestAnimationFrame(show);
  } else {
    results.replaceChildren(h("div", { class: "card empty" }, h("h2", {}, "What went wrong, and when?"),
      h("p", {}, "Give a file of measurements. Each result gets an anomaly score: its negative log-likelihood in bits, given what was measured before it."),
      h("ul", { class: "chips" }, h("li", {}, h("a", { href: address({ view: "anomalies", example: "1" }) }, "try an example")))));
  }
  return h("div", { class: "view" }, form, results);
}

