// Anomaly scores of a file or of the server's measurements: over time, and the highest.

import { post, send } from "./api.js";
import { anomalyChart, figure, scoreColumns } from "./charts.js";
import { isNode } from "./combobox.js";
import { field, h, loading } from "./dom.js";
import { exampleText } from "./example.js";
import { count, plural } from "./format.js";
import { address, addressField, clearIfWrong, failure, go, rangeFields, toResults } from "./forms.js";
import { asIso } from "./predict.js";
import { read } from "./state.js";
import { tableCard } from "./tables.js";

const held = { name: "", bytes: null, found: null };

export function anomaliesView(state, info) {
  const results = h("section", { class: "results", "aria-label": "Anomaly scores" });
  const isOwn = Boolean(info.rows) && state.own !== "0";
  const which = h("select", { onchange: () => go({ ...read(), view: "anomalies", own: which.value, last: "" }) }, h("option", { value: "1", selected: isOwn }, "The server's measurements"), h("option", { value: "0", selected: !isOwn }, "A file"));
  const file = h("input", { type: "file", accept: ".csv,.tsv,.txt,.log,.xml,.lp,.json,.jsonl,.ndjson,.parquet" });
  const chosen = field("File of measurements", file, `CSV, Parquet, JSON lines or RIPE Atlas JSON, up to ${count(info.limits.history)} measurements. Nothing is kept.`);
  const source = addressField("Source (optional)", { role: "source", value: state.src, info, placeholder: "all" });
  const destination = addressField("Destination (optional)", { role: "destination", source: () => source.input.value, value: state.dst, info, placeholder: "all" });
  const range = rangeFields(state);
  const limit = h("input", { type: "number", min: 1, max: info.limits.scored, inputmode: "numeric", value: state.last || Math.min(info.kind !== "completer" ? 2000 : state.example ? 100 : 40, info.limits.scored) });
  const last = field("Score the latest", limit, info.kind === "completer" ? "The completer takes up to half a second for each." : "A language model reads thousands in seconds.");
  const form = h("form", { class: "card ask", novalidate: true, onsubmit: (event) => { event.preventDefault(); submit(); clearIfWrong(); toResults(); } },
    info.rows && field("What to score", which), isOwn ? [source.element, destination.element, range.element] : chosen, last, h("button", { type: "submit", class: "main" }, "Score them"));
  const latest = () => Math.max(1, Math.min(info.limits.scored, Math.round(+limit.value) || 1));

  async function submit() {
    if (isOwn) return submitOwn();
    chosen.fail("");
    if (file.files.length) {
      if (file.files[0].size > info.limits.body_bytes) return chosen.fail(`That file is larger than the ${count(info.limits.body_bytes / 1e6)} MB that this server takes.`);
      Object.assign(held, { name: file.files[0].name, bytes: await file.files[0].arrayBuffer() });
    }
    if (!held.bytes) return chosen.fail("Choose a file first.");
    ask(held.name, () => send(`anomalies/file?last=${latest()}`, held.bytes));
  }

  function submitOwn() {
    const [src, dst] = [source.input.value.trim(), destination.input.value.trim()];
    const limits = range.check();
    source.fail(dst && !src ? "A destination needs a source." : src && !isNode(src) ? "This is neither an address nor a name." : "");
    destination.fail(dst && !isNode(dst) ? "This is neither an address nor a name." : "");
    if (limits && !form.querySelector("[aria-invalid=true]")) go({ ...read(), view: "anomalies", src, dst, ...limits, last: latest() });
  }

  function askOwn() {
    const named = [state.src, state.dst].filter(Boolean).join(" → ") || "the server's measurements";
    ask(named, () => post("anomalies/rows", { src_addr: state.src || null, dst_addr: state.dst || null, begin: asIso(state.from) || null, end: asIso(state.until) || null, last: latest() }));
  }

  async function ask(name, scoring) {
    results.replaceChildren(loading(`Scoring ${name} …`));
    results.setAttribute("aria-busy", "true");
    held.found = null;
    try {
      held.found = await scoring();
      show(name);
    } catch (problem) {
      results.replaceChildren(failure(problem));
    }
    results.removeAttribute("aria-busy");
  }

  function show(name) {
    const found = held.found;
    const known = found.bits.map((bits, row) => [bits, row]).filter(([bits]) => bits !== null);
    const sorted = [...known].sort((a, b) => b[0] - a[0]);
    const usual = sorted[Math.floor(sorted.length / 2)][0];
    const threshold = usual + 10;
    const chart = figure(`Anomaly scores of ${name}`, "anomalies");
    const high = sorted.filter(([bits]) => bits >= threshold);
    const summary = [
      `${plural(known.length, "measurement")} of ${count(found.total)} scored${found.complete ? "" : " within the time limit, the latest first"}.`,
      `The median score is ${usual.toFixed(1)} bits. Marked: ${plural(high.length, "result")} with at least ten bits more, which is a thousand times less likely.`,
    ];
    const rows = sorted.slice(0, 12).map(([, row]) => row);
    const link = (index) => address({ view: "predict", src: found.src_addr[rows[index]], dst: found.dst_addr[rows[index]], example: read().example });
    results.replaceChildren(chart.element, tableCard("Highest scores", "worst", found.expected[0] === null ? null : "Beside the prediction: median, 10 and 90 % quantiles.", scoreColumns(found, rows), { links: link, marked: (index) => found.bits[rows[index]] >= threshold }));
    chart.show(anomalyChart(found, threshold), summary.join(" "));
  }

  if (isOwn && state.last) {
    requestAnimationFrame(askOwn);
  } else if (!isOwn && state.example && held.name !== "example") {
    Object.assign(held, { name: "example", bytes: new TextEncoder().encode(exampleText()), found: null });
    ask("example", () => send(`anomalies/file?last=${latest()}`, held.bytes));
  } else if (!isOwn && held.found && held.bytes) {
    requestAnimationFrame(() => show(held.name));
  } else {
    results.replaceChildren(h("div", { class: "card empty" }, h("h2", {}, "What went wrong, and when?"),
      h("p", {}, `${isOwn ? "" : "Choose a file of measurements. "}Each result gets an anomaly score: its negative log-likelihood in bits, given what was measured before it.`),
      h("ul", { class: "chips" }, h("li", {}, h("a", { href: address({ view: "anomalies", example: "1", own: "0" }) }, "try an example")))));
  }
  return h("div", { class: "view" }, form, results);
}
