// Tables. A column is { name, values, show }: `show` formats a value for the page, downloads have the value itself.

import { h } from "./dom.js";

const MAX_ROWS = 1000;

export const column = (name, values, show = (value) => value ?? "") => ({ name, values, show });

// `links` gives the address of a row, for its first column.
export function tableOf(columns, { links = null, marked = () => false } = {}) {
  const rows = [...(columns[0]?.values ?? []).keys()].slice(0, MAX_ROWS);
  const cell = (one, row, index) => h("td", { class: "number" }, links && index === 0 ? h("a", { href: links(row) }, one.show(one.values[row])) : one.show(one.values[row]));
  return h("table", {},
    h("thead", {}, h("tr", {}, columns.map((one) => h("th", { scope: "col" }, one.name)))),
    h("tbody", {}, rows.map((row) => h("tr", { class: marked(row) ? "high" : null }, columns.map((one, index) => cell(one, row, index))))),
    columns[0]?.values.length > MAX_ROWS && h("caption", {}, `The first ${MAX_ROWS} of ${columns[0].values.length}; a download has all.`));
}

// Buttons that save all rows; `give` makes the columns when one is clicked.
export function downloads(name, give) {
  const button = (kind, write) => h("button", { type: "button", class: "plain small", "aria-label": `Download ${name} as ${kind}`, onclick: () => save(`${name}.${kind.toLowerCase()}`, write(give())) }, kind);
  return h("span", { class: "downloads" }, button("CSV", asCsv), button("JSON", asJson));
}

const rowsOf = (columns) => columns[0].values.map((_, row) => columns.map((one) => one.values[row] ?? null));

function asCsv(columns) {
  const quoted = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  return [columns.map((one) => one.name), ...rowsOf(columns)].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
}

const asJson = (columns) => JSON.stringify(rowsOf(columns).map((row) => Object.fromEntries(row.map((value, index) => [columns[index].name, value]))), null, 1);

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: name.endsWith("csv") ? "text/csv" : "application/json" }));
  h("a", { href: url, download: `ping-llm-${name}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// A card with a table that can be saved.
export function tableCard(title, name, note, columns, options = {}) {
  return h("div", { class: `card ${name}` }, h("div", { class: "caption" }, h("h3", {}, title), downloads(name, () => columns)), note && h("p", { class: "note" }, note),
    h("div", { class: "data", tabindex: "0", role: "region", "aria-label": title }, tableOf(columns, options)));
}
