// The charts of this page, drawn for figures (see figure.js).

import { svg } from "./dom.js";
import { count, ms, percent, plural, tickMs, time } from "./format.js";
import { axes, dots, line } from "./figure.js";
import { linear, linearTicks, logarithmic, logTicks, timeTicks } from "./scales.js";

const withMs = (tick) => [tick, tickMs(tick)];

// Density of ln RTT. `before`, if given, is drawn as an outline for comparison.
export function densityChart(prediction, before = null) {
  const { edges, probability } = prediction.density;
  const level = (name) => prediction.quantiles[name];
  const middle = (place) => Math.sqrt(edges[place] * edges[place + 1]);
  const cumulated = [];
  probability.reduce((sum, share, place) => (cumulated[place] = sum + share), 0);
  return {
    draw(width) {
      const height = width < 480 ? 220 : 260;
      const margin = { left: 14, right: 14, top: 30, bottom: 42 };
      const shown = visible(edges, [probability, before?.density.probability].filter(Boolean));
      const x = logarithmic(shown, [margin.left, width - margin.right]);
      const inside = (place) => edges[place + 1] > shown[0] && edges[place] < shown[1];
      const top = Math.max(...probability.filter((_, place) => inside(place)));
      const y = linear([0, top * 1.06], [height - margin.bottom, margin.top]);
      const shape = (shares, from = shown[0], to = shown[1], limit = top * 1.06) => {
        const points = shares.map((share, place) => [middle(place), Math.min(share, limit)]).filter(([rtt]) => rtt >= from && rtt <= to);
        const at = (rtt) => {
          const after = shares.findIndex((_, place) => middle(place) >= rtt);
          if (after <= 0) return Math.min(shares.at(after), limit);
          const part = Math.log(rtt / middle(after - 1)) / Math.log(middle(after) / middle(after - 1));
          return Math.min(shares[after - 1] + part * (shares[after] - shares[after - 1]), limit);
        };
        return [[from, at(from)], ...points, [to, at(to)]].map(([rtt, share]) => [x(rtt), y(share)]);
      };
      const area = (points) => `${line(points)}L${points.at(-1)[0].toFixed(1)} ${y(0)}L${points[0][0].toFixed(1)} ${y(0)}Z`;
      const clip = (rtt) => Math.max(shown[0], Math.min(shown[1], rtt));
      const [low, high, median] = [clip(level("0.1")), clip(level("0.9")), clip(prediction.median)];
      const anchor = x(median) > width - 110 ? "end" : x(median) < 110 ? "start" : "middle";
      return {
        height,
        summary: `Median ${ms(prediction.median)}; eight of ten answers between ${ms(level("0.1"))} and ${ms(level("0.9"))}.`,
        parts: [
          ...axes({ width, height, margin, x, y, xTicks: logTicks(shown, width < 480 ? 5 : 8).map(withMs), xLabel: "RTT in ms" }),
          svg("path", { class: "density", d: area(shape(probability)) }),
          high > low && svg("path", { class: "density likely", d: area(shape(probability, low, high)) }),
          before && svg("path", { class: "outline", d: line(shape(before.density.probability)) }),
          svg("path", { class: "edge", d: line(shape(probability)) }),
          svg("line", { class: "median", x1: x(median), x2: x(median), y1: margin.top - 6, y2: y(0) }),
          svg("text", { class: "mark", x: x(median), y: margin.top - 12, "text-anchor": anchor }, `median ${ms(prediction.median)}`),
        ].filter(Boolean),
        points: probability.map((share, place) => ({
          x: x(middle(place)), y: y(Math.min(share, top)),
          lines: [`${ms(edges[place])} to ${ms(edges[place + 1])}`, `${percent(share)} of the answers`, `${percent(cumulated[place])} are not longer`],
        })).filter((_, place) => inside(place)),
      };
    },
    table: () => ({
      head: ["from", "to", "probability", "not longer"],
      rows: probability.map((share, place) => [ms(edges[place]), ms(edges[place + 1]), percent(share), percent(cumulated[place])]),
    }),
  };
}

// The part of the axis where anything is to be seen.
function visible(edges, densities) {
  const [main] = densities;
  const top = Math.max(...main);
  const whole = main.reduce((sum, share) => sum + share, 0);
  let until = 0;
  const seen = [];
  main.forEach((share, place) => {
    until += share;
    if (share > top / 200 && until > 0.005 * whole && until - share < 0.975 * whole) seen.push(place); // of a long tail only the beginning
  });
  const [low, high] = [edges[seen[0]], edges[seen.at(-1) + 1]];
  const room = Math.max(Math.log(high / low) * 0.25, 0.06);
  return [Math.max(edges[0], low * Math.exp(-room)), Math.min(edges.at(-1), high * Math.exp(room))];
}

// What was measured, and beside it what is predicted to come next.
export function seriesChart(measured, prediction) {
  const rtts = measured.rtt.filter((rtt) => rtt !== null && rtt > 0);
  const hasTimes = measured.event_time.every((seconds) => seconds !== null);
  const when = (place) => (hasTimes ? measured.event_time[place] : place + 1);
  const [low10, high90] = [prediction.quantiles["0.1"], prediction.quantiles["0.9"]];
  return {
    draw(width) {
      const height = width < 480 ? 220 : 250;
      const gutter = width < 480 ? 44 : 60;
      const margin = { left: 44, right: gutter + 12, top: 24, bottom: 30 };
      const span = robustSpan(rtts, [low10, high90]);
      const room = Math.max(Math.log(span[1] / span[0]) * 0.08, 0.04);
      const shown = [span[0] * Math.exp(-room), span[1] * Math.exp(room)];
      const inside = (rtt) => Math.max(shown[0], Math.min(shown[1], rtt));
      const places = measured.rtt.map((_, place) => place);
      const times = [when(0), when(places.length - 1)];
      if (times[0] === times[1]) times[1] += 1;
      const x = linear(times, [margin.left + 6, width - margin.right - 6]);
      const y = logarithmic(shown, [height - margin.bottom, margin.top]);
      const failed = places.filter((place) => measured.rtt[place] === null);
      const answered = places.filter((place) => measured.rtt[place] !== null && measured.rtt[place] > 0);
      const box = { x: width - gutter - 4, width: gutter - 8 };
      const band = (from, to, kind) => {
        const [low, high] = [from, to].map((level) => y(inside(prediction.quantiles[level])));
        return svg("rect", { class: kind, ...box, y: high, height: Math.max(2, low - high), rx: 2 });
      };
      const ticks = hasTimes ? timeTicks(times, Math.max(2, Math.floor(width / 130))) : linearTicks(times, 5).map((tick) => [tick, count(tick)]);
      return {
        height,
        summary: `${plural(answered.length, "answer")}, ${count(failed.length)} failed.`,
        parts: [
          ...axes({ width: width - gutter - 6, height, margin: { ...margin, right: 6 }, x, y, xTicks: ticks, yTicks: logTicks(shown, 6).map(withMs), yLabel: "ms" }),
          svg("path", { class: "measured", d: dots(answered.filter((place) => inside(measured.rtt[place]) === measured.rtt[place]).map((place) => [x(when(place)), y(measured.rtt[place])])) }),
          svg("path", { class: "beyond", d: answered.filter((place) => measured.rtt[place] > shown[1]).map((place) => `M${(x(when(place)) - 4).toFixed(1)} ${margin.top + 5}l4 -7l4 7z`).join("") }),
          svg("path", { class: "failed", d: failed.map((place) => `M${x(when(place)).toFixed(1)} ${margin.top - 4}v8`).join("") }),
          band("0.05", "0.95", "band wide"), band("0.25", "0.75", "band"),
          svg("line", { class: "median", x1: box.x, x2: box.x + box.width, y1: y(prediction.median), y2: y(prediction.median) }),
          svg("text", { class: "mark", x: box.x + box.width / 2, y: height - margin.bottom + 17, "text-anchor": "middle" }, "next"),
        ],
        points: [
          ...places.map((place) => ({
            x: x(when(place)), y: measured.rtt[place] > 0 ? y(inside(measured.rtt[place])) : margin.top,
            lines: [ms(measured.rtt[place]), hasTimes ? time(measured.event_time[place]) : `measurement ${place + 1}`],
          })),
          { x: box.x + box.width / 2, y: y(prediction.median), lines: [`predicted ${ms(prediction.median)}`, `${ms(low10)} to ${ms(high90)} (80 %)`, `P(failed) ${percent(prediction.p_failed)}`] },
        ],
      };
    },
    table: () => ({
      head: ["time", "RTT"],
      rows: measured.rtt.map((rtt, place) => [time(measured.event_time[place]), ms(rtt)]),
    }),
  };
}

// Between which RTTs a chart is drawn: a few outliers are not to flatten everything else.
function robustSpan(rtts, others) {
  const sorted = [...rtts].sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  const high = sorted.at(-1) > 3 * at(0.98) ? at(0.98) * 1.5 : sorted.at(-1);
  return [Math.min(sorted[0] ?? Infinity, ...others), Math.max(high ?? 0, ...others)];
}

// The prediction over the number of measurements that it is drawn from. `at` is the step that is shown elsewhere.
export function contextChart(steps, at) {
  const quantile = (step, level) => step.quantiles[level];
  return {
    draw(width) {
      const height = width < 480 ? 210 : 240;
      const margin = { left: 44, right: 16, top: 24, bottom: 42 };
      const informed = steps.slice(1); // the bands of what is said without any measurement are too wide to be a scale
      const medians = steps.map((step) => step.median);
      const span = [Math.min(...medians, ...informed.map((step) => quantile(step, "0.1"))), Math.max(...medians, ...informed.map((step) => quantile(step, "0.9")))];
      const room = Math.max(Math.log(span[1] / span[0]) * 0.15, 0.08);
      const shown = [span[0] * Math.exp(-room), span[1] * Math.exp(room)];
      const x = linear([0, Math.max(1, steps.length - 1)], [margin.left + 10, width - margin.right - 10]);
      const free = logarithmic(shown, [height - margin.bottom, margin.top]);
      const y = (rtt) => Math.max(margin.top, Math.min(height - margin.bottom, free(rtt)));
      const between = (low, high) => `${line(steps.map((step, place) => [x(place), y(quantile(step, high))]))}${line(steps.map((step, place) => [x(place), y(quantile(step, low))]).reverse()).replace("M", "L")}Z`;
      const every = Math.ceil(steps.length / Math.max(3, Math.floor(width / 52)));
      const xTicks = steps.map((step, place) => [place, count(step.size)]).filter(([place]) => place % every === 0 || place === steps.length - 1).filter(([place], number, all) => number === all.length - 1 || all.at(-1)[0] - place >= every);
      return {
        height,
        summary: `From nothing ${ms(steps[0].median)}, from ${plural(steps.at(-1).size, "measurement")} ${ms(steps.at(-1).median)}.`,
        parts: [
          ...axes({ width, height, margin, x, y, xTicks, yTicks: logTicks(shown, 6).map(withMs), yLabel: "ms", xLabel: "measurements looked at" }),
          svg("path", { class: "band wide", d: between("0.1", "0.9") }),
          svg("path", { class: "band", d: between("0.25", "0.75") }),
          svg("path", { class: "edge", d: line(steps.map((step, place) => [x(place), y(step.median)])) }),
          svg("line", { class: "median", x1: x(at), x2: x(at), y1: margin.top, y2: height - margin.bottom }),
          svg("circle", { class: "dot", cx: x(at), cy: y(steps[at].median), r: 5 }),
        ],
        points: steps.map((step, place) => ({
          x: x(place), y: y(step.median),
          lines: [`from ${plural(step.size, "measurement")}`, `median ${ms(step.median)}`, `${ms(quantile(step, "0.1"))} to ${ms(quantile(step, "0.9"))} (80 %)`, `P(failed) ${percent(step.p_failed)}`],
        })),
      };
    },
    table: () => ({
      head: ["measurements", "10 %", "median", "90 %", "P(failed)"],
      rows: steps.map((step) => [count(step.size), ms(quantile(step, "0.1")), ms(step.median), ms(quantile(step, "0.9")), percent(step.p_failed)]),
    }),
  };
}

// Destinations as lines on one axis; each label leads to its prediction.
export function rankChart(ranking, link) {
  const range = (one) => [one.quantiles["0.1"], one.quantiles["0.9"]];
  return {
    draw(width) {
      const isNarrow = width < 560;
      const each = isNarrow ? 44 : 30;
      const longest = Math.max(...ranking.map((one) => one.dst_addr.length));
      const margin = { left: isNarrow ? 12 : 20 + Math.min(300, longest * 7.9), right: 70, top: 12, bottom: 42 };
      const height = margin.top + margin.bottom + each * ranking.length;
      const shown = [Math.min(...ranking.map((one) => range(one)[0])) / 1.05, Math.max(...ranking.map((one) => range(one)[1])) * 1.05];
      const x = logarithmic(shown, [margin.left, width - margin.right]);
      const y = (place) => margin.top + each * (place + (isNarrow ? 0.72 : 0.5));
      return {
        height,
        summary: `Shortest ${ranking[0].dst_addr} with ${ms(ranking[0].median)}.`,
        parts: [
          ...axes({ width, height, margin, x, y, xTicks: logTicks(shown, isNarrow ? 5 : 8).map(withMs), xLabel: "RTT in ms" }),
          ...ranking.map((one, place) => svg("g", {},
            svg("line", { class: "range", x1: x(range(one)[0]), x2: x(range(one)[1]), y1: y(place), y2: y(place) }),
            svg("line", { class: "range inner", x1: x(one.quantiles["0.25"]), x2: x(one.quantiles["0.75"]), y1: y(place), y2: y(place) }),
            svg("line", { class: "median", x1: x(one.median), x2: x(one.median), y1: y(place) - 7, y2: y(place) + 7 }),
            svg("text", { class: "value", x: x(range(one)[1]) + 10, y: y(place), dy: "0.32em" }, ms(one.median)),
            svg("a", { href: link(one.dst_addr) }, svg("text", { class: "name", x: isNarrow ? margin.left : margin.left - 12, y: isNarrow ? y(place) - 15 : y(place), dy: "0.32em", "text-anchor": isNarrow ? "start" : "end" }, one.dst_addr)))),
        ],
        points: ranking.map((one, place) => ({
          x: x(one.median), y: y(place),
          lines: [one.dst_addr, `median ${ms(one.median)}`, `${ms(range(one)[0])} to ${ms(range(one)[1])} (80 %)`, `P(failed) ${percent(one.p_failed)}`],
        })),
      };
    },
    table: () => ({
      head: ["destination", "10 %", "median", "90 %", "P(failed)"],
      rows: ranking.map((one) => [one.dst_addr, ms(range(one)[0]), ms(one.median), ms(range(one)[1]), percent(one.p_failed)]),
    }),
  };
}

// Destinations by how likely they are, as bars.
export function likelyChart(found, what, link) {
  return {
    draw(width) {
      const isNarrow = width < 560;
      const each = isNarrow ? 46 : 30;
      const longest = Math.max(...found.map((one) => one.dst_addr.length));
      const margin = { left: isNarrow ? 12 : 20 + Math.min(300, longest * 7.9), right: 132, top: 8, bottom: 12 };
      const height = margin.top + margin.bottom + each * found.length;
      const x = linear([0, found[0].probability || 1], [margin.left, width - margin.right]);
      const y = (place) => margin.top + each * (place + (isNarrow ? 0.7 : 0.5));
      return {
        height,
        summary: `Likeliest ${found[0].dst_addr} with ${percent(found[0].probability)}.`,
        parts: found.map((one, place) => svg("g", {},
          svg("rect", { class: "bar", x: margin.left, y: y(place) - 7, width: Math.max(2, x(one.probability) - margin.left), height: 14, rx: 3 }),
          svg("text", { class: "value", x: Math.max(margin.left + 2, x(one.probability)) + 8, y: y(place), dy: "0.32em" }, one.median === undefined || one.median === null ? percent(one.probability) : `${percent(one.probability)} · ${ms(one.median)}`),
          svg("a", { href: link(one.dst_addr) }, svg("text", { class: "name", x: isNarrow ? margin.left : margin.left - 12, y: isNarrow ? y(place) - 16 : y(place), dy: "0.32em", "text-anchor": isNarrow ? "start" : "end" }, one.dst_addr)))),
        points: found.map((one, place) => ({
          x: x(one.probability), y: y(place),
          lines: [one.dst_addr, `${percent(one.probability)} ${what}`, one.median ? `predicted median ${ms(one.median)}` : "", one.p_failed !== undefined && one.p_failed !== null ? `P(failed) ${percent(one.p_failed)}` : ""].filter(Boolean),
        })),
      };
    },
    table: () => ({
      head: ["destination", "probability", "predicted median", "P(failed)"],
      rows: found.map((one) => [one.dst_addr, percent(one.probability), one.median ? ms(one.median) : "", one.p_failed ? percent(one.p_failed) : ""]),
    }),
  };
}

// Bits over time; what stands out is marked.
export function timelineChart(scored, threshold) {
  const hasTimes = scored.event_time.every((seconds) => seconds !== null);
  const when = (place) => (hasTimes ? scored.event_time[place] : place + 1);
  const known = scored.bits.map((bits, place) => (bits === null ? -1 : place)).filter((place) => place >= 0);
  return {
    draw(width) {
      const height = width < 480 ? 240 : 300;
      const margin = { left: 40, right: 14, top: 24, bottom: 30 };
      const most = Math.max(threshold * 1.2, ...known.map((place) => scored.bits[place]));
      const least = Math.min(0, ...known.map((place) => scored.bits[place]));
      const times = [when(known[0]), when(known.at(-1))];
      if (times[0] === times[1]) times[1] += 1;
      const x = linear(times, [margin.left + 6, width - margin.right - 6]);
      const y = linear([least, most * 1.05], [height - margin.bottom, margin.top]);
      const place2 = (place) => [x(when(place)), y(scored.bits[place])];
      const ticks = hasTimes ? timeTicks(times, Math.max(2, Math.floor(width / 130))) : linearTicks(times, 5).map((tick) => [tick, count(tick)]);
      const isHigh = (place) => scored.bits[place] >= threshold;
      return {
        height,
        summary: `${count(known.filter(isHigh).length)} of ${count(known.length)} stand out.`,
        parts: [
          ...axes({ width, height, margin, x, y, xTicks: ticks, yTicks: linearTicks([least, most], 5).map((tick) => [tick, String(tick)]), yLabel: "bits" }),
          svg("line", { class: "threshold", x1: margin.left, x2: width - margin.right, y1: y(threshold), y2: y(threshold) }),
          svg("path", { class: "measured", d: dots(known.filter((place) => !isHigh(place)).map(place2)) }),
          svg("path", { class: "surprising", d: dots(known.filter(isHigh).map(place2)) }),
        ],
        points: known.map((place) => ({
          x: x(when(place)), y: y(scored.bits[place]),
          lines: [`${scored.bits[place].toFixed(1)} bits`, `${scored.src_addr[place]} → ${scored.dst_addr[place]}`, ms(scored.rtt[place]), hasTimes ? time(scored.event_time[place]) : ""].filter(Boolean),
        })),
      };
    },
    table: () => ({
      head: ["time", "source", "destination", "RTT", "bits"],
      rows: known.map((place) => [time(scored.event_time[place]), scored.src_addr[place], scored.dst_addr[place], ms(scored.rtt[place]), scored.bits[place].toFixed(1)]),
    }),
  };
}
