// Builds the page from its contents: the heading, the legend, the buttons, and the view.

function fill(page) {
  document.title = page.title;
  byId("title").textContent = page.title;
  byId("notes").textContent = page.notes.join(" · ");
  byId("tiles").replaceChildren(...page.headline.map(([name, value]) => {
    const tile = document.createElement("div"), strong = document.createElement("b");
    strong.textContent = value;
    tile.append(strong, name);
    return tile;
  }));
}

function legend(view) {
  const { page } = view, present = new Uint8Array(page.kinds.length);
  for (const { kind } of [page.tables.operations, page.tables.kernels]) for (let i = 0; i < kind.length; i++) present[kind[i]] = 1;
  const entries = [...present.keys()].filter((kind) => present[kind]);
  const buttons = entries.map((kind) => {
    const button = document.createElement("button"), mark = document.createElement("i");
    button.append(mark, page.kinds[kind].label);
    button.title = "click: hide or show · double click: show nothing else";
    button.addEventListener("click", () => { view.hidden[kind] ^= 1; update(); });
    button.addEventListener("dblclick", () => {
      const alone = entries.every((other) => view.hidden[other] === (other === kind ? 0 : 1));
      entries.forEach((other) => { view.hidden[other] = alone || other === kind ? 0 : 1; });
      update();
    });
    return button;
  });
  const update = () => {
    buttons.forEach((button, i) => {
      button.firstChild.style.background = view.colours.kinds[entries[i]];
      button.classList.toggle("off", !!view.hidden[entries[i]]);
    });
    view.ask();
  };
  byId("legend").replaceChildren(...buttons);
  return update;
}

function paint(page, dark) {
  for (const [name, value] of Object.entries(page.palettes[dark ? "dark" : "light"])) {
    if (typeof value === "string") document.documentElement.style.setProperty(`--${name}`, value);
  }
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
}

function savePicture(view) {
  const whole = document.createElement("canvas"), context = whole.getContext("2d"), head = 64 * view.ratio;
  whole.width = view.canvas.width;
  whole.height = head + view.canvas.height + view.below.height;
  context.fillStyle = view.colours.surface;
  context.fillRect(0, 0, whole.width, whole.height);
  context.scale(view.ratio, view.ratio);
  context.fillStyle = view.colours.text;
  context.font = `bold 16px ${FONT}`;
  context.fillText(view.page.title, 10, 24);
  context.font = `12px ${FONT}`;
  context.fillText([...view.page.headline.map((pair) => pair.join(" ")), ...view.page.notes].join(" · "), 10, 46);
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.drawImage(view.canvas, 0, head);
  context.drawImage(view.below, 0, head + view.canvas.height);
  const link = document.createElement("a");
  link.href = whole.toDataURL("image/png");
  link.download = "timeline.png";
  link.click();
}

function communicators(page) {
  const found = new Map();
  page.lanes.forEach((lane, index) => {
    if (!lane.link) return;
    if (!found.has(lane.link)) found.set(lane.link, new Map());
    const ranks = found.get(lane.link), key = lane.rank;
    if (!ranks.has(key)) ranks.set(key, { lanes: [], replicas: lane.replicas });
    ranks.get(key).lanes.push(index);
  });
  return found;
}

async function start() {
  const page = JSON.parse(byId("contents").textContent);
  page.dark ??= matchMedia("(prefers-color-scheme: dark)").matches;
  fill(page);
  paint(page, page.dark);
  page.columns = await unpack(byId("columns").textContent, page.manifest);
  page.tables = { operations: spanTable(page.columns, "operations_"), kernels: spanTable(page.columns, "kernels_") };
  page.tables.families = familiesOf(page.tables.kernels, page.tables.operations, page.kinds.length);
  page.path = { lane: page.columns.path_lane, start: page.columns.path_start, end: page.columns.path_end };
  page.communicators = communicators(page);
  for (const table of [page.tables.operations, page.tables.kernels]) table.needs = needs(page, table);
  page.has = { links: page.communicators.size > 0, memory: !!page.memory, errors: !!page.errors };
  page.laneOf = (table, row) => {
    const { offset } = page.tables[table];
    return above(offset, 0, offset.length, row) - 1;
  };
  const view = new View(page), update = legend(view);
  byId("theme").addEventListener("click", () => { view.dark = !view.dark; paint(page, view.dark); update(); });
  byId("path").addEventListener("click", (event) => { view.path = !view.path; event.currentTarget.classList.toggle("off", !view.path); view.ask(); });
  byId("path").classList.toggle("off", !view.path);
  byId("path").hidden = !page.path.lane.length;
  byId("streams").addEventListener("click", () => view.toggle(...view.folds.streams));
  byId("streams").hidden = !page.groups.some((group) => view.folds.can(group));
  byId("all").addEventListener("click", () => show(view, 0, page.end));
  byId("picture").addEventListener("click", () => savePicture(view));
  update();
  view.measure();
  if (!view.fits) view.toggle(...view.folds.streams);
  view.draw();
  attach(view);
  document.body.classList.add("ready");
  // what tests and timings read
  window.simpar = { view, page, show: (from, to) => show(view, from, to), opened: performance.now(),
    cut: (lane, pixels) => {
      const found = [];
      cutLane(page.tables, lane, view.window(pixels), view.hidden, page.kinds.length, (...it) => found.push(it));
      return found;
    } };
}

start().catch((problem) => { byId("title").textContent = `This page needs a current browser: ${problem}`; });
