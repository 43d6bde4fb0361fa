// The page: what the window shows, and how it follows the pointer, the wheel and the keys.

const LEAST_PX = 15, SHORT_PX = 2.5, RIGHT_PX = 18, TOP_PX = 17, AXIS_PX = 24, NAME_PX = 20, NUMBER_PX = 9, FONT = "system-ui, sans-serif";
const byId = (id) => document.getElementById(id);

class View {
  constructor(page) {
    this.page = page;
    this.from = 0;
    this.to = page.end;
    this.dark = page.dark;
    this.path = page.path.lane.length > 0 && page.path.lane.length <= 5000;
    this.hidden = new Uint8Array(page.kinds.length);
    this.memoryRank = page.memory ? page.memory.fullest : -1;
    this.hover = null;
    this.pending = false;
    this.folds = new Folds(page);
    this.canvas = byId("canvas");
    this.over = byId("over");
    this.below = byId("below");
    this.gutter = this.measureGutter();
  }

  get colours() { return this.page.palettes[this.dark ? "dark" : "light"]; }

  measureGutter() {
    const context = this.canvas.getContext("2d", { willReadFrequently: true });
    context.font = `10px ${FONT}`;
    const widest = (texts) => Math.max(0, ...texts.map((text) => context.measureText(text).width));
    const names = widest(this.page.lanes.map((lane) => lane.stream));
    context.font = `bold 12px ${FONT}`;
    return Math.round(Math.max(96, widest(this.page.groups.map((g) => g.title)) + NAME_PX + 2, widest(this.page.groups.map((g) => g.note)) * 0.86 + NAME_PX + 2) + names + 14);
  }

  // Folds what is shown, and shows what is folded.
  toggle(...which) {
    this.folds.toggle(which);
    byId("streams").classList.toggle("off", this.page.groups.some((group) => this.folds.has(group)));
    this.measure();
    this.ask();
  }

  // ---- geometry ----------------------------------------------------------------------------------------------------

  measure() {
    const ratio = window.devicePixelRatio || 1, box = byId("lanes"), head = document.querySelectorAll("header, nav");
    this.ratio = ratio;
    const room = window.innerHeight - [...head].reduce((sum, it) => sum + it.offsetHeight, 0);
    const forLanes = Math.max(140, room - this.placePanels(0).height);
    this.unit = Math.max(LEAST_PX, Math.min(52, (forLanes - TOP_PX - 6) / this.folds.total));
    const whole = Math.ceil(this.folds.total * this.unit + TOP_PX + 6);
    byId("space").style.height = `${whole}px`;
    box.style.height = `${Math.min(whole, forLanes)}px`;
    this.width = box.clientWidth;
    this.plot = Math.max(50, this.width - this.gutter - RIGHT_PX);
    this.height = box.clientHeight;
    for (const canvas of [this.canvas, this.over]) this.size(canvas, this.width, this.height);
    this.panels = this.placePanels(Math.max(0, forLanes - whole));
    this.size(this.below, this.width, this.panels.height);
  }

  size(canvas, width, height) {
    const w = Math.round(width * this.ratio), h = Math.round(height * this.ratio);
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
  }

  // Panels share what the lanes leave.
  placePanels(spare) {
    const found = {}, room = Math.min(1, Math.max(0.6, window.innerHeight / 900));
    const heights = { errors: [84, 0.3, 120], links: [56, 0.2, 60], memory: [110, 0.5, 160] };
    let y = AXIS_PX;
    for (const [name, [least, share, most]] of Object.entries(heights)) {
      if (!this.page.has[name]) continue;
      const height = Math.round(least * room + Math.min(most, share * spare));
      found[name] = { top: y + 22, bottom: y + 22 + height };
      y = found[name].bottom + 6;
    }
    found.height = y + 4;
    return found;
  }

  get scale() { return this.plot / (this.to - this.from); }
  x(ns) { return this.gutter + (ns - this.from) * this.scale; }
  y(level) { return this.folds.shown(level) * this.unit + TOP_PX - byId("lanes").scrollTop; }
  level(y) { return this.folds.level((y - TOP_PX + byId("lanes").scrollTop) / this.unit); }
  get fits() { return this.height >= this.folds.total * this.unit; }
  time(x) { return this.from + (x - this.gutter) / this.scale; }

  window(pixels = this.plot) {
    const px = (this.to - this.from) / pixels;
    return { from: this.from, to: this.to, short: SHORT_PX * px, open: OPEN_PX * px, idle: this.page.idle };
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  ask() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  begin(canvas) {
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    return context;
  }

  draw() {
    const context = this.begin(this.canvas);
    this.drawGrid(context);
    this.drawLanes(context);
    this.drawMarks(context);
    if (this.path) this.drawPath(context);
    this.drawNames(context);
    this.drawPanels();
    this.drawOver();
    byId("scale").textContent = `${this.page.count.toLocaleString("en-US")} spans · 1 px = ${timeText((this.to - this.from) / this.plot)}`;
  }

  drawGrid(context) {
    if (this.page.band) {
      const [from, to, tone] = this.page.band, a = Math.max(this.x(from), this.gutter), b = Math.min(this.x(to), this.gutter + this.plot);
      context.fillStyle = this.colours[tone];
      context.globalAlpha = 0.12;
      if (b > a) context.fillRect(a, 0, b - a, this.height);
      context.globalAlpha = 1;
    }
    context.fillStyle = this.colours.line;
    this.ticks = ticks(this.from, this.to, Math.max(3, this.plot / 110));
    for (const [at] of this.ticks.found) context.fillRect(Math.round(this.x(at)), 0, 1, this.height);
    for (const y of this.page.rules) {
      if (this.folds.hides(y)) continue;
      const at = Math.round(this.y(y));
      if (at >= 0 && at <= this.height) context.fillRect(0, at, this.width - RIGHT_PX, 1);
    }
  }

  drawLanes(context) {
    const { page } = this, span = this.window(), fills = new Map(), labels = [];
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.plot, this.height);
    context.clip();
    page.lanes.forEach((lane, index) => {
      const top = this.y(lane.y), height = lane.h * this.unit * 0.92;
      if (top > this.height || top + height < 0 || this.folds.hides(lane.y)) return;
      cutLane(page.tables, index, span, this.hidden, page.kinds.length, (kind, start, end, low, high, row, count, busy, table) => {
        const a = Math.max(this.x(start), this.gutter - 2), b = Math.min(this.x(end), this.gutter + this.plot + 2);
        const chunk = row >= 0 ? Math.max(0, page.tables[table].chunk[row]) : 0, key = kind * 64 + Math.min(63, chunk);
        let list = fills.get(key);
        if (!list) fills.set(key, list = []);
        // a hairline parts neighbours that are wide
        list.push(a, top + (1 - high) * height, Math.max(b - a - (row >= 0 && b - a > 5 ? 0.8 : 0), 0.7), (high - low) * height);
        if (row >= 0 && b - a >= NUMBER_PX && kind < page.idle) labels.push(table, row, a, b, top + (1 - high) * height, (high - low) * height, key);
      });
    });
    for (const [key, list] of [...fills].sort((a, b) => b[0] - a[0])) {
      context.fillStyle = this.fill(key);
      for (let i = 0; i < list.length; i += 4) context.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
    }
    this.drawLabels(context, labels);
    context.restore();
    this.rectangles = [...fills.values()].reduce((sum, list) => sum + list.length / 4, 0);
  }

  // Later model chunks of a rank are paler.
  fill(key) {
    const kind = key >> 6, chunk = key & 63, colour = this.colours.kinds[kind];
    if (!chunk || kind >= this.page.idle || this.page.chunks < 2) return colour;
    return mixed(colour, this.colours.surface, 0.4 * chunk / (this.page.chunks - 1));
  }

  drawLabels(context, labels) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    const { page } = this;
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
      context.fillStyle = readable(this.fill(key));
      context.fillText(text, (a + b) / 2, top + height / 2 + 0.5);
    }
  }

  drawMarks(context) {
    context.textBaseline = "alphabetic";
    context.textAlign = "right";
    context.font = `11px ${FONT}`;
    let taken = { y: -1, x: 0 };
    for (const { at, label, top, bottom, tone } of this.page.steps) {
      const x = this.x(at);
      if (x < this.gutter || x > this.gutter + this.plot + 1) continue;
      const low = this.y(top), high = this.y(bottom);
      context.strokeStyle = context.fillStyle = tone ? this.colours[tone] : this.colours.faint;
      context.lineWidth = 1.4;
      context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(x, low - 14);
      context.lineTo(x, high + 3);
      context.stroke();
      context.setLineDash([]);
      context.fillStyle = tone ? this.colours[tone] : this.colours.text;
      const width = context.measureText(label).width;
      const right = taken.y === low && x > taken.x - 10 && x - 5 - width < taken.right ? taken.x - 10 : x - 5;
      context.fillText(label, right, low - 5);
      taken = { y: low, x: right - width, right };
    }
  }

  drawPath(context) {
    const { lane, start, end } = this.page.path, { lanes } = this.page;
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.plot, this.height);
    context.clip();
    context.strokeStyle = this.colours.alarm;
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.beginPath();
    let drawn = false;
    for (let i = above(end, 0, end.length, this.from); i < end.length && start[i] < this.to; i++) {
      const y = this.y(lanes[lane[i]].y) + 0.5, a = this.x(start[i]), b = this.x(end[i]);
      if (drawn) context.lineTo(a, y); else context.moveTo(a, y);
      context.lineTo(b, y);
      drawn = true;
    }
    context.stroke();
    context.restore();
  }

  drawNames(context) {
    const { page } = this;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = this.colours.faint;
    for (const lane of page.lanes) {
      const size = Math.min(10, lane.h * this.unit * 0.98);
      context.font = `${size}px ${FONT}`;
      if (size >= 7 && !this.folds.hides(lane.y)) context.fillText(lane.stream, this.gutter - 7, this.y(lane.y + lane.h * 0.46));
    }
    context.textAlign = "left";
    for (const group of page.groups) {
      if (this.folds.hides(group.top)) continue;
      const top = this.y(group.top), bottom = this.y(group.bottom), middle = (top + bottom) / 2, two = bottom - top >= 27 && group.note;
      if (this.folds.can(group)) this.drawFold(context, two ? middle - 7 : middle, this.folds.has(group));
      context.font = `bold 12px ${FONT}`;
      context.fillStyle = group.rank === this.memoryRank && page.groups.length > 1 && page.memory ? this.colours.accent : this.colours.text;
      context.fillText(group.title, NAME_PX, two ? middle - 7 : middle);
      const beside = NAME_PX + context.measureText(group.title).width + 5;
      context.font = `10px ${FONT}`;
      context.fillStyle = this.colours.faint;
      if (two) context.fillText(group.note, NAME_PX, middle + 7);
      else if (group.count > 1) context.fillText(`×${group.count.toLocaleString("en-US")}`, beside, middle);
    }
    context.font = `bold 12px ${FONT}`;
    for (const title of page.titles) {
      const y = this.y(title.top + 0.45);
      if (this.folds.can(title)) this.drawFold(context, y, this.folds.has(title));
      context.fillStyle = this.colours.text;
      context.fillText(title.text, NAME_PX, y);
    }
  }

  // A triangle that points down at what is open, and right at what is folded.
  drawFold(context, y, folded) {
    context.fillStyle = this.colours.faint;
    context.beginPath();
    for (const [a, b] of [[-3, -4], [4, 0], [-3, 4]]) context.lineTo(NAME_PX - 9 + (folded ? a : b), y + (folded ? b : a));
    context.fill();
  }

  drawPanels() {
    const context = this.begin(this.below), { page, panels, colours } = this;
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const [at, text] of this.ticks.found) {
      context.fillStyle = colours.line;
      context.fillRect(Math.round(this.x(at)), 0, 1, panels.height);
      context.fillStyle = colours.faint;
      context.fillText(text, this.x(at), 6);
    }
    context.textAlign = "left";
    context.fillText(`time (${this.ticks.unit})`, 10, 6);
    const frame = (panel) => ({ left: this.gutter, width: Math.round(this.plot), from: this.from, to: this.to, ...panel });
    if (panels.errors) {
      const most = page.errors.most;
      this.panelFrame(context, panels.errors, page.errors.title, [[0, `+${Math.round(100 * most)} %`], [0.5, "0"], [1, `−${Math.round(100 * most)} %`]]);
      drawErrors(context, page.columns, frame(panels.errors), most, colours);
    }
    if (panels.links) {
      this.panelFrame(context, panels.links, `links ${page.linkWord}`, [[0, "100 %"], [1, "0"]]);
      drawLinks(context, page, frame(panels.links), colours);
      this.keys(context, panels.links, [...page.communicators.keys()].map((name) => [name, colours.families[name.split("_")[0]] || colours.faint]));
    }
    if (panels.memory) this.drawMemoryPanel(context, frame(panels.memory));
  }

  drawMemoryPanel(context, frame) {
    const { page, panels, colours } = this, { categories, capacity } = page.memory, held = this.held();
    const highest = 1.08 * Math.max(capacity || 0, ...page.memory.ranks.map((rank) => rank.peak));
    const rank = page.memory.ranks[this.memoryIndex()];
    this.panelFrame(context, panels.memory, `memory of ${rank.title}`, [[0, bytesText(highest)], [1, "0"]]);
    drawMemory(context, held, frame, highest, categories, colours);
    const used = categories.filter((_, c) => held.levels.some((level) => level[c] > 0));
    this.keys(context, panels.memory, used.map((name) => [name, colours.memory[name]]));
    if (!capacity) return;
    const y = frame.bottom - capacity / highest * (frame.bottom - frame.top);
    context.strokeStyle = context.fillStyle = colours.alarm;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(frame.left, y);
    context.lineTo(frame.left + frame.width, y);
    context.stroke();
    context.setLineDash([]);
    context.textAlign = "right"; // the panel's title is at the left
    context.textBaseline = "bottom";
    context.fillText(`capacity ${bytesText(capacity)}`, frame.left + frame.width - 4, y - 1);
  }

  memoryIndex() { return Math.max(0, this.page.memory.ranks.findIndex((rank) => rank.rank === this.memoryRank)); }

  held() {
    if (this.heldRank !== this.memoryRank) {
      this.heldRank = this.memoryRank;
      this.heldLevels = memoryLevels(this.page.columns, this.memoryIndex(), this.page.memory.categories.length);
    }
    return this.heldLevels;
  }

  panelFrame(context, panel, title, marks) {
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.font = `bold 11px ${FONT}`;
    context.fillStyle = this.colours.text;
    context.fillText(title, this.gutter, panel.top - 4);
    panel.titleEnd = this.gutter + context.measureText(title).width + 16;
    context.font = `10px ${FONT}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const [at, text] of marks) {
      const y = panel.top + at * (panel.bottom - panel.top);
      context.fillStyle = this.colours.line;
      context.fillRect(this.gutter, Math.round(y), this.plot, 1);
      context.fillStyle = this.colours.faint;
      context.fillText(text, this.gutter - 7, y);
    }
  }

  keys(context, panel, entries) {
    let x = panel.titleEnd;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.font = `11px ${FONT}`;
    for (const [name, colour] of entries) {
      context.fillStyle = colour;
      context.fillRect(x, panel.top - 14, 9, 9);
      context.fillStyle = this.colours.faint;
      context.fillText(name, x + 13, panel.top - 9);
      x += 26 + context.measureText(name).width;
    }
  }

  // ---- what belongs to the span under the pointer ------------------------------------------------------------------

  drawOver() {
    const context = this.begin(this.over), { page } = this;
    if (!this.hover || !this.hover.table) return;
    const { lane, table, row } = this.hover, spans = page.tables[table];
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.plot, this.height);
    context.clip();
    context.strokeStyle = this.colours.text;
    context.lineWidth = 1.5;
    const place = page.lanes[lane], top = this.y(place.y), height = place.h * this.unit * 0.92;
    context.strokeRect(this.x(spans.start[row]), top, (spans.end[row] - spans.start[row]) * this.scale, height);
    const operation = table === "operations" ? row : spans.parent[row];
    if (operation >= 0 && page.tables.operations.kind[operation] < page.idle) this.drawArrows(context, operation);
    context.restore();
  }

  drawArrows(context, operation) {
    const { operations } = this.page.tables;
    const arrow = (from, to, colour) => {
      const y = (row) => { const l = this.page.lanes[this.page.laneOf("operations", row)]; return this.y(l.y + l.h * 0.46); };
      const x0 = this.x(operations.end[from]), y0 = y(from), x1 = this.x(operations.start[to]), y1 = y(to);
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
    if (operations.before[operation] >= 0) arrow(operations.before[operation], operation, this.colours.alarm);
    let left = 40;
    for (let i = 0; i < operations.count && left; i++) {
      if (operations.before[i] === operation) { arrow(operation, i, this.colours.accent); left--; }
    }
  }
}
