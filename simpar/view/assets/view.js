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
    drawGrid(this, context);
    drawLanes(this, context);
    drawMarks(this, context);
    if (this.path) drawPath(this, context);
    drawNames(this, context);
    drawBelow(this);
    drawOver(this);
    byId("scale").textContent = `${this.page.count.toLocaleString("en-US")} spans · 1 px = ${timeText((this.to - this.from) / this.plot)}`;
  }

  // ---- the memory that is shown -------------------------------------------------------------------------------------

  memoryIndex() { return Math.max(0, this.page.memory.ranks.findIndex((rank) => rank.rank === this.memoryRank)); }

  held() {
    if (this.heldRank !== this.memoryRank) {
      this.heldRank = this.memoryRank;
      this.heldLevels = memoryLevels(this.page.columns, this.memoryIndex(), this.page.memory.categories.length);
    }
    return this.heldLevels;
  }
}
