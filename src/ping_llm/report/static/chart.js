"use strict";
// The one way to draw a chart, for the run report and for the web page of `ping-llm serve`: uPlot with our colours, axes,
// tooltips and keys. `chart(element, spec)` fills `element` and returns { update(spec), destroy() }.
//
// spec = {
//   x, y: { label, format, range: [low, high], log, fromZero, time, hidden }
//     format: "number", "count", "percent", or a function from a value to text; time: seconds since 1970, shown in UTC
//   series: [{ name, kind, colour, size, x: [...], y: [...] }], the first on top; null in y is a gap; size: of its points
//     kind: line, faint, quiet, dashed, dots (a line with dots), points (no line), area (filled down to zero)
//     colour: 1 to 8 of the palette in style.css, or the name of a CSS variable
//   bands: [{ upper, lower, colour }], filled between two series, given by their index
//   marks: [[x, text, colour]] and levels: [[y, text]], lines across the chart; diagonal: true, a line where x = y
//   tip(index): lines of text for a tooltip, where the values of the series are not what a reader wants to see
//   nearest: "point", if the pointer chooses among points in both directions and not only along x
// }

const chart = (() => {
  const LOOK = {
    line: { width: 2 },
    faint: { width: 1, alpha: 0.38 },
    quiet: { width: 1, alpha: 0.55 },
    dashed: { width: 2, dash: [5, 4] },
    dots: { width: 1.5, points: { show: true, size: 7 } },
    points: { paths: () => null, points: { show: true, size: 4 } },
    area: { width: 1.5 },
  };
  const ROOM = 0.04; // above and below what is drawn, as a share of the axis
  const MOST_DECADES = 1e15; // what is smaller than the largest value by more lies on the edge of a logarithmic axis
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const paint = (colour) => css(typeof colour === "number" ? `--series-${((colour - 1) % 8) + 1}` : colour);
  const node = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text ?? "" });

  // -- numbers, as formatting.py writes them
  const formats = {
    number(value) {
      const small = value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6);
      const text = small ? value.toPrecision(3).replace(/\.?0+(e|$)/, "$1") : (+value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 8 });
      return text.replace("e+", "e").replaceAll("-", "−");
    },
    percent: (value) => `${(+(100 * value).toPrecision(3)).toLocaleString("en")} %`,
    count(value) {
      const [size, prefix] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([s]) => Math.abs(value) >= s * 0.9995) ?? [1, ""];
      return `${+(value / size).toPrecision(3)}${prefix}`;
    },
    time: (value) => new Date(value * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, "") + " UTC",
  };
  const formatOf = (axis) => (typeof axis.format === "function" ? axis.format : formats[axis.time ? "time" : axis.format ?? "number"]);
  const exactly = (axis, value) => (axis.format === "count" ? value.toLocaleString("en") : formatOf(axis)(value));

  // -- scales
  function rangeOf({ range, log, fromZero }, columns, room) {
    if (range && !(log && range[0] <= 0)) return range;
    let [low, high] = [Infinity, -Infinity];
    for (const values of columns)
      for (const value of values)
        if (value !== null && (!log || value > 0)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (low > high) return log ? [0.1, 1] : [0, 1];
    if (log) {
      low = Math.max(low, high / MOST_DECADES);
      const margin = Math.max((high / low) ** room, 1.02);
      return [low / margin, high * margin];
    }
    if (fromZero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    const margin = high > low ? room * (high - low) : Math.abs(low) * 0.1 || 0.5;
    return [fromZero && low === 0 ? 0 : low - margin, high + margin];
  }

  function linearTicks(low, high, most) {
    const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const ticks = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(+tick.toPrecision(12));
    return ticks;
  }

  // 1, 2, 5, 10, …; where that is too few, round steps between. uPlot itself has powers of ten or nothing.
  function logTicks(low, high, most) {
    for (const digits of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        ticks.push(...digits.map((digit) => +(digit * 10 ** power).toPrecision(12)).filter((tick) => tick >= low && tick <= high));
      if (ticks.length <= most) return ticks.length >= 3 ? ticks : linearTicks(low, high, Math.min(most, 5));
    }
    const powers = linearTicks(Math.log10(low), Math.log10(high), most).filter(Number.isInteger);
    return powers.map((power) => 10 ** power);
  }

  // A day, or a time of day if ticks are closer than that.
  function timeTick(seconds, step) {
    const text = new Date(seconds * 1000).toISOString();
    if (step >= 86400) return text.slice(0, 10);
    return seconds % 86400 === 0 ? text.slice(5, 10) : text.slice(11, step < 60 ? 19 : 16);
  }

  function axisOf(axis, isY, length) {
    const most = Math.max(2, Math.floor(length / (isY ? 40 : 75)));
    return {
      stroke: () => css("--soft"),
      font: FONT,
      grid: { show: isY, stroke: () => css("--grid"), width: 1 },
      ticks: { show: false },
      gap: 6,
      space: isY ? 40 : 75,
      size: isY ? (_, labels) => 12 + 6.8 * Math.max(3, ...(labels ?? []).map((label) => label?.length ?? 0)) : 26,
      ...(axis.log && { splits: (_, __, low, high) => logTicks(low, high, most), filter: (_, splits) => splits }),
      ...(axis.format === "count" && !axis.log && { incrs: [1, 2, 5].flatMap((n) => [...Array(15).keys()].map((p) => n * 10 ** p)).sort((a, b) => a - b) }),
      values: (_, splits, __, ___, step) => splits.map((value) => (value === null ? "" : axis.time ? timeTick(value, step) : formatOf(axis)(value))),
    };
  }

  // -- lines across the chart, drawn below the series
  function drawLines(u, spec) {
    const { ctx } = u, ratio = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    const stroke = (x1, y1, x2, y2, dash) => {
      ctx.setLineDash(dash.map((size) => size * ratio));
      ctx.beginPath(); ctx.moveTo(x1, y1); ctx.lineTo(x2, y2); ctx.stroke();
    };
    ctx.save();
    ctx.strokeStyle = css("--faint");
    ctx.fillStyle = css("--soft");
    ctx.lineWidth = ratio;
    ctx.font = FONT.replace("12px", `${12 * ratio}px`);
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    if (spec.diagonal) {
      const low = Math.max(u.scales.x.min, u.scales.y.min), high = Math.min(u.scales.x.max, u.scales.y.max);
      stroke(u.valToPos(low, "x", true), u.valToPos(low, "y", true), u.valToPos(high, "x", true), u.valToPos(high, "y", true), []);
    }
    let free = left; // where the next text has room; in a small chart there is none
    for (const [value, text, colour] of spec.marks ?? []) {
      const x = u.valToPos(value, "x", true);
      if (x < left || x > left + width) continue;
      ctx.strokeStyle = colour ? paint(colour) : css("--faint");
      ctx.fillStyle = colour ? paint(colour) : css("--soft");
      ctx.lineWidth = (colour ? 2 : 1) * ratio;
      stroke(x, top, x, top + height, colour ? [] : [3, 3]);
      const size = ctx.measureText(text ?? "").width, at = x + size + 5 * ratio > left + width ? x - size - 5 * ratio : x + 5 * ratio;
      if (text && u.width > 600 && at >= free) { ctx.fillText(text, at, top); free = at + size; }
    }
    ctx.strokeStyle = css("--faint");
    ctx.fillStyle = css("--soft");
    ctx.lineWidth = ratio;
    for (const [value, text] of spec.levels ?? []) {
      const y = u.valToPos(value, "y", true);
      if (y < top || y > top + height) continue;
      stroke(left, y, left + width, y, [3, 3]);
      if (text) ctx.fillText(text, left + 4 * ratio, y + 3 * ratio);
    }
    ctx.restore();
  }

  // -- the tooltip: all values at the cross-hair, each of the nearest point that its series has
  function nearest(values, index, xs, reach) {
    for (let away = 0; away < xs.length; away++)
      for (const i of [index - away, index + away])
        if (values[i] !== undefined && i >= 0 && i < xs.length) return Math.abs(xs[i] - xs[index]) <= reach ? i : -1;
    return -1;
  }
  function fillTip(tip, u, spec, drawn, index) {
    const xs = u.data[0], reach = (xs.at(-1) - xs[0]) / 25;
    if (spec.tip) return tip.replaceChildren(...spec.tip(index).map((text, i) => node(i ? "span" : "b", "", text)));
    tip.replaceChildren(node("b", "", `${spec.x.label ?? ""} ${exactly(spec.x, xs[index])}`));
    drawn.forEach((series, number) => {
      const values = u.data[drawn.length - number], i = nearest(values, index, xs, reach);
      if (i < 0 || (series.kind === "quiet" && u.width < 420)) return;
      const row = node("span"), key = node("i", `key ${series.kind}`);
      key.style.setProperty("--colour", paint(series.colour));
      const where = series.kind === "dots" && i !== index ? ` (${spec.x.label} ${exactly(spec.x, xs[i])})` : "";
      row.append(key, node("span", "", series.name + where), node("b", "", values[i] === null ? "–" : formatOf(spec.y)(values[i])));
      tip.append(row);
    });
  }

  function nearestPoint(u) {
    const [xs, ...columns] = u.data, { left, top } = u.cursor;
    let [best, least] = [null, Infinity];
    const across = xs.map((x) => u.valToPos(x, "x") - left);
    for (const column of columns)
      column.forEach((y, i) => {
        const distance = y === null || y === undefined ? Infinity : Math.hypot(across[i], u.valToPos(y, "y") - top);
        if (distance < least) [best, least] = [i, distance];
      });
    return best;
  }

  // -- colours are read when a chart is drawn, so another theme means drawing again
  const all = new Set();
  const forgetRemoved = () => all.forEach((u) => u.root.isConnected || all.delete(u));
  const repaint = () => { forgetRemoved(); all.forEach((u) => u.redraw(false, true)); };
  new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  function create(element, spec) {
    const drawn = spec.series.filter((series) => series.x.length);
    const bottomUp = [...drawn].reverse(); // uPlot draws later ones on top
    const clean = (values, log) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const columns = bottomUp.map((series) => [series.x, clean(series.y, spec.y.log)]);
    const isShared = columns.every(([x]) => x === columns[0][0]);
    const data = !columns.length ? [[], []] : isShared ? [columns[0][0], ...columns.map(([, y]) => y)] : uPlot.join(columns);
    const xRange = rangeOf(spec.x, columns.map(([x]) => x), 0), yRange = rangeOf(spec.y, columns.map(([, y]) => y), ROOM);
    const size = () => ({ width: element.clientWidth || 500, height: element.clientHeight || 220 });
    const { width, height } = size();
    const position = (index) => drawn.length - spec.series.slice(0, index).filter((series) => series.x.length).length;
    const tip = node("div", "tip");
    tip.setAttribute("role", "status");
    tip.hidden = true;
    let at = -1, chosen = null; // what is shown, and what a key chose

    function follow(u) {
      const { left } = u.cursor, idx = u.cursor.idxs[1] ?? u.cursor.idx;
      tip.hidden = idx === null || idx === undefined || !(left >= 0);
      if (tip.hidden) return;
      at = idx;
      fillTip(tip, u, spec, drawn, idx);
      const offset = u.over.offsetLeft, here = offset + u.valToPos(data[0][idx], "x"), room = element.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(here + 12 <= room ? here + 12 : here - 12 - tip.offsetWidth, room))}px`;
    }

    const u = new uPlot({
      width, height,
      padding: [10, 22, 0, spec.y.hidden ? 22 : 0],
      legend: { show: false },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: {
        x: { time: Boolean(spec.x.time), distr: spec.x.log ? 3 : 1, range: () => xRange },
        y: { distr: spec.y.log ? 3 : 1, range: () => yRange },
      },
      axes: [axisOf(spec.x, false, width), { ...axisOf(spec.y, true, height), show: !spec.y.hidden }],
      series: [{}, ...bottomUp.map((series) => {
        const look = LOOK[series.kind ?? "line"], isLone = series.y.filter((value) => value !== null).length === 1;
        const stroke = () => paint(series.colour ?? 1);
        return {
          ...look, stroke,
          fill: series.kind === "area" ? () => `${stroke()}2e` : undefined,
          points: { show: isLone, size: 7, fill: stroke, ...look.points, ...(series.size && { size: series.size }) },
        };
      })],
      bands: (spec.bands ?? []).map(({ upper, lower, colour }) => ({
        series: [position(upper), position(lower)], fill: () => `${paint(colour ?? 1)}2e`,
      })),
      cursor: {
        x: spec.nearest !== "point", y: false, drag: { x: false, y: false }, points: { size: 7 },
        dataIdx: (u, _, index) => chosen ?? (spec.nearest === "point" ? nearestPoint(u) : index),
      },
      hooks: { drawAxes: [(u) => drawLines(u, spec)], setCursor: [follow] },
    }, data, (u, begin) => { element.replaceChildren(u.root, tip); begin(); });
    forgetRemoved();
    all.add(u);

    function show(index) {
      chosen = index;
      u.setCursor({ left: u.valToPos(data[0][index], "x"), top: u.over.clientHeight / 3 });
      chosen = null;
    }
    const hide = () => { at = -1; u.setCursor({ left: -10, top: -10 }); };
    const listeners = {
      blur: hide,
      pointermove(event) { // uPlot listens to mice alone
        if (event.pointerType !== "mouse") u.setCursor({ left: event.clientX - u.over.getBoundingClientRect().left, top: 10 });
      },
      keydown(event) {
        const count = data[0].length, stride = Math.max(1, Math.round(count / (event.shiftKey ? 20 : 200)));
        const target = { ArrowLeft: at < 0 ? count - 1 : at - stride, ArrowRight: at < 0 ? 0 : at + stride, Home: 0, End: count - 1 }[event.key];
        if (event.key === "Escape") hide();
        if (target === undefined || !count) return;
        event.preventDefault();
        show(Math.max(0, Math.min(count - 1, target)));
      },
    };
    for (const [name, listener] of Object.entries(listeners)) element.addEventListener(name, listener);
    const resized = new ResizeObserver(() => { if (element.clientWidth && element.clientWidth !== u.width) u.setSize(size()); });
    resized.observe(element);

    return () => {
      for (const [name, listener] of Object.entries(listeners)) element.removeEventListener(name, listener);
      resized.disconnect();
      all.delete(u);
      u.destroy();
      tip.remove();
    };
  }

  return Object.assign((element, spec) => {
    let destroy = create(element, spec);
    return {
      update(next) { destroy(); destroy = create(element, next); },
      destroy: () => destroy(),
    };
  }, { formats, linearTicks, logTicks });
})();
globalThis.chart = chart;
