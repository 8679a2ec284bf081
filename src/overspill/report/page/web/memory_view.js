// Memory over the step: a stack of groups, in which each large tensor is a band of its own.

const LEAST_BAND = 3;

class MemoryView {
  constructor(views) {
    this.views = views;
    this.sheet = new Sheet(views.step.words.memory, 340, views.help);
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
    this.stack = run.stack(views.mode, grouping, this.least, views.filter);
    this.columns = columnsOf(run, run.total, views.axis, views.window, sheet.plot);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, sheet.plot, sheet.height);
    pen.clip();
    const base = new Float64Array(this.columns.length);
    this.stack.sums.forEach((sum, at) => this.area(pen, sum, base, this.stack.parts[at]));
    if (!views.moving) this.bands(pen);
    for (const other of views.compared) this.line(pen, other);
    pen.restore();
    this.marks(pen);
  }
  // One part of the stack, upon `base`, which it lifts. What a filter does not let through is pale.
  area(pen, sum, base, part) {
    const { columns } = this;
    const group = this.views.grouping.groups[part.group];
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
    pen.globalAlpha = part.passes ? 0.92 : 0.22;
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
    const beneath = new Float64Array(columns.length);
    let part = 0;
    // Small spans lie upon the large ones of their part: the next part begins at the sum of those before.
    const rise = (until) => {
      part = until;
      for (let c = 0; c < columns.length; c++) {
        beneath[c] = 0;
        if (columns[c] >= 0) for (let before = 0; before < part; before++) beneath[c] += stack.sums[before][columns[c]];
      }
    };
    const [first, last] = [columns.find((p) => p >= 0) ?? 0, columns.findLast((p) => p >= 0) ?? 0];
    for (const span of stack.large) {
      if (stack.part[span] > part) rise(stack.part[span]);
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
    const { run } = this.views;
    pen.lineWidth = 1;
    this.eachBand((span, here) => {
      const high = (run.nbytes[span] / this.views.most) * this.sheet.height;
      if (here.length < 6) return; // outlines would hide what is so narrow
      pen.strokeStyle = colour("card");
      pen.globalAlpha = 0.55;
      pen.beginPath();
      for (let i = 0; i < here.length; i += 2) {
        const top = this.y(here[i + 1] + run.nbytes[span]);
        if (i === 0 || here[i - 2] !== here[i] - 1) pen.moveTo(GUTTER + here[i], this.y(here[i + 1])), pen.lineTo(GUTTER + here[i], top);
        pen.lineTo(GUTTER + here[i], top);
        pen.lineTo(GUTTER + here[i] + 1, top);
        if (here[i + 2] !== here[i] + 1) pen.lineTo(GUTTER + here[i] + 1, this.y(here[i + 1]));
      }
      pen.stroke();
      pen.globalAlpha = 1;
      if (high >= 12 && this.stack.parts[this.stack.part[span]].passes) this.nameBand(pen, span, here, high);
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
    pen.fillStyle = inkOn(grouping.groups[this.stack.parts[this.stack.part[span]].group].colour);
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
    this.tags = [];
    views.marks.forEach((mark, at) => {
      const y = Math.round(this.y(mark.at)) + 0.5;
      const text = `${mark.name} ${FORMATS.bytes(mark.at)}`;
      const [x, side] = at % 2 ? [GUTTER + 6, "left"] : [sheet.width - MARGIN - 4, "right"];
      if (y < 0) return this.tag(pen, `↑ ${text}`, x, 8, side); // far above all that is drawn
      markLine(pen, sheet, y);
      this.tag(pen, text, x, y - 11, side);
    });
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
    const left = align === "right" ? x - wide + 4 : x - 4;
    const meets = (top) => this.tags.some((other) => left < other.right && other.left < left + wide && top < other.top + 16 && other.top < top + 16);
    const tops = [0, 22, -16, 38, -32, 54].map((move) => Math.max(0, y - 8 + move));
    const top = tops.find((at) => !meets(at)) ?? tops[0];
    this.tags.push({ left, right: left + wide, top });
    pen.fillStyle = colour("card");
    pen.globalAlpha = 0.85;
    pen.fillRect(left, top, wide, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("ink");
    pen.textAlign = align;
    pen.fillText(text, x, top + 8);
  }
  over(pen) {
    const { views } = this;
    const wanted = [views.selected, views.hovered?.tensor].filter((tensor) => tensor !== null && tensor !== undefined);
    if (!wanted.length || views.moving) return;
    const { run } = views;
    pen.fillStyle = colour("ink");
    for (let span = 0; span < run.tensor.length; span++) {
      if (!wanted.includes(run.tensor[span])) continue;
      const beneath = run.beneath(span, this.stack);
      const high = Math.max(3, (run.nbytes[span] / views.most) * this.sheet.height); // what is small can be seen too
      this.columns.forEach((p, c) => {
        if (p < run.start[span] || p >= run.end[span]) return;
        const bottom = this.y(beneath[p]);
        pen.globalAlpha = run.tensor[span] === views.selected ? 0.3 : 0.18;
        pen.fillRect(GUTTER + c, bottom - high, 1, high);
        pen.globalAlpha = 1;
        pen.fillRect(GUTTER + c, bottom - high, 1, 1.5);
        pen.fillRect(GUTTER + c, bottom - 1.5, 1, 1.5);
      });
    }
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
