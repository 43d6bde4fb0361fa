// The tables of a page: columns, byte-shuffled, deflated and in base64 (simpar/view/pack.py writes them).

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array,
  f4: Float32Array, f8: Float64Array };

async function unpack(text, manifest) {
  const packed = bytesOf(text);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const [name, type, count] of manifest) {
    const size = +type[1];
    const plain = new Uint8Array(size * count);
    for (let byte = 0; byte < size; byte++) {
      const from = at + byte * count;
      for (let i = 0, to = byte; i < count; i++, to += size) plain[to] = bytes[from + i];
    }
    at += size * count;
    columns[name] = type === "i8" ? wide(plain.buffer, count) : new ARRAYS[type](plain.buffer);
  }
  return columns;
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

// 64-bit integers as doubles: exact up to 2^53.
function wide(buffer, count) {
  const low = new Uint32Array(buffer), high = new Int32Array(buffer), values = new Float64Array(count);
  for (let i = 0; i < count; i++) values[i] = high[2 * i + 1] * 4294967296 + low[2 * i];
  return values;
}

// Spans of one level, by lane and start: gaps and lengths become starts and ends, differences become rows.
function spanTable(columns, prefix) {
  const get = (name) => columns[prefix + name];
  const offset = get("offset"), gap = get("gap"), length = get("length"), count = length.length;
  const start = new Float64Array(count), end = new Float64Array(count);
  const parent = new Int32Array(count), before = new Int32Array(count);
  for (let lane = 0; lane + 1 < offset.length; lane++) {
    let clock = 0;
    for (let i = offset[lane]; i < offset[lane + 1]; i++) {
      clock += gap[i];
      start[i] = clock;
      clock += length[i];
      end[i] = clock;
    }
  }
  const steps = get("parent"), back = get("back");
  for (let i = 0, row = 0; i < count; i++) {
    row += steps[i];
    parent[i] = row;
    before[i] = back[i] === 0 ? -1 : i - back[i];
  }
  return { offset, start, end, parent, before, count, kind: get("kind"), name: get("name"), layer: get("layer"),
    microbatch: get("microbatch"), chunk: get("chunk"), nbytes: get("nbytes"), flop: get("flop") };
}

// Kernels of one operation in a row, on lanes that have no operations: seen from afar they are one thing.
function familiesOf(kernels, operations, kinds) {
  const first = [], lanes = new Int32Array(kernels.offset.length);
  for (let lane = 0; lane + 1 < kernels.offset.length; lane++) {
    lanes[lane] = first.length;
    if (operations.offset[lane] !== operations.offset[lane + 1]) continue;
    for (let i = kernels.offset[lane]; i < kernels.offset[lane + 1]; i++) {
      if (i === kernels.offset[lane] || kernels.parent[i] !== kernels.parent[i - 1] || kernels.parent[i] < 0) first.push(i);
    }
  }
  lanes[lanes.length - 1] = first.length;
  const count = first.length, last = new Int32Array(count), start = new Float64Array(count), end = new Float64Array(count);
  const time = new Float64Array(count * kinds);
  for (let lane = 0; lane + 1 < lanes.length; lane++) {
    for (let f = lanes[lane]; f < lanes[lane + 1]; f++) {
      last[f] = f + 1 < lanes[lane + 1] ? first[f + 1] : kernels.offset[lane + 1];
      start[f] = kernels.start[first[f]];
      end[f] = kernels.end[last[f] - 1];
      for (let i = first[f]; i < last[f]; i++) time[f * kinds + kernels.kind[i]] += kernels.end[i] - kernels.start[i];
    }
  }
  return { lanes, first, last, start, end, time };
}
