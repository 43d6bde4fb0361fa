// What is drawn of the lanes: grid, spans with their numbers, marks, the critical path, and the names at the left.

function drawGrid(view, context) {
  if (view.page.band) {
    const [from, to, tone] = view.page.band, a = Math.max(view.x(from), view.gutter), b = Math.min(view.x(to), view.gutter + view.plot);
    context.fillStyle = view.colours[tone];
    context.globalAlpha = 0.12;
    if (b > a) context.fillRect(a, 0, b - a, view.height);
    context.globalAlpha = 1;
  }
  context.fillStyle = view.colours.line;
  view.ticks = ticks(view.from, view.to, Math.max(3, view.plot / 110));
  for (const [at] of view.ticks.found) context.fillRect(Math.round(view.x(at)), 0, 1, view.height);
  for (const y of view.page.rules) {
    if (view.folds.hides(y)) continue;
    const at = Math.round(view.y(y));
    if (at >= 0 && at <= view.height) context.fillRect(0, at, view.width - RIGHT_PX, 1);
  }
}

function drawLanes(view, context) {
  const { page } = view, span = view.window(), fills = new Map(), labels = [];
  context.save();
  context.beginPath();
  context.rect(view.gutter, 0, view.plot, view.height);
  context.clip();
  page.lanes.forEach((lane, index) => {
    const top = view.y(lane.y), height = lane.h * view.unit * 0.92;
    if (top > view.height || top + height < 0 || view.folds.hides(lane.y)) return;
    cutLane(page.tables, index, span, view.hidden, page.kinds.length, (kind, start, end, low, high, row, count, busy, table) => {
      const a = Math.max(view.x(start), view.gutter - 2), b = Math.min(view.x(end), view.gutter + view.plot + 2);
      const chunk = row >= 0 ? Math.max(0, page.tables[table].chunk[row]) : 0, key = kind * 64 + Math.min(63, chunk);
      let list = fills.get(key);
      if (!list) fills.set(key, list = []);
      // a hairline parts neighbours that are wide
      list.push(a, top + (1 - high) * height, Math.max(b - a - (row >= 0 && b - a > 5 ? 0.8 : 0), 0.7), (high - low) * height);
      if (row >= 0 && b - a >= NUMBER_PX && kind < page.idle) labels.push(table, row, a, b, top + (1 - high) * height, (high - low) * height, key);
    });
  });
  for (const [key, list] of [...fills].sort((a, b) => b[0] - a[0])) {
    context.fillStyle = colourOf(view, key);
    for (let i = 0; i < list.length; i += 4) context.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
  }
  drawLabels(view, context, labels);
  context.restore();
  view.rectangles = [...fills.values()].reduce((sum, list) => sum + list.length / 4, 0);
}

// Later model chunks of a rank are paler.
function colourOf(view, key) {
  const kind = key >> 6, chunk = key & 63, colour = view.colours.kinds[kind];
  if (!chunk || kind >= view.page.idle || view.page.chunks < 2) return colour;
  return mixed(colour, view.colours.surface, 0.4 * chunk / (view.page.chunks - 1));
}

function drawLabels(view, context, labels) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  const { page } = view;
  for (let i = 0; i < labels.length; i += 7) {
    const [table, row, a, b, top, height, key] = labels.slice(i, i + 7), spans = page.tables[table];
    if (height < 9) continue;
    const room = b - a - 2, size = Math.min(11, height - 1), number = spans.microbatch[row];
    const kernel = table === "kernels" || number < 0 || spans.kind[row] >= page.communication;
    let text = kernel ? (spans.name[row] < page.names.length ? page.names[spans.name[row]].replaceAll("_", " ") : "") : String(number);
    if (kernel && text.length * size * 0.56 > room - 5) text = page.kinds[spans.kind[row]].label;
    if (!kernel && room > 90) text = `${page.kinds[spans.kind[row]].label} ${number}${page.chunks > 1 ? ` · chunk ${spans.chunk[row]}` : ""}`;
    const width = text.length * size * 0.56;
    if (!text || (width > room - (kernel ? 5 : 0) && (kernel || text.length * 7 * 0.56 > room))) continue;
    context.font = `${Math.max(7, Math.min(size, size * room / width))}px ${FONT}`;
    context.fillStyle = readable(colourOf(view, key));
    context.fillText(text, (a + b) / 2, top + height / 2 + 0.5);
  }
}

function drawMarks(view, context) {
  context.textBaseline = "alphabetic";
  context.textAlign = "right";
  context.font = `11px ${FONT}`;
  let taken = { y: -1, x: 0 };
  for (const { at, label, top, bottom, tone } of view.page.steps) {
    const x = view.x(at);
    if (x < view.gutter || x > view.gutter + view.plot + 1) continue;
    const low = view.y(top), high = view.y(bottom);
    context.strokeStyle = context.fillStyle = tone ? view.colours[tone] : view.colours.faint;
    context.lineWidth = 1.4;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(x, low - 14);
    context.lineTo(x, high + 3);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = tone ? view.colours[tone] : view.colours.text;
    const width = context.measureText(label).width;
    const right = taken.y === low && x > taken.x - 10 && x - 5 - width < taken.right ? taken.x - 10 : x - 5;
    context.fillText(label, right, low - 5);
    taken = { y: low, x: right - width, right };
  }
}

// Stretches in full, and what leads from one lane to another pale and thin, so that spans can be seen behind it.
function drawPath(view, context) {
  const { lane, start, end } = view.page.path, { lanes } = view.page, along = new Path2D(), across = new Path2D();
  let from = null;
  for (let i = above(end, 0, end.length, view.from); i < end.length && start[i] < view.to; i++) {
    const y = view.y(lanes[lane[i]].y) + 0.5, a = view.x(start[i]), b = view.x(end[i]);
    if (from !== null && from !== y) { across.moveTo(a, from); across.lineTo(a, y); }
    along.moveTo(a, y);
    along.lineTo(Math.max(b, a + 1), y);
    from = y;
  }
  context.save();
  context.beginPath();
  context.rect(view.gutter, 0, view.plot, view.height);
  context.clip();
  context.strokeStyle = view.colours.alarm;
  context.globalAlpha = 0.55;
  context.lineWidth = 1;
  context.stroke(across);
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.stroke(along);
  context.restore();
}

function drawNames(view, context) {
  const { page } = view;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillStyle = view.colours.faint;
  for (const lane of page.lanes) {
    const size = Math.min(10, lane.h * view.unit * 0.98);
    context.font = `${size}px ${FONT}`;
    if (size >= 7 && !view.folds.hides(lane.y)) context.fillText(lane.stream, view.gutter - 7, view.y(lane.y + lane.h * 0.46));
  }
  context.textAlign = "left";
  for (const group of page.groups) {
    if (view.folds.hides(group.top)) continue;
    const top = view.y(group.top), bottom = view.y(group.bottom), middle = (top + bottom) / 2, two = bottom - top >= 27 && group.note;
    if (view.folds.can(group)) drawFold(view, context, two ? middle - 7 : middle, view.folds.has(group));
    context.font = `bold 12px ${FONT}`;
    context.fillStyle = group.rank === view.memoryRank && page.groups.length > 1 && page.memory ? view.colours.accent : view.colours.text;
    context.fillText(group.title, NAME_PX, two ? middle - 7 : middle);
    const beside = NAME_PX + context.measureText(group.title).width + 5;
    context.font = `10px ${FONT}`;
    context.fillStyle = view.colours.faint;
    if (two) context.fillText(group.note, NAME_PX, middle + 7);
    else if (group.count > 1) context.fillText(`×${group.count.toLocaleString("en-US")}`, beside, middle);
  }
  context.font = `bold 12px ${FONT}`;
  for (const title of page.titles) {
    const y = view.y(title.top + 0.45);
    if (view.folds.can(title)) drawFold(view, context, y, view.folds.has(title));
    context.fillStyle = view.colours.text;
    context.fillText(title.text, NAME_PX, y);
  }
}

// A triangle that points down at what is open, and right at what is folded.
function drawFold(view, context, y, folded) {
  context.fillStyle = view.colours.faint;
  context.beginPath();
  for (const [a, b] of [[-3, -4], [4, 0], [-3, 4]]) context.lineTo(NAME_PX - 9 + (folded ? a : b), y + (folded ? b : a));
  context.fill();
}
