// What each stream does, one row a stream, and when compute waits.

const ROW = 26;
const PHASES = { forward: "#A9BACB", backward: "#66809B", update: "#C9B3A3" };
const RECOMPUTED = "#D08770";

// Dust is what has no pixel of its own: by pixel, how much of it is taken.
function settle(dust, left, wide) {
  const at = Math.floor(left);
  dust.set(at, Math.min(1, (dust.get(at) || 0) + wide));
}
function drawDust(pen, dust, top, high, least) {
  for (const [at, share] of dust) {
    pen.globalAlpha = Math.max(least, share);
    pen.fillRect(at, top, 1, high);
  }
  pen.globalAlpha = 1;
}

class StreamView {
  constructor(views) {
    this.views = views;
    this.rows = [...views.run.streams, "waiting"];
    this.sheet = new Sheet("Streams", this.rows.length * ROW + 6, views.help);
  }
  // Transfers have the colour of what they move; ops that of their phase, or of their layer where layers have colours.
  colourOf(event) {
    const { run, step } = this.views;
    const { groups, of } = this.views.grouping;
    const verb = run.verbs[run.verb[event]], target = run.target[event];
    if (run.stream[event] > 0) return groups[of(target)].colour;
    if (this.views.mode === "layer") return groups[of(-1 - target)].colour;
    return verb === "recompute" ? RECOMPUTED : PHASES[step.ops.phase[target]];
  }
  passes(event) {
    const { run, step, filter } = this.views;
    if (!filter) return true;
    return filter.has(run.stream[event] > 0 ? step.layerOf(run.target[event]) : step.ops.layer[run.target[event]]);
  }
  draw() {
    const { views, sheet } = this;
    const pen = sheet.pen(sheet.picture);
    pen.textAlign = "right";
    this.rows.forEach((row, at) => {
      pen.fillStyle = colour("faint");
      pen.fillRect(GUTTER, at * ROW + 4, sheet.plot, ROW - 4);
      pen.fillStyle = colour("muted");
      pen.fillText(row, GUTTER - 8, at * ROW + 4 + (ROW - 4) / 2);
    });
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, sheet.plot, sheet.height);
    pen.clip();
    views.run.eventsOf.forEach((events, stream) => this.row(pen, events, stream));
    this.stalls(pen);
    pen.restore();
  }
  // Events that have a pixel, one by one; the others by how much of each pixel they take.
  row(pen, events, stream) {
    const { views } = this;
    const top = stream * ROW + 4, high = ROW - 4;
    const dust = new Map();
    const [x0, x1] = views.window;
    for (const event of events) {
      const [begun, ended] = views.run.eventPlace(event, views.axis);
      if (ended < x0) continue;
      if (begun > x1) break;
      const left = views.px(begun), wide = views.px(ended) - left;
      const fill = this.colourOf(event);
      const key = this.passes(event) ? fill : `${fill}40`;
      if (wide < 1) {
        if (!dust.has(key)) dust.set(key, new Map());
        settle(dust.get(key), left, wide);
        continue;
      }
      pen.fillStyle = key;
      pen.fillRect(left, top, wide > 3 ? wide - 0.5 : wide, high);
      if (views.run.verbs[views.run.verb[event]] === "recompute" && wide > 3) {
        pen.fillStyle = patterned(pen, 1, "rgb(0 0 0 / 35%)");
        pen.fillRect(left, top, wide - 0.5, high);
      }
      const name = stream > 0 ? views.step.nameOf(views.run.target[event]) : views.step.ops.name[views.run.target[event]];
      if (wide > 40 && this.passes(event)) {
        pen.fillStyle = inkOn(fill);
        pen.textAlign = "left";
        label(pen, name, Math.max(left, GUTTER) + 4, top + high / 2, Math.min(left + wide, views.right) - Math.max(left, GUTTER) - 8);
      }
    }
    for (const [fill, pixels] of dust) {
      pen.fillStyle = fill;
      drawDust(pen, pixels, top, high, 0.25);
    }
  }
  stalls(pen) {
    const { views } = this;
    const top = (this.rows.length - 1) * ROW + 4, high = ROW - 4;
    const dust = new Map();
    pen.fillStyle = colour("stall");
    for (let i = 0; i < views.run.stall_begun.length; i++) {
      const [left, right] = this.stallPlace(i);
      if (right < GUTTER || left > views.right) continue;
      const wide = right - left;
      if (wide < 1) {
        settle(dust, left, wide);
        continue;
      }
      pen.fillStyle = colour("stall");
      pen.fillRect(left, top, wide, high);
      pen.globalAlpha = 0.25; // and on the stream that waits
      pen.fillRect(left, 4, wide, high);
      pen.globalAlpha = 1;
      if (wide > 60) {
        pen.fillStyle = "#ffffff";
        pen.textAlign = "left";
        label(pen, views.run.stall_cause[i], Math.max(left, GUTTER) + 4, top + high / 2, Math.min(right, views.right) - Math.max(left, GUTTER) - 8);
      }
    }
    pen.fillStyle = colour("stall");
    drawDust(pen, dust, top, high, 0.2);
  }
  // The stall at a pixel: waits that are narrow are met beside it too.
  stallAt(x, reach) {
    const { run } = this.views;
    for (let i = 0; i < run.stall_begun.length; i++) {
      const [left, right] = this.stallPlace(i);
      if (x >= left - reach && x <= Math.max(right, left + reach) + reach) return i;
    }
    return null;
  }
  // What a stall is found as: with the tensor that it waits for, which all views then mark.
  foundStall(stall, position) {
    const name = this.views.run.stall_cause[stall].replace(/^\S+ of /, "");
    const tensor = this.views.step.tensors.name.indexOf(name);
    return { position, tensor: tensor < 0 ? null : tensor, stall };
  }
  stallPlace(stall) {
    const { run, axis } = this.views;
    return [run.stall_begun[stall], run.stall_ended[stall]].map((seconds) => this.views.px(run.place(seconds, axis)));
  }
  over(pen) {
    const { views } = this;
    const { run, step } = views;
    const wanted = [views.selected, views.hovered?.tensor].filter((tensor) => tensor !== null && tensor !== undefined);
    if (!wanted.length) return;
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    for (let event = 0; event < run.target.length; event++) {
      const [begun, ended] = run.eventPlace(event, views.axis);
      if (ended < views.window[0] || begun > views.window[1]) continue;
      const target = run.target[event], top = run.stream[event] * ROW + 4;
      const left = views.px(begun), wide = Math.max(2, views.px(ended) - left);
      if (run.stream[event] > 0) {
        if (wanted.includes(target)) pen.strokeRect(left, top + 1, wide, ROW - 6);
      } else if (wanted.some((tensor) => (tensor < 0 ? -1 - tensor === target : step.writes(target).includes(tensor)))) {
        pen.strokeRect(left, top + 1, wide, ROW - 6);
      } else if (wanted.some((tensor) => tensor >= 0 && step.reads(target).includes(tensor))) {
        pen.fillStyle = colour("ink");
        pen.fillRect(left, top + ROW - 8, wide, 3);
      }
    }
  }
  find(x, y) {
    const { views } = this;
    const { run } = views;
    const row = Math.floor((y - 2) / ROW);
    const at = views.at(x), position = run.positionAt(at, views.axis);
    if (row === this.rows.length - 1) {
      const stall = this.stallAt(x, 2);
      return stall === null ? { position, tensor: null } : this.foundStall(stall, position);
    }
    let best = null;
    for (const event of run.eventsOf[row] || []) {
      const [begun, ended] = run.eventPlace(event, views.axis);
      if (begun > at) break;
      if (ended >= at) best = event;
    }
    if (best === null) {
      const stall = row === 0 ? this.stallAt(x, 0) : null;
      return stall === null ? { position, tensor: null } : this.foundStall(stall, position);
    }
    if (row > 0) return { position, tensor: run.target[best], event: best };
    const made = [...views.step.writes(run.target[best])];
    const largest = made.reduce((a, b) => (a === null || views.step.tensors.nbytes[b] > views.step.tensors.nbytes[a] ? b : a), null);
    return { position, tensor: largest, event: best };
  }
}
