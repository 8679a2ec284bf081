// Curves and points on two axes, as SVG.

const HEIGHT = 360;
const LETTER = 7.2; // pixels, of which a name takes about so many
const CURVE_COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7"];
const MOST_DOTS = 40; // so many points of a curve are shown as such
const DASHES = [null, null, "8 3", "3 3", "10 3 3 3"];

function chartOf(section) {
  const holder = el("div", { class: "chart" });
  const draw = () => holder.replaceChildren(drawChart(section, Math.max(300, holder.clientWidth || 900)));
  REDRAWN.push(draw);
  const legend = el("div", { class: "legend" });
  section.curves.forEach((curve, at) => {
    const line = el("svg:svg", { width: 26, height: 10, "aria-hidden": "true" }, el("svg:line", { x1: 1, x2: 25, y1: 5, y2: 5, ...stroke(curve, at) }));
    legend.append(el("span", {}, line, curve.name));
  });
  return el("div", {}, section.curves.length ? legend : null, holder);
}

function stroke(curve, at) {
  const dash = curve.dashed ? "5 4" : DASHES[Math.floor(at / CURVE_COLOURS.length) + 1] || null;
  return { stroke: curve.dashed ? "var(--muted)" : `var(--${CURVE_COLOURS[at % CURVE_COLOURS.length]})`, "stroke-width": 2, "stroke-dasharray": dash, fill: "none" };
}

function extent(section) {
  const xs = [], ys = [];
  for (const curve of section.curves) {
    curve.x.forEach((x, at) => {
      if (x !== null && curve.y[at] !== null) xs.push(x), ys.push(curve.y[at]);
    });
  }
  for (const point of section.points || []) xs.push(point.x), ys.push(point.y);
  for (const mark of section.marks) (mark.on_x ? xs : ys).push(mark.at);
  const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const padded = ([low, high], unit) => {
    if (!(high >= low)) return [0, 1];
    if (unit === "bytes" || low >= 0 && low < 0.3 * high) return [0, high * 1.06 || 1];
    const flat = 0.05 * Math.abs(high) - (high - low); // a change of a few thousandths is no cliff
    if (flat > 0) low -= flat;
    const margin = 0.08 * (high - low) || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  };
  return [padded(range(xs), section.x.unit), padded(range(ys), section.y.unit)];
}

function drawChart(section, width) {
  const narrow = width < 560;
  const left = 74, right = 14, top = 14, bottom = 46;
  const [[x0, x1], [y0, y1]] = extent(section);
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => HEIGHT - bottom - ((y - y0) / (y1 - y0)) * (HEIGHT - top - bottom);
  const svg = el("svg:svg", { width, height: HEIGHT, role: "group", "aria-label": section.title });
  for (const y of ticks(y0, y1, 5, section.y.unit)) {
    svg.append(el("svg:line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: "grid" }));
    svg.append(el("svg:text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, show(y, section.y.unit)));
  }
  const counts = section.x.unit === "number" && [...section.curves, { x: (section.points || []).map((point) => point.x) }].every((of) => of.x.every(Number.isInteger));
  for (const x of ticks(x0, x1, narrow ? 3 : 7, section.x.unit)) {
    if (counts && !Number.isInteger(x)) continue; // there is no step one and a half
    svg.append(el("svg:line", { x1: px(x), x2: px(x), y1: top, y2: HEIGHT - bottom, class: "grid" }));
    svg.append(el("svg:text", { x: px(x), y: HEIGHT - bottom + 18, "text-anchor": "middle" }, show(x, section.x.unit)));
  }
  svg.append(el("svg:text", { x: width - right, y: HEIGHT - 8, "text-anchor": "end", class: "axis" }, section.x.name));
  svg.append(el("svg:text", { x: left + 6, y: top + 10, class: "axis" }, section.y.name));
  const taken = [[left, top, left + 12 + LETTER * section.y.name.length, top + 14]];
  for (const mark of section.marks) {
    const at = mark.on_x ? px(mark.at) : py(mark.at);
    const ends = mark.on_x ? { x1: at, x2: at, y1: top, y2: HEIGHT - bottom } : { x1: left, x2: width - right, y1: at, y2: at };
    svg.append(el("svg:line", { ...ends, class: "mark" }));
    const text = `${mark.name}, ${show(mark.at, (mark.on_x ? section.x : section.y).unit)}`;
    const long = LETTER * text.length;
    const beside = at - 5 > left + long + 130 ? [at - 5 - long, top + 10] : at + 5 + long < width ? [at + 5, top + 10] : [at - 5 - long, top + 28];
    const [x, y] = mark.on_x ? beside : [width - right - 4 - long, at - 5];
    taken.push([x, y - 11, x + long, y + 3]);
    svg.append(el("svg:text", { x, y, class: "mark" }, text));
  }
  section.curves.forEach((curve, at) => drawCurve(svg, section, curve, at, px, py));
  drawPoints(svg, section, px, py, width, taken);
  return svg;
}

function describe(section, name, x, y, note) {
  return [name, [section.x.name, show(x, section.x.unit)], [section.y.name, show(y, section.y.unit)], note || null];
}

function drawCurve(svg, section, curve, at, px, py) {
  let path = "";
  let pen = false;
  curve.x.forEach((x, i) => {
    const y = curve.y[i];
    if (x === null || y === null) return void (pen = false);
    if (!pen) path += `M${px(x)} ${py(y)}`;
    else path += curve.steps ? `H${px(x)}V${py(y)}` : `L${px(x)} ${py(y)}`;
    pen = true;
  });
  svg.append(el("svg:path", { d: path, ...stroke(curve, at) }));
  const ends = curve.x.map((_, i) => i).filter((i) => curve.x[i] !== null && curve.y[i] !== null);
  if (ends.length <= MOST_DOTS && !curve.dashed) for (const i of ends) svg.append(el("svg:circle", { cx: px(curve.x[i]), cy: py(curve.y[i]), r: 3, fill: stroke(curve, at).stroke }));
  // What a finger or a pointer can meet is wider than the line.
  const nearest = (event) => {
    const mouse = event.clientX - svg.getBoundingClientRect().left;
    let best = 0;
    curve.x.forEach((x, i) => {
      if (x !== null && Math.abs(px(x) - mouse) < Math.abs(px(curve.x[best]) - mouse)) best = i;
    });
    tell(describe(section, curve.name, curve.x[best], curve.y[best]), event.clientX, event.clientY);
  };
  svg.append(el("svg:path", { d: path, stroke: "transparent", "stroke-width": 14, fill: "none", onpointermove: nearest, onpointerleave: hush }));
}

// Labels stand beside their points, and where one would meet another, a point or what is `taken` it moves.
function drawPoints(svg, section, px, py, width, taken) {
  for (const { x, y } of section.points || []) taken.push([px(x) - 7, py(y) - 7, px(x) + 7, py(y) + 7]);
  for (const [at, point] of (section.points || []).entries()) {
    const x = px(point.x), y = py(point.y);
    const ink = `var(--${CURVE_COLOURS[at % CURVE_COLOURS.length]})`;
    const shape = point.good
      ? el("svg:circle", { cx: x, cy: y, r: 6, fill: ink })
      : el("svg:path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, stroke: ink, "stroke-width": 3 });
    const near = section.points.filter((other) => Math.hypot(px(other.x) - x, py(other.y) - y) < 6);
    const lines = near.flatMap((other) => describe(section, other.name, other.x, other.y, other.note));
    const here = () => {
      const box = svg.getBoundingClientRect();
      tell(lines, box.left + x, box.top + y);
    };
    const label = lines.filter(Boolean).map((line) => (Array.isArray(line) ? line.join(" ") : line)).join(", ");
    svg.append(el("svg:g", { tabindex: 0, role: "img", "aria-label": label, class: "point", onpointerenter: here, onfocus: here, onpointerleave: hush, onblur: hush }, shape));
    const size = LETTER * point.name.length;
    const around = [4, 18, -10, 32, -24, 46, -38, 60, -52].flatMap((dy) => [[10, dy, 0], [-10, dy, -1]]);
    for (const [dx, dy, anchor] of [...around.slice(0, 2), [0, -11, -0.5], [0, 22, -0.5], ...around.slice(2)]) {
      const box = [x + dx + anchor * size, y + dy - 11, x + dx + (1 + anchor) * size, y + dy + 3];
      const outside = box[0] < 74 || box[2] > width - 4 || box[1] < 0 || box[3] > HEIGHT - 46;
      if (outside || taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      if (Math.abs(dy) > 22) svg.append(el("svg:line", { x1: x, y1: y, x2: x + dx, y2: y + dy - 4, class: "leader" }));
      svg.append(el("svg:text", { x: box[0], y: y + dy, class: "name" }, point.name));
      break;
    }
  }
}
