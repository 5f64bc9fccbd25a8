// From values to places on a chart, and where its grid lines are.

export function linear([low, high], [from, to]) {
  const scale = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  scale.back = (place) => low + ((place - from) / (to - from || 1)) * (high - low);
  return scale;
}

export function logarithmic([low, high], range) {
  const inner = linear([Math.log(low), Math.log(high)], range);
  const scale = (value) => inner(Math.log(value));
  scale.back = (place) => Math.exp(inner.back(place));
  return scale;
}

// 1, 2, 5, 10, …; where that is too few, round steps between.
export function logTicks([low, high], most = 7) {
  for (const steps of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      ticks.push(...steps.map((step) => step * 10 ** power).filter((tick) => tick >= low && tick <= high));
    }
    if (ticks.length <= most) return ticks.length >= 3 ? ticks : linearTicks([low, high], Math.min(most, 5));
  }
  return [low, high];
}

export function linearTicks([low, high], most = 6) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(+tick.toPrecision(12));
  return ticks;
}

const STEPS = [1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400, 7 * 86400, 30 * 86400, 91 * 86400, 365 * 86400];

export function timeTicks([low, high], most = 6) {
  const step = STEPS.find((size) => (high - low) / size <= most) || STEPS.at(-1) * Math.ceil((high - low) / STEPS.at(-1) / most);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  const label = (tick) => {
    const text = new Date(tick * 1000).toISOString();
    if (step >= 86400) return text.slice(0, 10);
    if (tick % 86400 === 0) return text.slice(5, 10);
    return text.slice(11, step < 60 ? 19 : 16);
  };
  return ticks.map((tick) => [tick, label(tick)]);
}
