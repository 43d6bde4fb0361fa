// The time axis below the lanes, and the frames, titles and keys of the panels under it.

function drawBelow(view) {
  const context = view.begin(view.below), { page, panels, colours } = view;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const [at, text] of view.ticks.found) {
    context.fillStyle = colours.line;
    context.fillRect(Math.round(view.x(at)), 0, 1, panels.height);
    context.fillStyle = colours.faint;
    context.fillText(text, view.x(at), 6);
  }
  context.textAlign = "left";
  context.fillText(`time (${view.ticks.unit})`, 10, 6);
  const frame = (panel) => ({ left: view.gutter, width: Math.round(view.plot), from: view.from, to: view.to, ...panel });
  if (panels.errors) {
    const most = page.errors.most;
    drawPanelFrame(view, context, panels.errors, page.errors.title, [[0, `+${Math.round(100 * most)} %`], [0.5, "0"], [1, `−${Math.round(100 * most)} %`]]);
    drawErrors(context, page.columns, frame(panels.errors), most, colours);
  }
  if (panels.links) {
    drawPanelFrame(view, context, panels.links, `links ${page.linkWord}`, [[0, "100 %"], [1, "0"]]);
    drawLinks(context, page, frame(panels.links), colours);
    drawKeys(view, context, panels.links, [...page.communicators.keys()].map((name) => [name, familyColour(colours, name)]));
  }
  if (panels.memory) drawMemoryPanel(view, context, frame(panels.memory));
}

function drawMemoryPanel(view, context, frame) {
  const { page, panels, colours } = view, { categories, capacity } = page.memory, held = view.held();
  const highest = 1.08 * Math.max(capacity || 0, ...page.memory.ranks.map((rank) => rank.peak));
  const rank = page.memory.ranks[view.memoryIndex()];
  drawPanelFrame(view, context, panels.memory, `memory of ${rank.title}`, [[0, bytesText(highest)], [1, "0"]]);
  drawMemory(context, held, frame, highest, categories, colours);
  const used = categories.filter((_, c) => held.levels.some((level) => level[c] > 0));
  drawKeys(view, context, panels.memory, used.map((name) => [name, colours.memory[name]]));
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

function drawPanelFrame(view, context, panel, title, marks) {
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.font = `bold 11px ${FONT}`;
  context.fillStyle = view.colours.text;
  context.fillText(title, view.gutter, panel.top - 4);
  panel.titleEnd = view.gutter + context.measureText(title).width + 16;
  context.font = `10px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [at, text] of marks) {
    const y = panel.top + at * (panel.bottom - panel.top);
    context.fillStyle = view.colours.line;
    context.fillRect(view.gutter, Math.round(y), view.plot, 1);
    context.fillStyle = view.colours.faint;
    context.fillText(text, view.gutter - 7, y);
  }
}

function drawKeys(view, context, panel, entries) {
  let x = panel.titleEnd;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = `11px ${FONT}`;
  for (const [name, colour] of entries) {
    context.fillStyle = colour;
    context.fillRect(x, panel.top - 14, 9, 9);
    context.fillStyle = view.colours.faint;
    context.fillText(name, x + 13, panel.top - 9);
    x += 26 + context.measureText(name).width;
  }
}
