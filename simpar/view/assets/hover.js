// The text beside the pointer, and what the pointer, the wheel and the keys do.

// {lane, table, row} of a span, {lane} alone between spans, or null.
function under(view, px, py) {
  const { page } = view;
  if (px < view.gutter || px > view.gutter + view.plot) return null;
  const level = view.level(py), time = view.time(px);
  const lane = page.lanes.findIndex((it) => level >= it.y && level < it.y + it.h);
  if (lane < 0) return null;
  const slack = 1.5 / view.scale;
  const find = (name, low, high) => {
    const table = page.tables[name];
    const row = above(table.end, low, high, time - slack);
    if (row < high && table.start[row] <= time + slack) {
      const better = row + 1 < high && table.end[row] < time && table.start[row + 1] <= time ? row + 1 : row;
      return { lane, table: name, row: better };
    }
    return { lane };
  };
  const { operations, kernels } = page.tables;
  if (operations.offset[lane] === operations.offset[lane + 1]) return find("kernels", kernels.offset[lane], kernels.offset[lane + 1]);
  const found = find("operations", operations.offset[lane], operations.offset[lane + 1]);
  if (found.table && operations.kind[found.row] < page.idle
    && (operations.end[found.row] - operations.start[found.row]) * view.scale >= OPEN_PX) {
    const [a, b] = kernelsOf(page.tables, lane, found.row);
    if (b - a > 1 && (level - page.lanes[lane].y) / page.lanes[lane].h > 0.34) return find("kernels", a, b);
  }
  return found;
}

function hoverText(view, hit) {
  const { page } = view, lane = page.lanes[hit.lane], where = escaped(lane.where);
  if (!hit.table) return where;
  const spans = page.tables[hit.table], i = hit.row, kind = spans.kind[i], length = spans.end[i] - spans.start[i];
  const { position, unit } = view.ticks, name = spans.name[i] < page.names.length ? page.names[spans.name[i]] : "";
  const lines = [`<b><i style="background:${view.colours.kinds[kind]}"></i>${escaped(page.kinds[kind].label)}</b> ${timeText(length)}`,
    where, `${position(spans.start[i])} → ${position(spans.end[i])} ${unit}`];
  if (kind >= page.idle) {
    if (name) lines.push(`waits for ${escaped(name)}`);
    return lines.join("<br>");
  }
  const what = name && name.replaceAll("_", " ") !== page.kinds[kind].label.replaceAll("-", " ") ? [escaped(name)] : [];
  for (const [word, value] of [["microbatch", spans.microbatch[i]], ["chunk", spans.chunk[i]], ["layer", spans.layer[i]]]) {
    if (value >= 0) what.push(`${word} ${value}`);
  }
  if (what.length) lines.push(what.join(" · "));
  const seconds = length * 1e-9, nbytes = spans.nbytes[i], flop = spans.flop[i];
  if (nbytes > 0) lines.push(bytesText(nbytes) + (seconds ? ` · ${digits(nbytes / seconds / 1e9)} GB/s` : ""));
  if (flop > 0) lines.push(rateText(flop, "FLOP") + (seconds ? ` · ${digits(flop / seconds / 1e12)} TFLOP/s` : ""));
  if (hit.table === "operations" && spans.before[i] >= 0) lines.push(`<small>red: what let it start · blue: what it let start</small>`);
  return lines.join("<br>");
}

function panelText(view, px, py) {
  const { page, panels, plot, gutter } = view;
  if (px < gutter || px > gutter + plot) return "";
  const time = view.time(px), inside = (panel) => panel && py >= panel.top && py <= panel.bottom;
  if (inside(panels.memory)) {
    const held = view.held(), i = above(held.times, 0, held.times.length, time) - 1;
    if (i < 0) return "";
    const lines = page.memory.categories.map((name, c) => [name, held.levels[i][c]]).filter(([, bytes]) => bytes > 0)
      .map(([name, bytes]) => `<i style="background:${view.colours.memory[name]}"></i>${name} ${bytesText(bytes)}`);
    return [`<b>${bytesText(held.totals[i])}</b>`, ...lines].join("<br>");
  }
  if (inside(panels.links)) {
    const half = 2 / view.scale, lines = [];
    for (const [name, [share]] of linkShares(page, Math.max(0, time - half), Math.min(page.end, time + half), 1)) {
      lines.push(`<i style="background:${familyColour(view.colours, name)}"></i>${name} ${page.linkWord === "busy" ? "busy" : "uses"} ${Math.round(100 * share)} %`);
    }
    return lines.join("<br>");
  }
  if (inside(panels.errors)) {
    const { error_at: at, error, error_row: row } = page.columns, near = 6 / view.scale;
    let best = -1, distance = Infinity;
    for (let i = above(at, 0, at.length, time - near); i < at.length && at[i] <= time + near; i++) {
      const y = (panels.errors.top + panels.errors.bottom) / 2
        - Math.max(-1, Math.min(1, error[i] / page.errors.most)) * (panels.errors.bottom - panels.errors.top) / 2;
      const far = Math.hypot((at[i] - time) * view.scale, y - py);
      if (far < distance) [best, distance] = [i, far];
    }
    if (best < 0) return "";
    const lane = page.laneOf(page.errors.table, row[best]);
    return `<b>${error[best] > 0 ? "+" : "−"}${Math.abs(100 * error[best]).toFixed(1)} %</b><br>${hoverText(view, { lane, table: page.errors.table, row: row[best] })}`;
  }
  return "";
}

function showTip(html, x, y) {
  const tip = byId("tip");
  tip.style.display = html ? "block" : "none";
  if (!html) return;
  tip.innerHTML = html;
  const right = x + 16 + tip.offsetWidth > window.innerWidth, low = y + 16 + tip.offsetHeight > window.innerHeight;
  tip.style.left = `${right ? x - 12 - tip.offsetWidth : x + 14}px`;
  tip.style.top = `${low ? y - 10 - tip.offsetHeight : y + 14}px`;
}

// Keeps a window inside the step, with a little room around it, and no narrower than a nanosecond per pixel.
function show(view, from, to) {
  const room = 0.02 * view.page.end, least = Math.min(view.page.end, 100);
  const width = Math.min(Math.max(to - from, least), view.page.end + 2 * room);
  const start = Math.max(-room, Math.min(from, view.page.end + room - width));
  view.from = start;
  view.to = start + width;
  view.ask();
}

function zoom(view, factor, px) {
  const time = view.time(px);
  show(view, time - (time - view.from) * factor, time + (view.to - time) * factor);
}

// What a name at the left stands for at a height: a title, or a group of lanes.
function nameAt(view, y) {
  const level = view.level(y);
  return view.page.titles.find((it) => level >= it.top && level < it.top + 1)
    || view.page.groups.find((it) => level >= it.top && level <= it.bottom);
}

// The triangle of a rank folds its streams, its name shows its memory; a title folds all below it.
function pressName(view, x, y) {
  const { page } = view, found = nameAt(view, y);
  if (!found) return;
  showTip("");
  if (view.folds.can(found) && (x < NAME_PX || !("rank" in found))) view.toggle(found);
  else if (page.memory && page.memory.ranks.some((rank) => rank.rank === found.rank)) {
    view.memoryRank = found.rank;
    view.ask();
  }
}

function attach(view) {
  const { page } = view, lanes = byId("lanes"), stages = [lanes, view.below];
  let drag = null;
  const local = (event, box) => { const at = box.getBoundingClientRect(); return [event.clientX - at.left, event.clientY - at.top]; };
  for (const box of stages) {
    box.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x] = local(event, box), step = event.deltaMode ? 16 : 1;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = (event.deltaX || event.deltaY) * step / view.scale;
        show(view, view.from + by, view.to + by);
      } else if (event.altKey) lanes.scrollTop += event.deltaY * step;
      else zoom(view, Math.exp(event.deltaY * step * 0.0018), Math.max(x, view.gutter));
    }, { passive: false });
    box.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: lanes.scrollTop, moved: false };
      box.setPointerCapture(event.pointerId);
    });
    box.addEventListener("pointermove", (event) => {
      const [x, y] = local(event, box);
      if (drag) {
        const by = (drag.x - event.clientX) / view.scale;
        drag.moved ||= Math.hypot(drag.x - event.clientX, drag.y - event.clientY) > 3;
        if (box === lanes) lanes.scrollTop = drag.top + drag.y - event.clientY;
        showTip("");
        show(view, drag.from + by, drag.to + by);
        return;
      }
      if (box === lanes) {
        view.hover = under(view, x, y);
        drawOver(view);
        const name = x <= view.gutter ? nameAt(view, y) : null;
        lanes.classList.toggle("names", !!name);
        if (name && name.note) {
          showTip(`<b>${escaped(name.title)}</b><br>${escaped(name.note)}`, event.clientX, event.clientY);
          return;
        }
        showTip(view.hover ? hoverText(view, view.hover) : "", event.clientX, event.clientY);
      } else showTip(panelText(view, x, y), event.clientX, event.clientY);
    });
    box.addEventListener("pointerup", (event) => {
      const [x, y] = local(event, box), clicked = drag && !drag.moved;
      drag = null;
      if (clicked && box === lanes && x <= view.gutter) pressName(view, x, y);
    });
    box.addEventListener("pointerleave", () => { if (!drag) { view.hover = null; drawOver(view); showTip(""); } });
    box.addEventListener("dblclick", () => show(view, 0, page.end));
  }
  lanes.addEventListener("scroll", () => view.ask());
  const moves = { a: [-0.2, 1], ArrowLeft: [-0.2, 1], d: [0.2, 1], ArrowRight: [0.2, 1], w: [0, 0.7], "+": [0, 0.7], s: [0, 1 / 0.7], "-": [0, 1 / 0.7] };
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = moves[event.key];
    if (move) {
      const width = view.to - view.from, middle = (view.from + view.to) / 2 + move[0] * width;
      show(view, middle - width * move[1] / 2, middle + width * move[1] / 2);
    } else if (event.key === "0") show(view, 0, page.end);
    else if (event.key === "c") byId("path").click();
    else if (event.key === "f") byId("streams").click();
    else if (event.key === "l") byId("theme").click();
    else return;
    event.preventDefault();
  });
  // at once: a canvas is empty after its size has changed
  new ResizeObserver(() => { view.measure(); view.draw(); }).observe(document.body);
}
