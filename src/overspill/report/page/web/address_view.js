// Where blocks lie: time to the right, addresses upwards.

class AddressView {
  constructor(views) {
    this.views = views;
    this.sheet = new Sheet("Addresses", 300, views.help);
    const { offset, nbytes } = views.run;
    const top = offset.reduce((most, address, i) => Math.max(most, address + nbytes[i]), 0);
    this.marks = views.marks.filter((mark) => mark.on_addresses && mark.at < 2 * top);
    this.most = 1.02 * Math.max(top, ...this.marks.map((mark) => mark.at)) || 1;
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
    const group = Int32Array.from(run.tensor, (tensor) => grouping.of(tensor));
    const named = [];
    for (let i = 0; i < run.start.length; i++) {
      const from = (edges[run.start[i]] - views.window[0]) * scale, until = (edges[run.end[i]] - views.window[0]) * scale;
      if (until < 0 || from > width || !run.nbytes[i]) continue;
      const left = Math.max(0, Math.floor(from)), right = Math.min(width, Math.max(Math.round(until), Math.floor(from) + 1));
      const low = Math.max(0, Math.round(height - (run.offset[i] + run.nbytes[i]) * rise));
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
    for (const mark of this.marks) markLine(pen, sheet, Math.round(this.y(mark.at)) + 0.5);
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
