// Numbers and times as people read them.

export function ms(value) {
  if (value === null || value === undefined) return "timeout";
  if (value < 0.995) return `${value.toFixed(2)} ms`;
  if (value < 99.95) return `${value.toFixed(1)} ms`;
  if (value < 9999.5) return `${Math.round(value).toLocaleString("en")} ms`;
  return `${(value / 1000).toPrecision(3)} s`;
}

// The median of a prediction, with a question mark if it is extrapolated.
export const marked = (prediction) => `${prediction.support?.extrapolating ? "? " : ""}${ms(prediction.median)}`;

// The 80 % interval: one RTT in ten is shorter, one in ten is longer.
export function interval(quantiles) {
  const [low, high] = [ms(quantiles["0.1"]), ms(quantiles["0.9"])];
  return `${high.endsWith(" ms") ? low.replace(" ms", "") : low} – ${high}`;
}

export function tickMs(value) {
  return value >= 1000 ? `${+(value / 1000).toPrecision(3)} s` : `${+value.toPrecision(3)}`;
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "< 0.01 %";
  return `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export const count = (value) => Math.round(value).toLocaleString("en");

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, "Z").replace("Z", " UTC");
}

export function day(seconds) {
  return new Date(seconds * 1000).toISOString().slice(0, 10);
}
