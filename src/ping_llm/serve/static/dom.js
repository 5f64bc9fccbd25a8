// Elements. All text becomes text nodes, never markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

let numbers = 0;
export const newId = (what) => `${what}-${++numbers}`;

// A form field: a label, the input, a hint, and its error.
export function field(label, input, hint = null) {
  input.id ||= newId("field");
  const error = h("p", { class: "field-error", id: `${input.id}-error`, role: "alert" });
  input.setAttribute("aria-describedby", error.id);
  const element = h("div", { class: "field" }, h("label", { for: input.id }, label), input, hint && h("p", { class: "hint" }, hint), error);
  element.fail = (message) => {
    error.textContent = message || "";
    input.toggleAttribute("aria-invalid", Boolean(message));
    if (message) input.setAttribute("aria-invalid", "true");
  };
  return element;
}

export function notice(kind, ...content) {
  return h("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, ...content);
}

export function loading(what) {
  return h("div", { class: "loading", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), what);
}
