"use strict";
// A heat map of RTTs on a logarithmic scale; the pair under the pointer, or chosen with the arrow keys, is described in words.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("matrix"), shown = document.getElementById("shown"), pair = document.getElementById("pair");
  const context = canvas.getContext("2d"), rows = data.sources.length, columns = data.destinations.length;
  const stops = heat.stops(data.ramp);
  const ratio = window.devicePixelRatio || 1, largest = 8192 / ratio;  // more pixels than browsers draw
  let chosen = null, cell, left, top_;

  const value = (at) => {
    if (shown.value === "width") return data.high[at] === null ? null : data.high[at] / data.low[at];
    if (shown.value === "best") return data.measured[at] ?? data.predicted[at];
    return data[shown.value][at];
  };
  const scale = () => (shown.value === "width" ? [1, 30] : data.scale);
  const colour = (ms) => {
    const [low, high] = scale();
    return heat.colour(ms, { low, high, stops });
  };
  const digits = (ms) => (ms < 9.95 ? ms.toFixed(1) : ms.toFixed(0));

  function draw() {
    const style = getComputedStyle(document.body), ink = style.getPropertyValue("--ink");
    const labelFont = `12px ${style.getPropertyValue("--mono")}`;
    context.font = labelFont;
    const widest = (names) => Math.ceil(Math.max(...names.map((name) => context.measureText(name).width))) + 8;
    const room = document.getElementById("scroll").clientWidth || window.innerWidth;
    const widthOf = widest(data.sources), heightOf = widest(data.destinations);
    cell = Math.floor(Math.min(Math.max((room - widthOf) / columns, rows * columns > 250000 ? 2 : 14), 44));
    left = cell >= 12 ? widthOf : 0;  // smaller cells have no labels: point at them
    top_ = cell >= 12 ? heightOf : 0;
    cell = Math.max(1, Math.min(cell, Math.floor((largest - left) / columns), Math.floor((largest - top_) / rows)));
    const [width, height] = [left + columns * cell, top_ + rows * cell];
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    context.scale(ratio, ratio);
    context.font = labelFont;
    context.fillStyle = ink;
    context.textBaseline = "middle";
    if (left) {
      context.textAlign = "right";
      data.sources.forEach((name, row) => context.fillText(name, left - 4, top_ + (row + 0.5) * cell));
      context.textAlign = "left";
      data.destinations.forEach((name, column) => {
        context.save();
        context.translate(left + (column + 0.5) * cell, top_ - 4);
        context.rotate(-Math.PI / 2);
        context.fillText(name, 0, 0);
        context.restore();
      });
    }
    context.textAlign = "center";
    for (let at = 0; at < rows * columns; at++) {
      const ms = value(at);
      if (ms === null) continue;
      const x = left + (at % columns) * cell, y = top_ + Math.floor(at / columns) * cell, { back, ink: text } = colour(ms);
      context.fillStyle = back;
      context.fillRect(x, y, cell, cell);
      context.strokeStyle = text;
      if (cell >= 8 && data.measured[at] !== null) context.strokeRect(x + 1.5, y + 1.5, cell - 3, cell - 3);
      if (cell >= 8 && data.measured[at] === null && data.extrapolating[at]) {
        context.globalAlpha = 0.5;
        context.beginPath();
        context.moveTo(x, y + cell);
        context.lineTo(x + cell, y);
        context.stroke();
        context.globalAlpha = 1;
      }
      context.fillStyle = text;
      if (cell >= 30) context.fillText(digits(ms), x + cell / 2, y + cell / 2);
    }
    if (chosen) {
      context.strokeStyle = ink;
      context.lineWidth = 3;
      context.strokeRect(left + chosen.column * cell, top_ + chosen.row * cell, cell, cell);
    }
    const [low, high] = scale();
    document.getElementById("legend").replaceChildren(...Array.from({ length: 9 }, (_, i) => {
      const ms = low * (high / low) ** (i / 8), step = document.createElement("span"), { back, ink: text } = colour(ms);
      step.style.background = back;
      step.style.color = text;
      step.textContent = digits(ms) + (shown.value === "width" ? " ×" : " ms");
      return step;
    }));
  }

  function choose(row, column) {
    if (row < 0 || column < 0 || row >= rows || column >= columns || (chosen && chosen.row === row && chosen.column === column)) return;
    chosen = { row, column };
    const at = row * columns + column, percent = (share) => `${+(100 * share).toPrecision(3)} %`;
    const parts = [`${data.sources[row]} → ${data.destinations[column]}:`];
    if (data.measured[at] !== null) parts.push(`measured ${data.measured[at]} ms,`);
    if (data.predicted[at] === null) parts.push("not predicted");
    else {
      const [low, high] = data.levels;
      parts.push(`predicted ${data.predicted[at]} ms, from ${data.low[at]} (${percent(low)}) to ${data.high[at]} (${percent(high)}), timeouts ${percent(data.p_failed[at])}`);
      if (data.extrapolating[at]) parts.push("— extrapolated");
    }
    pair.textContent = parts.join(" ");
  }

  canvas.addEventListener("pointermove", (event) => choose(Math.floor((event.offsetY - top_) / cell), Math.floor((event.offsetX - left) / cell)));
  canvas.addEventListener("pointerdown", draw);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { row, column } = chosen ?? { row: 0, column: 0 };
    choose(row + step[0], column + step[1]);
    draw();
  });
  shown.addEventListener("change", draw);
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
