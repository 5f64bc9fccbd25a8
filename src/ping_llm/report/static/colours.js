"use strict";
// The colours of heat maps, for the page of `ping-llm predict --matrix` and for the web page of `ping-llm serve`.

globalThis.heat = {
  // [red, green, blue] of each colour of a ramp, which are written like "#30123b".
  stops: (ramp) => ramp.map((name) => [1, 3, 5].map((at) => parseInt(name.slice(at, at + 2), 16))),

  // { back, ink }: the colours of a value and of text on it. The scale from `low` to `high` is logarithmic.
  colour(value, { low, high, stops }) {
    const position = Math.min(Math.max(Math.log(Math.max(value, 1e-9) / low) / Math.log(high / low), 0), 1) * (stops.length - 1);
    const stop = Math.min(Math.floor(position), stops.length - 2);
    const [red, green, blue] = stops[stop].map((one, at) => Math.round(one + (stops[stop + 1][at] - one) * (position - stop)));
    return { back: `rgb(${red},${green},${blue})`, ink: 0.3 * red + 0.59 * green + 0.11 * blue > 128 ? "#000" : "#fff" };
  },
};
