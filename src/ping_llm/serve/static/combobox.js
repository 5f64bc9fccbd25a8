// A node: typed, or chosen from those that the server knows. Keys and roles are those of an ARIA combobox.

import { get } from "./api.js";
import { h, newId } from "./dom.js";
import { count } from "./format.js";

function isAddress(text) {
  if (/^(\d{1,3}\.){3}\d{1,3}$/.test(text)) return text.split(".").every((part) => +part < 256 && String(+part) === part);
  return text.includes(":") && !/[[\]\s/%@?#]/.test(text) && URL.canParse(`http://[${text}]/`);
}

// An address, or a name that measurements may have.
export const isNode = (text) => isAddress(text) || (text.length <= 255 && /[\p{L}\p{N}]/u.test(text) && !/^[\d.]+$/.test(text) && !text.includes(":"));

export function combobox({ role, source = () => undefined, enabled = true, placeholder, onchoose = () => {} }) {
  const list = h("ul", { class: "options", role: "listbox", id: newId("options"), hidden: true });
  const input = h("input", {
    type: "text", role: "combobox", autocomplete: "off", spellcheck: "false", autocapitalize: "off", placeholder,
    "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": list.id, maxlength: 255,
  });
  const element = h("div", { class: "combobox" }, input, list);
  let shown = [];
  let active = -1;
  let waiting = null;
  let timer = 0;

  function show(addresses) {
    shown = addresses;
    active = -1;
    list.replaceChildren(
      ...addresses.map(({ address, measurements }, index) =>
        h("li", { role: "option", id: `${list.id}-${index}`, "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); choose(index); } },
          h("span", {}, address), h("small", {}, measurements ? count(measurements) : "")),
      ),
    );
    list.hidden = !addresses.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    input.removeAttribute("aria-activedescendant");
  }

  function mark(index) {
    list.children[active]?.setAttribute("aria-selected", "false");
    active = (index + shown.length) % shown.length;
    const option = list.children[active];
    option.setAttribute("aria-selected", "true");
    option.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", option.id);
  }

  function choose(index) {
    input.value = shown[index].address;
    show([]);
    onchoose();
  }

  async function search(text) {
    waiting?.abort();
    waiting = new AbortController();
    try {
      const found = await get("addresses", { role, search: text, source: source(), count: 20 }, waiting.signal);
      if (document.activeElement === input) show(found.addresses);
    } catch {
      show([]); // an address can still be typed
    }
  }

  if (enabled) {
    const later = (text) => { clearTimeout(timer); timer = setTimeout(search, 120, text); };
    input.addEventListener("input", () => later(input.value));
    input.addEventListener("focus", () => later(isAddress(input.value) ? "" : input.value));
    input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        if (list.hidden) search(isAddress(input.value) ? "" : input.value);
        else mark(active + (event.key === "ArrowDown" ? 1 : active < 0 ? 0 : -1));
      } else if (event.key === "Enter" && active >= 0) {
        event.preventDefault();
        choose(active);
      } else if (event.key === "Escape" && !list.hidden) {
        event.preventDefault();
        show([]);
      }
    });
  }
  input.addEventListener("blur", () => { clearTimeout(timer); waiting?.abort(); show([]); });
  return { element, input };
}
