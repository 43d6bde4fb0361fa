// The page of a sweep: table, selectors and plots of its plans, and the timeline of the chosen one in a frame.

const byId = (id) => document.getElementById(id);

async function inflated(id) {
  const stream = new Blob([bytesOf(byId(id).textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

class Page {
  constructor(data) {
    this.data = data;
    this.columns = JSON.parse(byId("columns").textContent);
    const has = (key) => data.rows.some((row) => row[key] !== undefined);
    this.figures = FIGURES.filter(([key]) => has(key) && (key !== "gpus" || new Set(data.rows.map((row) => row.gpus ?? 0).filter(Boolean)).size > 1));
    this.state = { data, dark: data.dark ?? matchMedia("(prefers-color-scheme: dark)").matches,
      shown: data.rows.map((_, i) => i), chosen: -1, lines: false, x: "step_time_s",
      y: "memory_bytes", colour: has("cost_per_step") ? "cost_per_step" : "mfu" };
    this.filters = data.fields.map(() => null);
    this.sorted = { key: "step_time_s", up: true };
    this.plots = new Plots(byId("plot"), this.state);
  }

  // ---- selectors -----------------------------------------------------------------------------------------------------

  fillSelectors() {
    byId("notes").textContent = this.data.notes.join(" · ");
    byId("selectors").replaceChildren(...this.data.fields.map((field, n) => {
      const label = document.createElement("label"), select = document.createElement("select"), values = valuesOf(this.data, n);
      select.append(new Option("any", ""), ...values.map((value, i) => new Option(plain(value), String(i))));
      select.addEventListener("change", () => {
        this.filters[n] = select.value === "" ? null : JSON.stringify(values[+select.value]);
        this.filter();
      });
      label.append(`${field.split(".").pop().replaceAll("_", " ")} `, select);
      return label;
    }));
    for (const [id, key] of [["x", "x"], ["y", "y"], ["c", "colour"]]) {
      byId(id).replaceChildren(...this.figures.map(([name, title]) => new Option(title, name)));
      byId(id).value = this.state[key];
      byId(id).addEventListener("change", () => { this.state[key] = byId(id).value; this.plots.draw(); });
    }
  }

  filter() {
    const fits = (row) => this.filters.every((wanted, n) => wanted === null || JSON.stringify(row.plan[n]) === wanted);
    this.state.shown = this.data.rows.map((_, i) => i).filter((i) => fits(this.data.rows[i]));
    this.fillTable();
    if (!this.state.shown.includes(this.state.chosen)) this.choose(this.fastest()); else this.plots.draw();
  }

  fastest() {
    const { rows } = this.data, timed = this.state.shown.filter((i) => rows[i].step_time_s !== undefined);
    const order = timed.sort((a, b) => (rows[a].fits === false) - (rows[b].fits === false)
      || rows[a].step_time_s - rows[b].step_time_s || rows[a].memory_bytes - rows[b].memory_bytes);
    return order.find((i) => this.data.timelines[i]) ?? order[0] ?? -1;
  }

  // ---- table ---------------------------------------------------------------------------------------------------------

  fillHead() {
    const columns = [...this.data.fields.map((field, n) => [n, field.split(".").pop().replaceAll("_", " ")]), ...this.figures];
    byId("head").replaceChildren(...columns.map(([key, title]) => {
      const head = document.createElement("th");
      head.textContent = title;
      head.addEventListener("click", () => {
        this.sorted = { key, up: this.sorted.key === key ? !this.sorted.up : true };
        this.fillHead();
        this.fillTable();
      });
      head.classList.toggle("sorted", key === this.sorted.key);
      return head;
    }));
  }

  fillTable() {
    const { rows } = this.data, { key, up } = this.sorted, of = (i) => typeof key === "number" ? rows[i].plan[key] : rows[i][key];
    const order = [...this.state.shown].sort((a, b) => {
      const p = of(a), q = of(b);
      if (p === undefined || q === undefined) return (p === undefined) - (q === undefined);
      const by = typeof p === "number" && typeof q === "number" ? p - q : String(p).localeCompare(String(q));
      return up ? by : -by;
    });
    byId("rows").replaceChildren(...order.map((i) => this.tableRow(i)));
  }

  tableRow(i) {
    const row = this.data.rows[i], line = document.createElement("tr"), cells = row.plan.map(plain);
    line.dataset.row = i;
    line.classList.toggle("chosen", i === this.state.chosen);
    line.classList.toggle("misfit", row.fits === false);
    line.title = row.error || (row.fits === false ? "does not fit in memory" : "");
    if (!row.error) cells.push(...this.figures.map(([key, , text]) => row[key] === undefined ? "" : text(row[key])));
    line.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    if (row.error) {
      line.append(Object.assign(document.createElement("td"), { textContent: row.error, className: "error", colSpan: this.figures.length }));
    }
    return line;
  }

  // ---- the chosen plan -------------------------------------------------------------------------------------------------

  choose(i) {
    this.state.chosen = i;
    byId("rows").querySelectorAll("tr").forEach((line) => line.classList.toggle("chosen", +line.dataset.row === i));
    byId("rows").querySelector("tr.chosen")?.scrollIntoView({ block: "nearest" });
    this.plots.draw();
    this.showTimeline();
  }

  showTimeline() {
    const { chosen } = this.state, said = this.data.timelines[chosen], none = byId("none");
    none.style.display = said ? "none" : "flex";
    if (!said) {
      none.textContent = chosen < 0 ? "no plan" : this.data.rows[chosen].error || "this page has no timeline of this plan";
      return;
    }
    const contents = { ...said, ...this.data.shared, dark: this.state.dark };
    const text = JSON.stringify(contents).replaceAll("<", "\\u003c");
    byId("timeline").srcdoc = this.data.frame.replace("@CONTENTS@", () => text).replace("@COLUMNS@", () => this.columns[chosen]);
  }

  // ---- events --------------------------------------------------------------------------------------------------------

  attach() {
    byId("rows").addEventListener("click", (event) => {
      const line = event.target.closest("tr");
      if (line) this.choose(+line.dataset.row);
    });
    byId("plot").addEventListener("click", (event) => { if (event.target.dataset.row) this.choose(+event.target.dataset.row); });
    byId("plot").addEventListener("pointermove", (event) => this.tip(event));
    byId("plot").addEventListener("pointerleave", () => { byId("tip").style.display = "none"; });
    for (const id of ["points", "lines"]) {
      byId(id).addEventListener("click", () => {
        this.state.lines = id === "lines";
        byId("points").classList.toggle("on", !this.state.lines);
        byId("lines").classList.toggle("on", this.state.lines);
        byId("axes").style.visibility = this.state.lines ? "hidden" : "";
        this.plots.draw();
      });
    }
    byId("reset").addEventListener("click", () => {
      this.filters.fill(null);
      byId("selectors").querySelectorAll("select").forEach((select) => { select.value = ""; });
      this.filter();
    });
    byId("theme").addEventListener("click", () => { this.state.dark = !this.state.dark; this.paint(); this.showTimeline(); });
    window.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], lines = [...byId("rows").children];
      if (!step || event.target.tagName === "SELECT" || !lines.length) return;
      const at = lines.findIndex((line) => +line.dataset.row === this.state.chosen);
      this.choose(+lines[Math.max(0, Math.min(lines.length - 1, at + step))].dataset.row);
      event.preventDefault();
    });
    this.attachGrip();
    new ResizeObserver(() => this.plots.draw()).observe(byId("right"));
  }

  attachGrip() {
    const grip = byId("grip"), frame = byId("timeline");
    grip.addEventListener("pointerdown", (event) => { grip.setPointerCapture(event.pointerId); frame.style.pointerEvents = "none"; });
    grip.addEventListener("pointermove", (event) => {
      if (!grip.hasPointerCapture(event.pointerId)) return;
      const main = document.querySelector("main"), height = event.clientY - main.getBoundingClientRect().top;
      main.style.flexBasis = `${Math.max(120, Math.min(window.innerHeight - 200, height))}px`;
    });
    grip.addEventListener("pointerup", () => { frame.style.pointerEvents = ""; });
  }

  tip(event) {
    const tip = byId("tip"), row = this.data.rows[event.target.dataset.row];
    tip.style.display = row ? "block" : "none";
    if (!row) return;
    const lines = this.figures.filter(([key]) => row[key] !== undefined).map(([key, title, text]) => `${title} ${text(row[key])}`);
    if (row.fits === false) lines.push("does not fit in memory");
    tip.innerHTML = `<b>${escaped(row.text)}</b><br>${lines.map(escaped).join("<br>")}`;
    const right = event.clientX + 20 + tip.offsetWidth > window.innerWidth;
    tip.style.left = `${right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 14}px`;
    tip.style.top = `${event.clientY + 14}px`;
  }

  paint() {
    for (const [name, value] of Object.entries(this.plots.colours)) {
      if (typeof value === "string") document.documentElement.style.setProperty(`--${name}`, value);
    }
    document.documentElement.style.colorScheme = this.state.dark ? "dark" : "light";
    this.plots.draw();
  }
}

async function start() {
  const page = new Page(await inflated("contents"));
  page.fillSelectors();
  page.fillHead();
  page.fillTable();
  page.paint();
  page.attach();
  page.choose(page.fastest());
  document.body.classList.add("ready");
  window.simpar = { page, opened: performance.now() }; // what tests and timings read
}

start().catch((problem) => { byId("title").textContent = `This page needs a current browser: ${problem}`; });
