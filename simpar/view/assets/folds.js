// Folds: stretches of levels that are not shown. The streams of a rank may be folded, or all ranks below a title.

class Folds {
  constructor(page) {
    this.page = page;
    this.folded = new Set();
    this.stretches = []; // in order, apart
  }

  can({ fold }) { return fold[1] - fold[0] > 1e-9; }
  has(it) { return this.folded.has(it); }

  toggle(which) {
    for (const it of which) if (!this.folded.delete(it)) this.folded.add(it);
    this.stretches = [];
    for (const [from, to] of [...this.folded].map((it) => it.fold).sort((a, b) => a[0] - b[0])) {
      const last = this.stretches.at(-1);
      if (last && from <= last[1]) last[1] = Math.max(last[1], to); else this.stretches.push([from, to]);
    }
  }

  // Ranks whose streams change where all are to be shown, or if none is folded all to be folded.
  get streams() {
    const ranks = this.page.groups.filter((group) => this.can(group)), away = ranks.filter((it) => this.has(it));
    return away.length ? away : ranks;
  }

  // Height of all that is shown, and of what is shown above a level.
  get total() { return this.shown(this.page.total); }
  shown(level) { return level - this.stretches.reduce((sum, [from, to]) => sum + Math.max(0, Math.min(level, to) - from), 0); }

  // The level that is shown at a height.
  level(shown) {
    for (const [from, to] of this.stretches) if (shown >= from) shown += to - from;
    return shown;
  }

  hides(level) { return this.stretches.some(([from, to]) => level >= from - 1e-9 && level < to - 1e-9); }
}
