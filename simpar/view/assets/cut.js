// Level of detail for a window of time: parents first, then clusters of neighbours that are too short to see.
// A cluster is drawn as stacked kinds; width times height is the time that it spends in each of them.

const OPEN_PX = 110; // an operation of this width shows its kernels

// First row in [low, high) whose value is above x.
function above(values, low, high, x) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1; else high = middle;
  }
  return low;
}

// Gathers neighbours that are too short to see, and emits them as stacked kinds.
// emit(kind, start, end, low, high, row or -1, spans merged, share of the cluster's width that is busy)
class Cluster {
  constructor(window, kinds, low, high, emit) {
    Object.assign(this, { window, kinds, low, high, emit, time: new Float64Array(kinds), count: 0, from: 0, until: 0, only: -1 });
  }

  close(table) {
    const { time, kinds, low, high, from, emit } = this;
    if (this.count === 1 && this.only >= 0) {
      emit(table.kind[this.only], table.start[this.only], table.end[this.only], low, high, this.only, 1, 1);
    } else if (this.count) {
      const width = Math.max(this.until - from, 1);
      let busy = 0, level = low;
      for (let k = 0; k < this.window.idle; k++) busy += time[k];
      for (let k = 0; k < kinds; k++) {
        if (!time[k]) continue;
        const top = level + (high - low) * time[k] / width;
        emit(k, from, this.until, level, top, -1, this.count, busy / width);
        level = top;
      }
    }
    time.fill(0);
    this.count = 0;
  }

  // Whether something that starts at a is no part of the cluster any more; `other` if it belongs to something else.
  ends(a, other) {
    const { short } = this.window, width = this.until - this.from;
    return this.count && (a - this.until >= short || (width >= short && other) || width >= 2 * short);
  }

  open(a, row) {
    if (!this.count) {
      this.from = this.until = a;
      this.only = row;
    }
  }
}

// Rows [first, last) of a table, as rectangles between the heights low and high of their lane.
function cutRows(table, first, last, window, hidden, kinds, low, high, emit) {
  const { start, end, kind, parent, microbatch } = table, cluster = new Cluster(window, kinds, low, high, emit);
  let lastParent = -1, lastBatch = -1;
  for (let i = first; i < last && start[i] < window.to; i++) {
    const k = kind[i], a = start[i], b = end[i];
    if (hidden[k]) continue;
    if (b - a >= window.short) {
      cluster.close(table);
      emit(k, a, b, low, high, i, 1, 1);
      continue;
    }
    if (cluster.ends(a, parent[i] !== lastParent || microbatch[i] !== lastBatch)) cluster.close(table);
    cluster.open(a, i);
    cluster.time[k] += b - a;
    cluster.until = Math.max(cluster.until, b);
    cluster.count++;
    lastParent = parent[i];
    lastBatch = microbatch[i];
  }
  cluster.close(table);
}

// A lane of kernels without operations: families of one operation are whole until they are wide enough to open.
function cutFamilies(tables, lane, window, hidden, kinds, emit) {
  const { kernels, families } = tables, cluster = new Cluster(window, kinds, 0, 1, emit);
  const last = families.lanes[lane + 1];
  for (let f = above(families.end, families.lanes[lane], last, window.from); f < last && families.start[f] < window.to; f++) {
    const a = families.start[f], b = families.end[f], rows = families.last[f] - families.first[f];
    if (b - a >= window.open || (rows === 1 && b - a >= window.short)) {
      cluster.close(kernels);
      const from = above(kernels.end, families.first[f], families.last[f], window.from);
      cutRows(kernels, from, families.last[f], window, hidden, kinds, 0, 1, emit);
      continue;
    }
    if (cluster.ends(a, true) || (cluster.count && b - a >= window.short)) cluster.close(kernels);
    let shown = false;
    for (let k = 0; k < kinds; k++) {
      const time = hidden[k] ? 0 : families.time[f * kinds + k];
      if (!time) continue;
      cluster.open(a, rows === 1 ? families.first[f] : -1);
      cluster.time[k] += time;
      shown = true;
    }
    if (shown) {
      cluster.until = Math.max(cluster.until, b);
      cluster.count += rows;
    }
    if (b - a >= window.short) cluster.close(kernels);
  }
  cluster.close(kernels);
}

// Kernels of an operation that lie on its own lane: rows [first, last) of the kernels.
function kernelsOf(tables, lane, row) {
  const { operations, kernels } = tables, low = kernels.offset[lane], high = kernels.offset[lane + 1];
  return [above(kernels.start, low, high, operations.start[row] - 0.5),
    above(kernels.start, low, high, operations.end[row] - 0.5)];
}

// All rectangles of a lane in a window {from, to, short, open, idle}: emit gets the table's name as its last argument.
function cutLane(tables, lane, window, hidden, kinds, emit) {
  const { operations, kernels } = tables;
  const first = operations.offset[lane], last = operations.offset[lane + 1];
  if (first === last) {
    cutFamilies(tables, lane, window, hidden, kinds, (...it) => emit(...it, "kernels"));
    return;
  }
  cutRows(operations, above(operations.end, first, last, window.from), last, window, hidden, kinds, 0, 1,
    (kind, start, end, low, high, row, count, busy) => {
      if (row >= 0 && kind < window.idle && end - start >= window.open) {
        const [a, b] = kernelsOf(tables, lane, row);
        if (b - a > 1) {
          emit(kind, start, end, 0.66, 1, row, 1, 1, "operations");
          cutRows(kernels, Math.max(a, above(kernels.end, a, b, window.from)), b, window, hidden, kinds, 0, 0.64,
            (...it) => emit(...it, "kernels"));
          return;
        }
      }
      emit(kind, start, end, low, high, row, count, busy, "operations");
    });
}
