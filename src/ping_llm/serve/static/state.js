// The state of the page, in the fragment of its address: a view can be shared, and no server gets the fragment.

const FIELDS = ["src", "dst", "time", "src2", "dst2", "time2", "from", "until", "rtt", "among", "count", "shown", "budget", "own", "rows", "example", "history", "last"];
const LONGEST = 2000;

export function read() {
  const [view, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  const parameters = new URLSearchParams(query);
  const state = { view: view || "predict" };
  for (const name of FIELDS) {
    const value = parameters.get(name);
    if (value !== null) state[name] = value;
  }
  return state;
}

export function address(state) {
  const parameters = new URLSearchParams();
  for (const name of FIELDS) {
    const value = state[name];
    if (value !== undefined && value !== "" && String(value).length <= LONGEST) parameters.set(name, value);
  }
  const query = parameters.toString();
  return `#${state.view}${query ? `?${query}` : ""}`;
}

export function go(state) {
  const to = address(state);
  if (to === location.hash) window.dispatchEvent(new Event("hashchange"));
  else location.hash = to;
}

export function note(changes) {
  history.replaceState(null, "", address({ ...read(), ...changes }));
}

export const fits = (text) => text.length <= LONGEST;
