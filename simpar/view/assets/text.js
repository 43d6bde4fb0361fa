// Quantities as text, as simpar.units writes them.

function digits(value) {
  return value >= 999.5 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(3));
}

function timeText(ns) {
  if (ns === 0) return "0 s";
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) if (ns >= size * 0.9995) return `${digits(ns / size)} ${unit}`;
  return `${digits(ns)} ns`;
}

function bytesText(bytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= size) return `${digits(bytes / size)} ${unit}`;
  }
  return `${digits(bytes)} B`;
}

function rateText(value, unit) {
  for (const [prefix, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6]]) {
    if (value >= size) return `${digits(value / size)} ${prefix}${unit}`;
  }
  return `${digits(value)} ${unit}`;
}

// Ticks of an axis over [from, to] nanoseconds: their times, and their texts in a unit that fits.
function ticks(from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= rough);
  const [unit, size] = to - from < 2e6 ? ["µs", 1e3] : to - from < 2e9 ? ["ms", 1e6] : ["s", 1e9];
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) {
    found.push([n * step, (n * step / size).toLocaleString("en-US", { minimumFractionDigits: decimals,
      maximumFractionDigits: decimals })]);
  }
  return { found, unit, position: (ns) => (ns / size).toLocaleString("en-US", { minimumFractionDigits: decimals + 2,
    maximumFractionDigits: decimals + 2 }) };
}

function escaped(text) {
  return text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

function channels(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function mixed(first, second, share) {
  const b = channels(second);
  return "#" + channels(first).map((v, i) => Math.round(v + (b[i] - v) * share).toString(16).padStart(2, "0")).join("");
}

function readable(colour) {
  const [r, g, b] = channels(colour).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.22 ? "#FFFFFF" : "#111418";
}
