// Plans as points and as lines over parallel axes, in SVG.

const SVG = "http://www.w3.org/2000/svg";

// What plans are measured by: key, title, and how a value reads.
const FIGURES = [
  ["step_time_s", "step time", (v) => timeText(v * 1e9)],
  ["mfu", "MFU", (v) => `${(100 * v).toFixed(1)} %`],
  ["tokens_per_s", "tokens/s", (v) => rateText(v, "").trim()],
  ["memory_bytes", "memory", bytesText],
  ["bubble_fraction", "bubble", (v) => `${(100 * v).toFixed(1)} %`],
  ["exposed_communication_s", "exposed", (v) => timeText(v * 1e9)],
  ["cost_per_step", "cost/step", (v) => v.toFixed(v < 100 ? 2 : 0)],
  ["gpus", "GPUs", (v) => v.toLocaleString("en-US")],
];

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function rampAt(ramp, share) {
  return share < 0.5 ? mixed(ramp[0], ramp[1], 2 * share) : mixed(ramp[1], ramp[2], 2 * share - 1);
}

function rangeOf(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return high > low ? [low, high] : [low - Math.abs(low || 1) * 0.05, high + Math.abs(high || 1) * 0.05];
}

// Round marks of an axis, in the unit in which its values read.
function marks(key, [low, high], most) {
  const scale = { memory_bytes: 2 ** 30, mfu: 0.01, bubble_fraction: 0.01 }[key] || 1;
  const rough = (high - low) / scale / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= rough), found = [];
  for (let n = Math.ceil(low / scale / step); n * step * scale <= high; n++) found.push(n * step * scale);
  return found;
}

class Plots {
  constructor(svg, state) { Object.assign(this, { svg, state }); }

  draw() {
    this.svg.replaceChildren();
    this.width = this.svg.clientWidth;
    this.height = this.svg.clientHeight;
    if (this.width < 60 || this.height < 60) return;
    if (this.state.lines) this.drawLines(); else this.drawPoints();
  }

  colourOf(row) {
    const { data, colour, shown } = this.state, { ramp } = this.colours;
    const values = shown.map((i) => data.rows[i][colour]).filter((v) => v !== undefined), value = data.rows[row][colour];
    if (value === undefined || !values.length) return this.colours.faint;
    const [low, high] = rangeOf(values);
    return rampAt(ramp, (value - low) / (high - low));
  }

  get colours() { return this.state.data.palettes[this.state.dark ? "dark" : "light"]; }

  drawPoints() {
    const { data, x: kx, y: ky, shown, chosen } = this.state, box = { left: 74, right: this.width - 18, top: 14, bottom: this.height - 40 };
    const rows = shown.filter((i) => data.rows[i][kx] !== undefined && data.rows[i][ky] !== undefined);
    if (!rows.length) return;
    const wide = ([a, b]) => [a - (b - a) * 0.06, b + (b - a) * 0.08];
    const rx = wide(rangeOf(rows.map((i) => data.rows[i][kx]))), ry = wide(rangeOf(rows.map((i) => data.rows[i][ky])));
    const px = (v) => box.left + (v - rx[0]) / (rx[1] - rx[0]) * (box.right - box.left);
    const py = (v) => box.bottom - (v - ry[0]) / (ry[1] - ry[0]) * (box.bottom - box.top);
    const figure = (key) => FIGURES.find(([name]) => name === key);
    for (const mark of marks(kx, rx, Math.max(2, this.width / 110))) {
      element("line", { x1: px(mark), x2: px(mark), y1: box.top, y2: box.bottom, class: "grid" }, this.svg);
      element("text", { x: px(mark), y: box.bottom + 15, "text-anchor": "middle" }, this.svg, figure(kx)[2](mark));
    }
    for (const mark of marks(ky, ry, Math.max(2, this.height / 50))) {
      element("line", { x1: box.left, x2: box.right, y1: py(mark), y2: py(mark), class: "grid" }, this.svg);
      element("text", { x: box.left - 7, y: py(mark) + 4, "text-anchor": "end" }, this.svg, figure(ky)[2](mark));
    }
    element("text", { x: (box.left + box.right) / 2, y: this.height - 7, "text-anchor": "middle", class: "name" }, this.svg, figure(kx)[1]);
    element("text", { x: 13, y: (box.top + box.bottom) / 2, "text-anchor": "middle", class: "name",
      transform: `rotate(-90 13 ${(box.top + box.bottom) / 2})` }, this.svg, figure(ky)[1]);
    if (kx === "step_time_s" && ky === "memory_bytes") this.drawFront(rows, px, py);
    const best = new Set(data.front), order = [...rows].sort((a, b) => (a === chosen) - (b === chosen) || best.has(a) - best.has(b));
    for (const row of order) {
      const point = element("circle", { cx: px(data.rows[row][kx]), cy: py(data.rows[row][ky]), r: row === chosen ? 7 : 5,
        fill: this.colourOf(row), class: "point" }, this.svg);
      if (best.has(row)) point.classList.add("best");
      if (data.rows[row].fits === false) { point.classList.add("misfit"); point.removeAttribute("fill"); }
      if (row === chosen) point.classList.add("chosen");
      point.dataset.row = row;
    }
  }

  // Plans that none of the shown ones beats in both time and memory, joined by steps.
  drawFront(rows, px, py) {
    const { data } = this.state, fitting = rows.filter((i) => data.rows[i].fits !== false);
    let least = Infinity, path = "";
    for (const row of fitting.sort((a, b) => data.rows[a].step_time_s - data.rows[b].step_time_s)) {
      const { step_time_s: time, memory_bytes: memory } = data.rows[row];
      if (memory >= least) continue;
      path += path ? `H${px(time)}V${py(memory)}` : `M${px(time)} ${py(memory)}`;
      least = memory;
    }
    element("path", { d: path, class: "front" }, this.svg);
  }

  drawLines() {
    const { data, shown, chosen } = this.state, top = 48, bottom = this.height - 26;
    const rows = shown.filter((i) => data.rows[i].step_time_s !== undefined);
    if (!rows.length) return;
    const varied = data.fields.map((field, n) => [field, n]).filter(([, n]) => new Set(rows.map((i) => JSON.stringify(data.rows[i].plan[n]))).size > 1);
    const axes = varied.map(([field, n]) => {
      const values = valuesOf(data, n).filter((v) => rows.some((i) => JSON.stringify(data.rows[i].plan[n]) === JSON.stringify(v)));
      const at = new Map(values.map((value, i) => [JSON.stringify(value), i]));
      return { title: field.split(".").pop(), values: values.map((v, i) => [i, plain(v)]), range: [0, Math.max(1, values.length - 1)],
        of: (row) => values.length === 1 ? 0.5 : at.get(JSON.stringify(row.plan[n])) };
    });
    for (const [key, title, text] of FIGURES) {
      if (key === "tokens_per_s" || key === "exposed_communication_s") continue; // they say what others say
      const found = rows.map((i) => data.rows[i][key]);
      if (found.some((v) => v === undefined) || new Set(found).size < 2) continue;
      const range = rangeOf(found);
      axes.push({ title, values: [range[0], range[1]].map((v) => [v, text(v)]), range, of: (row) => row[key] });
    }
    const narrow = this.width / axes.length < 84;
    const last = axes.at(-1) ?? { title: "", values: [] }; // what stands beside and above it is to keep away from the edge
    const right = Math.max(24 + 6.2 * Math.max(0, ...last.values.map(([, text]) => text.length)), 12 + 3.4 * last.title.length);
    const x = (n) => 46 + n * (this.width - 46 - right) / Math.max(1, axes.length - 1);
    const y = (axis, v) => bottom - (v - axis.range[0]) / (axis.range[1] - axis.range[0]) * (bottom - top);
    for (const row of [...rows].sort((a, b) => (a === chosen) - (b === chosen))) {
      const d = axes.map((axis, n) => `${n ? "L" : "M"}${x(n)} ${y(axis, axis.of(data.rows[row]))}`).join("");
      const line = element("path", { d, class: "line", stroke: row === chosen ? this.colours.text : this.colourOf(row) }, this.svg);
      if (row === chosen) line.classList.add("chosen");
      line.dataset.row = row;
    }
    axes.forEach((axis, n) => {
      element("line", { x1: x(n), x2: x(n), y1: top, y2: bottom, class: "axis" }, this.svg);
      element("text", { x: x(n), y: narrow && n % 2 ? 28 : 13, "text-anchor": "middle", class: "name" }, this.svg, axis.title.replaceAll("_", " "));
      axis.values.forEach(([value, text]) => {
        element("text", { x: x(n) + 6, y: y(axis, value) + (value === axis.range[0] ? 12 : value === axis.range[1] ? -3 : 4) }, this.svg, text);
      });
    });
  }
}

function plain(value) {
  return value === null || value === undefined ? "–" : value === true ? "yes" : value === false ? "no" : String(value);
}

// The different values of a field, numbers in order before texts.
function valuesOf(data, n) {
  const found = [...new Map(data.rows.map((row) => [JSON.stringify(row.plan[n]), row.plan[n]])).values()];
  return found.sort((a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : (typeof a !== "number") - (typeof b !== "number") || String(a).localeCompare(String(b)));
}
