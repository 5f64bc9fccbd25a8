// The visitor's own measurements: pasted, or from a file. The server keeps nothing of them.

import { send } from "./api.js";
import { h, field } from "./dom.js";
import { exampleText } from "./example.js";
import { count, plural } from "./format.js";
import { fits, note } from "./state.js";

const NOTHING = { text: null, columns: null, name: "", isLinked: false };
const held = { ...NOTHING }; // as long as the page is open, in all views

export const history = () => held.columns;

export function asObjects(columns = held.columns) {
  if (!columns) return [];
  const hasTimes = columns.event_time.every((seconds) => seconds !== null);
  return columns.rtt.map((rtt, index) => ({
    src_addr: columns.src_addr[index], dst_addr: columns.dst_addr[index], rtt,
    ...(hasTimes ? { event_time: columns.event_time[index] } : {}),
  }));
}

// The measurements that the address of the page contains: an example, or a short history.
export async function fromState(state) {
  const text = state.example ? exampleText() : state.history;
  if (text && text !== held.text) await take(new TextEncoder().encode(text), { text, name: state.example ? "example" : "", isLinked: true });
}

async function take(bytes, about) {
  const columns = await send("read", bytes);
  Object.assign(held, { columns, ...about });
}

function discard() {
  Object.assign(held, NOTHING);
  note({ example: "", history: "" });
}

// A panel to enter them. `onchange` is called when they change.
export function measurementsPanel(onchange) {
  const text = h("textarea", { rows: 6, spellcheck: "false", placeholder: "event_time,src_addr,dst_addr,rtt\n2025-03-03T00:00:00Z,192.0.2.1,192.0.2.71,31.2" });
  const file = h("input", { type: "file", class: "visually-hidden", accept: ".csv,.tsv,.txt,.log,.xml,.lp,.json,.jsonl,.ndjson,.parquet" });
  const pasted = field("Paste CSV or JSON lines", text, "Columns src_addr, dst_addr, rtt in ms (empty: a timeout), and optionally event_time.");
  const use = h("button", { type: "button", onclick: usePasted }, "Use them");
  const choose = h("button", { type: "button", onclick: () => file.click() }, "Choose a file …");
  const drop = h("button", { type: "button", class: "plain", onclick: () => { discard(); text.value = ""; say(); onchange(); } }, "Discard them");
  const status = h("p", { class: "status", role: "status" });
  const summary = h("summary", {}, "Your own measurements");
  const element = h("details", { class: "own", open: Boolean(held.columns) }, summary, status, pasted, h("div", { class: "buttons" }, use, choose, drop), file);

  function say() {
    const columns = held.columns;
    status.textContent = columns ? `${plural(columns.rtt.length, "measurement")} in use${held.name ? ` (${held.name})` : ""}.${(columns.reading ?? []).map((line) => ` ${line}.`).join("")}` : "";
    if (columns && !held.isLinked) status.textContent += " They are not part of this page's address: a shared link does not include them.";
    summary.textContent = columns ? `Your own measurements (${count(columns.rtt.length)})` : "Your own measurements";
    drop.hidden = !columns;
    pasted.fail("");
  }

  async function give(bytes, value, name = "") {
    pasted.fail("");
    use.disabled = true;
    try {
      const isLinked = value !== null && fits(value);
      await take(bytes, { text: value, name, isLinked });
      note({ example: "", history: isLinked ? value : "" });
      say();
      onchange();
    } catch (problem) {
      pasted.fail(problem.message);
    } finally {
      use.disabled = false;
    }
  }

  function usePasted() {
    if (!text.value.trim()) return pasted.fail("Paste some measurements first.");
    give(new TextEncoder().encode(text.value), text.value);
  }

  file.addEventListener("change", async () => {
    if (file.files.length) await give(await file.files[0].arrayBuffer(), null, file.files[0].name);
    file.value = "";
  });
  if (held.text !== null && held.name !== "example" && held.text.length < 20000) text.value = held.text;
  say();
  return element;
}
