// The canvases of a step: memory, streams and addresses over one axis. Each has a picture, and above it a glass sheet
// for what follows the pointer, so that moving it draws little.

const GUTTER = 78;
const MARGIN = 12;
const ROW = 26;
const LEAST_BAND = 3;
const PHASES = { forward: "#A9BACB", backward: "#66809B", update: "#C9B3A3" };
const RECOMPUTED = "#D08770";

class Sheet {
  constructor(label, height, help) {
    this.height = height;
    this.picture = el("canvas", { "aria-hidden": "true" });
    this.glass = el("canvas", { "aria-hidden": "true" });
    this.element = el("div", { class: "view", tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": `${label}. ${help}` }, this.picture, this.glass);
    this.label = label;
  }
  fit(width) {
    this.width = width;
    this.ratio = devicePixelRatio || 1;
    this.element.style.height = `${this.height}px`;
    for (const canvas of [this.picture, this.glass]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(this.height * this.ratio);
    }
  }
  pen(canvas) {
    const pen = canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    return pen;
  }
  get plot() {
    return this.width - GUTTER - MARGIN;
  }
}

// A pattern in lines of `ink`, which tells a kind apart where colours do not.
const PATTERNS = new Map();
function patterned(pen, pattern, ink) {
  const key = `${pattern}${ink}`;
  if (!PATTERNS.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const line = tile.getContext("2d");
    line.strokeStyle = line.fillStyle = ink;
    line.beginPath();
    if (pattern === 1) line.moveTo(-2, 10), line.lineTo(10, -2), line.moveTo(-2, 2), line.lineTo(2, -2), line.moveTo(6, 10), line.lineTo(10, 6);
    if (pattern === 2) line.moveTo(-2, -2), line.lineTo(10, 10), line.moveTo(6, -2), line.lineTo(10, 2), line.moveTo(-2, 6), line.lineTo(2, 10);
    line.stroke();
    if (pattern === 3) line.fillRect(1, 1, 2, 2), line.fillRect(5, 5, 2, 2);
    PATTERNS.set(key, pen.createPattern(tile, "repeat"));
  }
  return PATTERNS.get(key);
}

// For each pixel of the width, the position at which most is on the device.
function columnsOf(run, total, axis, [x0, x1], width) {
  const found = new Int32Array(width).fill(-1);
  const edges = run.edges[axis];
  const scale = width / (x1 - x0);
  const last = Math.min(run.positions - 1, above(edges, x1));
  for (let p = Math.max(0, above(edges, x0) - 2); p <= last; p++) {
    if (edges[p + 1] < x0) continue;
    const from = Math.max(0, Math.floor((edges[p] - x0) * scale));
    const until = Math.min(width - 1, Math.max(from, Math.ceil((edges[p + 1] - x0) * scale) - 1));
    for (let c = from; c <= until; c++) if (found[c] < 0 || total[p] > total[found[c]]) found[c] = p;
  }
  return found;
}

function yAxis(pen, sheet, most, unit) {
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const value of ticks(0, most, sheet.height < 200 ? 3 : 5, unit)) {
    const y = Math.round(sheet.height - (value / most) * sheet.height) + 0.5;
    pen.strokeStyle = colour("faint");
    pen.beginPath();
    pen.moveTo(GUTTER, y);
    pen.lineTo(sheet.width - MARGIN, y);
    pen.stroke();
    pen.fillStyle = colour("muted");
    if (y > 8 && y < sheet.height - 4) pen.fillText(show(value, unit), GUTTER - 8, y);
  }
}

// Text where it fits, cut where it does not.
function label(pen, text, x, y, room) {
  if (room < 24) return;
  let shown = text;
  if (pen.measureText(text).width > room) {
    const letters = Math.floor((room / pen.measureText(text).width) * text.length) - 1;
    if (letters < 3) return;
    shown = `${text.slice(0, letters)}…`;
  }
  pen.fillText(shown, x, y);
}

const inkOn = (hex) => {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000000" : "#ffffff";
};

class MemoryView {
  constructor(views) {
    this.views = views;
    this.sheet = new Sheet("Memory over the step", 340, views.help);
  }
  y(nbytes) {
    return this.sheet.height - (nbytes / this.views.most) * this.sheet.height;
  }
  draw() {
    const { views, sheet } = this;
    const { run, grouping } = views;
    const pen = sheet.pen(sheet.picture);
    yAxis(pen, sheet, views.most, "bytes");
    this.least = (LEAST_BAND / sheet.height) * views.most;
    this.stack = run.stack(views.mode, grouping, this.least);
    this.columns = columnsOf(run, run.total, views.axis, views.window, sheet.plot);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, sheet.plot, sheet.height);
    pen.clip();
    const base = new Float64Array(this.columns.length);
    this.stack.sums.forEach((sum, group) => this.area(pen, sum, base, grouping.groups[group]));
    if (!views.moving) this.bands(pen);
    for (const other of views.compared) this.line(pen, other);
    pen.restore();
    this.marks(pen);
  }
  // One group, upon `base`, which it lifts. With a filter, what it does not let through is grey.
  area(pen, sum, base, group) {
    const { columns } = this;
    const path = new Path2D();
    const tops = new Float64Array(columns.length);
    let any = false;
    for (let c = 0; c < columns.length; c++) {
      const nbytes = columns[c] < 0 ? 0 : sum[columns[c]];
      any ||= nbytes > 0;
      tops[c] = base[c] + nbytes;
    }
    if (!any) return;
    path.moveTo(GUTTER, this.y(base[0]));
    for (let c = 0; c < columns.length; c++) path.lineTo(GUTTER + c, this.y(tops[c])), path.lineTo(GUTTER + c + 1, this.y(tops[c]));
    for (let c = columns.length - 1; c >= 0; c--) path.lineTo(GUTTER + c + 1, this.y(base[c])), path.lineTo(GUTTER + c, this.y(base[c]));
    pen.globalAlpha = this.views.filter ? 0.22 : 0.92;
    pen.fillStyle = group.colour;
    pen.fill(path);
    if (group.pattern) {
      pen.fillStyle = patterned(pen, group.pattern, "rgb(0 0 0 / 28%)");
      pen.fill(path);
    }
    pen.globalAlpha = 1;
    base.set(tops);
  }
  // Where the span lies in the stack, pixel by pixel: [column, bytes beneath it]. Large spans only.
  eachBand(visit) {
    const { columns, stack } = this;
    const { run } = this.views;
    const groups = stack.sums.length;
    const beneath = new Float64Array(columns.length);
    let group = -1;
    const rise = (until) => {
      for (; group < until; group++) {
        // Small spans lie upon the large ones of their group: the next group begins at the sum of those before.
        if (group + 1 < groups) {
          for (let c = 0; c < columns.length; c++) {
            let sum = 0;
            if (columns[c] >= 0) for (let before = 0; before <= group; before++) sum += stack.sums[before][columns[c]];
            beneath[c] = sum;
          }
        }
      }
    };
    const [first, last] = [columns.find((p) => p >= 0) ?? 0, columns.findLast((p) => p >= 0) ?? 0];
    for (const span of stack.large) {
      if (stack.group[span] > group) rise(stack.group[span]);
      if (run.start[span] > last || run.end[span] <= first) continue;
      const here = [];
      for (let c = 0; c < columns.length; c++) {
        if (columns[c] < run.start[span] || columns[c] >= run.end[span]) continue;
        here.push(c, beneath[c]);
        beneath[c] += run.nbytes[span];
      }
      if (here.length) visit(span, here);
    }
  }
  bands(pen) {
    const { run, grouping, filter, step } = this.views;
    pen.lineWidth = 1;
    this.eachBand((span, here) => {
      const passes = !filter || filter.has(step.layerOf(run.tensor[span]));
      const high = (run.nbytes[span] / this.views.most) * this.sheet.height;
      if (filter && passes) {
        pen.fillStyle = grouping.groups[this.stack.group[span]].colour;
        for (let i = 0; i < here.length; i += 2) pen.fillRect(GUTTER + here[i], this.y(here[i + 1] + run.nbytes[span]), 1, high);
      }
      if (here.length < 6) return; // outlines would hide what is so narrow
      pen.strokeStyle = colour("card");
      pen.globalAlpha = 0.55;
      pen.beginPath();
      for (let i = 0; i < here.length; i += 2) {
        const top = this.y(here[i + 1] + run.nbytes[span]);
        if (i === 0 || here[i - 2] !== here[i] - 1) pen.moveTo(GUTTER + here[i], this.y(here[i + 1])), pen.lineTo(GUTTER + here[i], top);
        pen.lineTo(GUTTER + here[i], top);
        pen.lineTo(GUTTER + here[i] + 1, top);
      }
      pen.stroke();
      pen.globalAlpha = 1;
      if (high >= 12 && passes) this.nameBand(pen, span, here, high);
    });
  }
  // The name stands in the longest stretch in which the band neither rises nor falls.
  nameBand(pen, span, here, high) {
    let [best, from] = [[0, 0], 0];
    for (let i = 2; i <= here.length; i += 2) {
      const goes = i < here.length && here[i] === here[i - 2] + 1 && Math.abs(here[i + 1] - here[i - 1]) < this.least;
      if (goes) continue;
      if (i - from > best[1] - best[0]) best = [from, i];
      from = i;
    }
    const { run, grouping, step } = this.views;
    pen.fillStyle = inkOn(grouping.groups[this.stack.group[span]].colour);
    pen.textAlign = "left";
    const x = GUTTER + here[best[0]];
    label(pen, step.nameOf(run.tensor[span]), x + 5, this.y(here[best[0] + 1]) - high / 2, (best[1] - best[0]) / 2 - 8);
  }
  // The memory of another run, as a line over the same time.
  line(pen, other) {
    const columns = columnsOf(other, other.total, this.views.axis, this.views.window, this.sheet.plot);
    pen.strokeStyle = colour("ink");
    pen.setLineDash([5, 3]);
    pen.lineWidth = 1.5;
    pen.beginPath();
    let pendown = false;
    columns.forEach((p, c) => {
      if (p < 0) return void (pendown = false);
      const y = this.y(other.total[p]);
      if (!pendown) pen.moveTo(GUTTER + c, y);
      pen.lineTo(GUTTER + c, y);
      pen.lineTo(GUTTER + c + 1, y);
      pendown = true;
    });
    pen.stroke();
    pen.setLineDash([]);
  }
  marks(pen) {
    const { views, sheet } = this;
    for (const mark of views.step.marks) {
      const y = Math.round(this.y(mark.at)) + 0.5;
      if (y < 0) continue;
      pen.strokeStyle = colour("ink");
      pen.setLineDash([8, 4]);
      pen.beginPath();
      pen.moveTo(GUTTER, y);
      pen.lineTo(sheet.width - MARGIN, y);
      pen.stroke();
      pen.setLineDash([]);
      this.tag(pen, `${mark.name} ${FORMATS.bytes(mark.at)}`, sheet.width - MARGIN - 4, y - 11, "right");
    }
    const x = views.px(views.run.edges[views.axis][views.run.peakAt]);
    if (x >= GUTTER && x <= sheet.width - MARGIN) {
      const y = this.y(views.run.peak);
      pen.fillStyle = colour("ink");
      pen.beginPath();
      pen.moveTo(x, y), pen.lineTo(x - 5, y - 8), pen.lineTo(x + 5, y - 8);
      pen.fill();
      const right = x > sheet.width * 0.7;
      this.tag(pen, `peak ${FORMATS.bytes(views.run.peak)}`, right ? x - 9 : x + 9, y - 13, right ? "right" : "left");
    }
  }
  // Words on a ground of their own, to be read upon anything.
  tag(pen, text, x, y, align) {
    const wide = pen.measureText(text).width + 8;
    pen.fillStyle = colour("card");
    pen.globalAlpha = 0.85;
    pen.fillRect(align === "right" ? x - wide + 4 : x - 4, Math.max(0, y - 8), wide, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("ink");
    pen.textAlign = align;
    pen.fillText(text, x, Math.max(8, y));
  }
  over(pen) {
    const { views } = this;
    const wanted = [views.selected, views.hovered?.tensor].filter((tensor) => tensor !== null && tensor !== undefined);
    if (!wanted.length || views.moving) return;
    pen.fillStyle = colour("ink");
    this.eachBand((span, here) => {
      const tensor = views.run.tensor[span];
      if (!wanted.includes(tensor)) return;
      const high = Math.max(2, (views.run.nbytes[span] / views.most) * this.sheet.height);
      for (let i = 0; i < here.length; i += 2) {
        pen.globalAlpha = tensor === views.selected ? 0.3 : 0.18;
        pen.fillRect(GUTTER + here[i], this.y(here[i + 1] + views.run.nbytes[span]), 1, high);
        pen.globalAlpha = 1;
        pen.fillRect(GUTTER + here[i], this.y(here[i + 1] + views.run.nbytes[span]), 1, 1.5);
        pen.fillRect(GUTTER + here[i], this.y(here[i + 1]) - 1.5, 1, 1.5);
      }
    });
  }
  find(x, y) {
    const position = this.columns[Math.floor(x - GUTTER)];
    if (position === undefined || position < 0) return null;
    let rest = ((this.sheet.height - y) / this.sheet.height) * this.views.most;
    for (const span of this.views.run.live(position, this.stack.order)) {
      rest -= this.views.run.nbytes[span];
      if (rest < 0) return { position, tensor: this.views.run.tensor[span] };
    }
    return { position, tensor: null };
  }
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
        const at = Math.floor(left);
        dust.get(key).set(at, Math.min(1, (dust.get(key).get(at) || 0) + wide));
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
      for (const [at, share] of pixels) {
        pen.globalAlpha = Math.max(0.25, share);
        pen.fillRect(at, top, 1, high);
      }
    }
    pen.globalAlpha = 1;
  }
  stalls(pen) {
    const { views } = this;
    const top = (this.rows.length - 1) * ROW + 4, high = ROW - 4;
    for (let i = 0; i < views.run.stall_begun.length; i++) {
      const [left, right] = this.stallPlace(i);
      if (right < GUTTER || left > views.right) continue;
      const wide = Math.max(1.5, right - left);
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
      for (let i = 0; i < run.stall_begun.length; i++) {
        const [left, right] = this.stallPlace(i);
        if (x >= left - 2 && x <= Math.max(right, left + 2) + 2) return { position, tensor: null, stall: i };
      }
      return { position, tensor: null };
    }
    let best = null;
    for (const event of run.eventsOf[row] || []) {
      const [begun, ended] = run.eventPlace(event, views.axis);
      if (begun > at) break;
      if (ended >= at) best = event;
    }
    if (best === null) return { position, tensor: null };
    if (row > 0) return { position, tensor: run.target[best], event: best };
    const made = [...views.step.writes(run.target[best])];
    const largest = made.reduce((a, b) => (a === null || views.step.tensors.nbytes[b] > views.step.tensors.nbytes[a] ? b : a), null);
    return { position, tensor: largest, event: best };
  }
}

class AddressView {
  constructor(views) {
    this.views = views;
    this.sheet = new Sheet("Addresses", 300, views.help);
    const { offset, nbytes } = views.run;
    this.most = 1.02 * offset.reduce((top, address, i) => Math.max(top, address + nbytes[i]), 0) || 1;
  }
  y(address) {
    return this.sheet.height - (address / this.most) * this.sheet.height;
  }
  // Rectangles never overlap, so that painting them pixel by pixel takes no longer than the picture is large.
  draw() {
    const { views, sheet } = this;
    const { run, grouping, step, filter } = views;
    const pen = sheet.pen(sheet.picture);
    yAxis(pen, sheet, this.most, "bytes");
    const ratio = sheet.ratio;
    const width = Math.round(sheet.plot * ratio), height = sheet.picture.height;
    const image = pen.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const inks = grouping.groups.map((group) => [this.pixel(group.colour, 255), this.pixel(group.colour, 60), this.pixel(group.colour, 255, 0.62)]);
    const edges = run.edges[views.axis];
    const scale = width / (views.window[1] - views.window[0]), rise = height / this.most;
    const group = run.stack(views.mode, grouping, (LEAST_BAND / 340) * views.most).group;
    const named = [];
    for (let i = 0; i < run.start.length; i++) {
      const from = (edges[run.start[i]] - views.window[0]) * scale, until = (edges[run.end[i]] - views.window[0]) * scale;
      if (until < 0 || from > width || !run.nbytes[i]) continue;
      const left = Math.max(0, Math.floor(from)), right = Math.min(width, Math.max(Math.round(until), Math.floor(from) + 1));
      const low = Math.max(0, Math.floor(height - (run.offset[i] + run.nbytes[i]) * rise));
      const high = Math.min(height, Math.max(low + 1, Math.round(height - run.offset[i] * rise)));
      const [full, pale, dark] = inks[group[i]];
      const plain = !filter || filter.has(step.layerOf(run.tensor[i]));
      const framed = right - left > 4 && high - low > 4;
      const pattern = grouping.groups[group[i]].pattern;
      for (let y = low; y < high; y++) {
        const line = y * width;
        const ink = plain ? full : pale;
        if (plain && (pattern || framed && y === low)) for (let x = left; x < right; x++) pixels[line + x] = framed && y === low || this.inPattern(pattern, x, y) ? dark : full;
        else if (right - left > 24) pixels.fill(ink, line + left, line + right);
        else for (let at = line + left; at < line + right; at++) pixels[at] = ink;
        if (framed && plain) pixels[line + left] = dark;
      }
      if (plain && right - left > 46 * ratio && high - low > 13 * ratio) named.push([i, left / ratio, right / ratio, low / ratio, high / ratio]);
    }
    this.painted ||= document.createElement("canvas");
    this.painted.width = width;
    this.painted.height = height;
    this.painted.getContext("2d").putImageData(image, 0, 0);
    pen.drawImage(this.painted, GUTTER, 0, sheet.plot, sheet.height);
    pen.textAlign = "left";
    for (const [i, left, right, low, high] of named) {
      pen.fillStyle = inkOn(grouping.groups[group[i]].colour);
      label(pen, step.nameOf(run.tensor[i]), GUTTER + left + 5, (low + high) / 2, right - left - 8);
    }
  }
  pixel(hex, alpha, shade = 1) {
    const [red, green, blue] = [1, 3, 5].map((at) => Math.round(parseInt(hex.slice(at, at + 2), 16) * shade));
    return ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }
  inPattern(pattern, x, y) {
    if (pattern === 1) return (x + y) % 8 === 0;
    if (pattern === 2) return (x - y + 4096) % 8 === 0;
    return pattern === 3 && x % 4 < 2 && y % 4 < 2 && ((x >> 2) + (y >> 2)) % 2 === 0;
  }
  over(pen) {
    const { views } = this;
    const { run } = views;
    const edges = run.edges[views.axis];
    for (let i = 0; i < run.start.length; i++) {
      const selected = run.tensor[i] === views.selected;
      if (!selected && run.tensor[i] !== views.hovered?.tensor) continue;
      const left = Math.max(GUTTER, views.px(edges[run.start[i]])), right = Math.min(views.right, views.px(edges[run.end[i]]));
      if (right < GUTTER || left > views.right) continue;
      const low = this.y(run.offset[i] + run.nbytes[i]), high = Math.max(3, this.y(run.offset[i]) - low);
      pen.fillStyle = colour("ink");
      pen.globalAlpha = selected ? 0.25 : 0.15;
      pen.fillRect(left, low, Math.max(2, right - left), high);
      pen.globalAlpha = 1;
      pen.strokeStyle = colour("ink");
      pen.lineWidth = selected ? 2 : 1.5;
      pen.strokeRect(left, low, Math.max(2, right - left), high);
    }
  }
  find(x, y) {
    const { run } = this.views;
    const position = run.positionAt(this.views.at(x), this.views.axis);
    const address = ((this.sheet.height - y) / this.sheet.height) * this.most;
    for (let i = 0; i < run.start.length; i++) {
      if (run.offset[i] <= address && address < run.offset[i] + run.nbytes[i] && run.start[i] <= position && position < run.end[i]) {
        return { position, tensor: run.tensor[i] };
      }
    }
    return { position, tensor: null };
  }
}
