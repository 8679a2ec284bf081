// Numbers as people read them, elements, columns, the tooltip, tables and the theme.

const CONTENT = JSON.parse(document.getElementById("content").textContent);
const REPORT = document.getElementById("report");

// An element: `attributes` as in HTML, `on…` are listeners; children are elements or text, never markup.
function el(name, attributes, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const TYPES = { i4: Int32Array, f8: Float64Array };
function column(packed) {
  if (Array.isArray(packed)) return Float64Array.from(packed, (number) => (number === null ? NaN : number));
  const text = atob(packed.base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new TYPES[packed.type](bytes.buffer);
}

function scaled(number, step, units, digits) {
  let size = Math.abs(number);
  let at = 0;
  while (size >= step - 0.05 && at < units.length - 1) {
    size /= step;
    at += 1;
  }
  const shown = at === 0 && Number.isInteger(size) ? String(size) : size.toFixed(digits(size));
  return `${number < 0 ? "−" : ""}${shown} ${units[at]}`.trim();
}

const FORMATS = {
  text: (value) => String(value),
  number: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)))),
  bytes: (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], () => 1),
  flops: (value) => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], (size) => (size < 100 ? 1 : 0)),
  ratio: (value) => value.toFixed(3),
  share: (value) => `${(100 * value).toFixed(1)} %`,
  seconds: (value) => {
    const size = Math.abs(value);
    if (size >= 1) return `${value.toFixed(2)} s`;
    if (size >= 1e-3) return `${(value * 1e3).toFixed(size >= 0.1 ? 0 : size >= 0.01 ? 1 : 2)} ms`;
    return size ? `${(value * 1e6).toFixed(size >= 1e-4 ? 0 : 1)} µs` : "0 s";
  },
};
// In a table a time has the digits that the terminal prints; the axis of a chart may need more of them.
FORMATS.time = (value) => (value >= 1 ? `${value.toFixed(2)} s` : value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`);
function show(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (value === true || value === false) return value ? "yes" : "no";
  return typeof value === "string" ? value : FORMATS[unit](value);
}

// Round numbers between two, about `count` of them: in powers of 2 for bytes, else in 1, 2 or 5 times a power of 10.
function ticks(low, high, count, unit) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  let step;
  if (unit === "bytes") {
    const base = 1024 ** Math.max(0, Math.floor(Math.log(rough) / Math.log(1024) + 1e-9));
    step = base * [1, 2, 5, 10, 20, 50, 100, 200, 256, 512, 1024].find((factor) => factor * base >= rough);
  } else {
    const base = 10 ** Math.floor(Math.log10(rough));
    step = base * [1, 2, 5, 10].find((factor) => factor * base >= rough * 0.999);
  }
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at + 0); // for -0 is written so
  return found;
}

// One box for all that is pointed at. Lines are [what, value] or text; the first is the heading.
const TOOLTIP = el("div", { class: "tooltip", role: "status", "aria-live": "polite", hidden: true });
function tell(lines, x, y) {
  TOOLTIP.replaceChildren(
    ...lines.filter(Boolean).map((line, index) => {
      if (index === 0) return el("strong", {}, line);
      return Array.isArray(line) ? el("div", {}, el("span", {}, line[0]), ` ${line[1]}`) : el("div", {}, line);
    }),
  );
  TOOLTIP.hidden = false;
  const box = TOOLTIP.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? Math.max(4, x - 16 - box.width) : x + 16;
  const top = y + 16 + box.height > innerHeight ? Math.max(4, y - 16 - box.height) : y + 16;
  TOOLTIP.style.transform = `translate(${left}px, ${top}px)`;
}
function hush() {
  TOOLTIP.hidden = true;
}

// What must be drawn again when the theme or the width changes.
const REDRAWN = [];
function redraw() {
  COLOURS.clear();
  for (const draw of REDRAWN) draw();
}
const COLOURS = new Map();
function colour(name) {
  if (!COLOURS.has(name)) COLOURS.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return COLOURS.get(name);
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function themeButton() {
  const button = el("button", { type: "button", class: "theme", onclick: () => setTheme(isDark() ? "light" : "dark") });
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  };
  REDRAWN.push(label);
  label();
  return button;
}
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  redraw();
}

const ROWS_AT_FIRST = 15;
const MANY_COLUMNS = 8;
const LONG_TEXT = 48;

function tableOf(section) {
  let whole = section.rows.length <= ROWS_AT_FIRST + 5;
  const head = el("tr", {});
  const body = el("tbody", {});
  // Bars of one unit have one scale, whichever column they are in.
  const largest = {};
  section.columns.forEach(({ unit, bar }, at) => {
    for (const row of bar ? section.rows : []) if (typeof row[at] === "number") largest[unit] = Math.max(largest[unit] || 0, Math.abs(row[at]));
  });
  const long = section.columns.map((_, at) => section.rows.some((row) => typeof row[at] === "string" && row[at].length > LONG_TEXT));
  let sortedBy = null;
  let downwards = false;
  const fill = (rows) =>
    body.replaceChildren(
      ...(whole ? rows : rows.slice(0, ROWS_AT_FIRST)).map((row) =>
        el(
          "tr",
          {},
          row.map((cell, at) => {
            const { unit, bar } = section.columns[at];
            const exact = unit === "bytes" && typeof cell === "number" ? `${cell.toLocaleString("en")} bytes` : null;
            const kind = unit !== "text" ? "number" : long[at] ? "long" : null;
            const made = el(at === 0 ? "th" : "td", { class: kind, scope: at === 0 ? "row" : null, title: exact });
            if (bar && typeof cell === "number" && largest[unit] > 0) {
              made.classList.add("bar");
              made.style.setProperty("--share", Math.abs(cell) / largest[unit]);
            }
            made.append(show(cell, unit === "seconds" ? "time" : unit));
            return made;
          }),
        ),
      ),
    );
  let shown = section.rows;
  const sort = (at) => {
    downwards = sortedBy === at ? !downwards : section.columns[at].unit !== "text";
    sortedBy = at;
    const known = (cell) => cell !== null && cell !== undefined;
    const order = (a, b) => (typeof a === "string" ? String(a).localeCompare(String(b)) : a - b);
    shown = [...section.rows].sort(([...a], [...b]) => {
      if (!known(a[at]) || !known(b[at])) return known(b[at]) - known(a[at]);
      return downwards ? order(b[at], a[at]) : order(a[at], b[at]);
    });
    [...head.children].forEach((cell, index) =>
      index === at ? cell.setAttribute("aria-sort", downwards ? "descending" : "ascending") : cell.removeAttribute("aria-sort"),
    );
    fill(shown);
  };
  head.append(
    ...section.columns.map((found, at) =>
      el("th", { scope: "col", class: found.unit === "text" ? null : "number" }, el("button", { type: "button", onclick: () => sort(at) }, found.name)),
    ),
  );
  fill(shown);
  const table = el("table", { class: section.columns.length > MANY_COLUMNS ? "dense" : null }, el("thead", {}, head), body);
  const wide = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": section.title }, table);
  if (whole) return wide;
  const more = el("button", { type: "button", class: "more", onclick: () => ((whole = true), fill(shown), more.remove()) }, `Show all ${section.rows.length}`);
  addEventListener("beforeprint", () => more.click());
  return el("div", {}, wide, more);
}
