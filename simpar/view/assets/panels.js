// The panels below the lanes: how much of their links communicators use, what a rank holds, and how far operations were mispredicted.

const BIN_PX = 3;

// Nanoseconds of its links that each span needs, as sums of those before it: bytes over capacity, or where nobody knows
// what links carry the time that it takes.
function needs(page, table) {
  const before = new Float64Array(table.count + 1);
  page.lanes.forEach(({ use }, lane) => {
    const perByte = new Map(use);
    for (let i = table.offset[lane]; i < table.offset[lane + 1]; i++) {
      const need = page.linkWord === "busy" ? table.end[i] - table.start[i] : 1e9 * (perByte.get(table.kind[i]) || 0) * table.nbytes[i];
      before[i + 1] = before[i] + need;
    }
  });
  return before;
}

// What a lane has needed of its links before an instant; a span spreads it evenly.
function neededUntil(table, lane, time) {
  const first = table.offset[lane], i = above(table.start, first, table.offset[lane + 1], time);
  if (i === first) return 0;
  const length = table.end[i - 1] - table.start[i - 1], ahead = Math.min(1, Math.max(0, table.end[i - 1] - time) / Math.max(length, 1));
  return table.needs[i] - table.needs[first] - ahead * (table.needs[i] - table.needs[i - 1]);
}

// Share of its links that a communicator uses in each bin of the window, on the mean of the ranks that have one.
function linkShares(page, from, to, bins) {
  const shares = new Map(), width = (to - from) / bins, { operations, kernels } = page.tables;
  page.communicators.forEach((ranks, name) => {
    const total = new Float64Array(bins);
    let weight = 0;
    ranks.forEach(({ lanes, replicas }) => {
      const busy = new Float64Array(bins);
      for (const lane of lanes) {
        // kernels on a lane with operations are parts of these
        const table = operations.offset[lane] === operations.offset[lane + 1] ? kernels : operations;
        let before = neededUntil(table, lane, from);
        for (let bin = 0; bin < bins; bin++) {
          const now = neededUntil(table, lane, from + (bin + 1) * width);
          busy[bin] += now - before;
          before = now;
        }
      }
      for (let bin = 0; bin < bins; bin++) {
        // streams of one communicator that are busy at once are busy once
        const share = busy[bin] / width;
        total[bin] += replicas * (page.linkWord === "busy" ? Math.min(1, share) : share);
      }
      weight += replicas;
    });
    shares.set(name, total.map((value) => value / weight));
  });
  return shares;
}

// What a rank holds after each of its events: times, and per event the level of every category.
function memoryLevels(columns, rank, categories) {
  const times = [], levels = [], now = new Float64Array(categories);
  let clock = 0;
  for (let i = 0; i < columns.memory_rank.length; i++) {
    if (columns.memory_rank[i] !== rank) continue;
    clock += columns.memory_gap[i];
    now[columns.memory_category[i]] += columns.memory_change[i];
    if (times.length && times[times.length - 1] === clock && clock === 0) levels[levels.length - 1] = now.slice();
    else { times.push(clock); levels.push(now.slice()); }
  }
  return { times: Float64Array.from(times), levels, totals: levels.map((level) => level.reduce((a, b) => a + b, 0)) };
}

// The colour of a stream, or else of its communicator.
function familyColour(colours, name) { return colours.families[name] || colours.families[name.split("_")[0]] || colours.faint; }

function drawLinks(context, page, frame, colours) {
  const bins = Math.max(1, Math.round(frame.width / BIN_PX));
  for (const [name, share] of linkShares(page, frame.from, frame.to, bins)) {
    context.strokeStyle = familyColour(colours, name);
    context.lineWidth = 1.3;
    context.beginPath();
    for (let bin = 0; bin < bins; bin++) {
      const y = frame.bottom - Math.min(1, share[bin]) * (frame.bottom - frame.top), x = frame.left + bin * frame.width / bins;
      if (bin) context.lineTo(x, y); else context.moveTo(x, y);
      context.lineTo(x + frame.width / bins, y);
    }
    context.stroke();
  }
}

// Stacked categories, a column a pixel: the fullest instant of each, so that no peak is lost.
function drawMemory(context, held, frame, highest, names, colours) {
  const scale = (frame.bottom - frame.top) / highest, columns = new Array(frame.width);
  let i = above(held.times, 0, held.times.length, frame.from) - 1;
  for (let x = 0; x < frame.width; x++) {
    const until = frame.from + (x + 1) * (frame.to - frame.from) / frame.width;
    let fullest = i;
    while (i + 1 < held.times.length && held.times[i + 1] < until) {
      i++;
      if (fullest < 0 || held.totals[i] > held.totals[fullest]) fullest = i;
    }
    columns[x] = fullest;
  }
  names.forEach((name, category) => {
    context.fillStyle = colours.memory[name];
    for (let x = 0; x < frame.width; x++) {
      let width = 1;
      while (x + width < frame.width && columns[x + width] === columns[x]) width++;
      if (columns[x] >= 0) {
        const level = held.levels[columns[x]];
        let below = 0;
        for (let c = 0; c < category; c++) below += level[c];
        if (level[category]) context.fillRect(frame.left + x, frame.bottom - (below + level[category]) * scale, width, level[category] * scale);
      }
      x += width - 1;
    }
  });
}

// A stem for every operation: up where it was predicted too long, down where too short.
function drawErrors(context, columns, frame, most, colours) {
  const middle = (frame.top + frame.bottom) / 2, half = (frame.bottom - frame.top) / 2;
  const scale = frame.width / (frame.to - frame.from);
  for (let i = 0; i < columns.error_at.length; i++) {
    const at = columns.error_at[i];
    if (at < frame.from || at > frame.to) continue;
    const x = frame.left + (at - frame.from) * scale, error = columns.error[i];
    const y = middle - Math.max(-1, Math.min(1, error / most)) * half;
    context.fillStyle = error > 0 ? colours.long : colours.short;
    context.globalAlpha = 0.35;
    context.fillRect(x - 0.5, Math.min(y, middle), 1, Math.abs(y - middle));
    context.globalAlpha = 0.9;
    context.beginPath();
    context.arc(x, y, 2.4, 0, 7);
    context.fill();
    context.globalAlpha = 1;
  }
}
