// What belongs to the span under the pointer: its outline, and arrows from what it waited for and to what it let start.

function drawOver(view) {
  const context = view.begin(view.over), { page } = view;
  if (!view.hover || !view.hover.table) return;
  const { lane, table, row } = view.hover, spans = page.tables[table];
  context.save();
  context.beginPath();
  context.rect(view.gutter, 0, view.plot, view.height);
  context.clip();
  context.strokeStyle = view.colours.text;
  context.lineWidth = 1.5;
  const place = page.lanes[lane], top = view.y(place.y), height = place.h * view.unit * 0.92;
  context.strokeRect(view.x(spans.start[row]), top, (spans.end[row] - spans.start[row]) * view.scale, height);
  const operation = table === "operations" ? row : spans.parent[row];
  if (operation >= 0 && page.tables.operations.kind[operation] < page.idle) drawArrows(view, context, operation);
  context.restore();
}

function drawArrows(view, context, operation) {
  const { operations } = view.page.tables;
  const arrow = (from, to, colour) => {
    const y = (row) => { const l = view.page.lanes[view.page.laneOf("operations", row)]; return view.y(l.y + l.h * 0.46); };
    const x0 = view.x(operations.end[from]), y0 = y(from), x1 = view.x(operations.start[to]), y1 = y(to);
    if (y0 === y1) return;
    const bend = Math.max(14, Math.min(60, Math.abs(y1 - y0) / 2));
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.8;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 7, y1 - 4);
    context.lineTo(x1 - 7, y1 + 4);
    context.fill();
  };
  if (operations.before[operation] >= 0) arrow(operations.before[operation], operation, view.colours.alarm);
  let left = 40;
  for (let i = 0; i < operations.count && left; i++) {
    if (operations.before[i] === operation) { arrow(operation, i, view.colours.accent); left--; }
  }
}
