// What the canvases of a step share. Each view has a picture, and above it a glass for what follows the pointer, so that
// moving it draws little.

const GUTTER = 78;
const MARGIN = 12;

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

// A line across a view, as the budget.
function markLine(pen, sheet, y) {
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 1;
  pen.setLineDash([8, 4]);
  pen.beginPath();
  pen.moveTo(GUTTER, y);
  pen.lineTo(sheet.width - MARGIN, y);
  pen.stroke();
  pen.setLineDash([]);
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
