// The linked views of one step: one window in time, one instant, one selected tensor and one filter for all of them.

const TENSORS_LISTED = 12;

function stepOf(section) {
  return new StepViews(section).element;
}

class StepViews {
  constructor(section) {
    this.step = new StepModel(section);
    this.help = `Arrow keys move and zoom, comma and full stop step through each ${this.step.words.position}, p goes to the peak, Home shows all, Escape clears.`;
    this.run = this.step.runs[0];
    this.axis = this.run.timed ? "time" : "positions";
    this.mode = "kind";
    this.window = [0, this.run.endOf(this.axis)];
    this.instant = null;
    this.selected = null;
    this.hovered = null;
    this.filter = null;
    this.filterPath = null;
    this.moving = false;
    this.sought = "";
    this.parts = {
      controls: el("div", { class: "controls", role: "toolbar", "aria-label": "What the views show" }),
      legend: el("div", { class: "legend" }),
      views: el("div", { class: "views" }),
      below: el("div", { class: "below" }),
    };
    this.element = el("div", { class: "step" }, this.parts.controls, this.parts.legend, this.parts.views, this.parts.below);
    this.lay();
    REDRAWN.push(() => this.fit());
  }

  get grouping() {
    return this.mode === "layer" && this.step.byLayer ? this.step.byLayer : this.step.byKind;
  }
  get compared() {
    const alike = (run) => run !== this.run && run.timed && run.measured === this.run.measured;
    return this.axis === "time" && this.run.timed ? this.step.runs.filter(alike) : [];
  }
  get marks() {
    return [...this.step.marks, ...this.run.marks];
  }
  // The top of the memory view; it stays as it is when the window moves.
  highest() {
    const shown = [this.run, ...this.compared].map((run) => run.peak);
    const tallest = Math.max(...shown);
    const marks = this.marks.map((mark) => mark.at).filter((at) => at < 2 * tallest);
    return 1.1 * Math.max(tallest, ...marks, 1);
  }
  get longest() {
    return Math.max(...[this.run, ...this.compared].map((run) => run.endOf(this.axis)));
  }
  get right() {
    return GUTTER + this.memory.sheet.plot;
  }
  px(x) {
    return GUTTER + ((x - this.window[0]) / (this.window[1] - this.window[0])) * this.memory.sheet.plot;
  }
  at(pixel) {
    return this.window[0] + ((pixel - GUTTER) / this.memory.sheet.plot) * (this.window[1] - this.window[0]);
  }

  // The views that the run has something for, from top to bottom.
  lay() {
    this.memory = new MemoryView(this);
    this.views = [this.memory];
    if (this.run.streams.length) this.views.push(new StreamView(this));
    if (this.run.offset.length) this.views.push(new AddressView(this));
    this.axisSheet = el("canvas", { class: "ruler", "aria-hidden": "true" });
    const titles = { Addresses: this.run.placer === "recorded" ? "Addresses, as recorded" : `Addresses, placed by ${this.run.placer}` };
    this.streamKey = el("div", { class: "legend" });
    const panes = this.views.map(({ sheet }) => {
      const title = `${titles[sheet.label] || sheet.label}${this.run.measured ? ", measured" : ""}`;
      const heading = el("div", { class: "heading" }, el("h3", {}, title), sheet.label === "Streams" ? this.streamKey : null);
      return el("div", { class: "pane" }, heading, sheet.element);
    });
    this.parts.views.replaceChildren(...panes, this.axisSheet);
    for (const view of this.views) this.listen(view);
    this.control();
    this.window = [0, this.longest];
    this.legend();
  }

  control() {
    const choice = (label, options, chosen, choose) =>
      options.length < 2 ? null : el("div", { class: "choice", role: "group", "aria-label": label }, options.map(([value, text]) => {
        return el("button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value, onclick: () => choose(value) }, text);
      }));
    const runs = this.step.runs.map((run, at) => [String(at), run.name]);
    const modes = this.step.byLayer ? [["kind", "by kind"], ["layer", "by layer"]] : [];
    const axes = this.run.timed && !this.run.measured ? [["time", "time"], ["positions", "instructions"]] : [];
    const zoom = (text, name, act) => el("button", { type: "button", "aria-label": name, title: name, onclick: act }, text);
    keepingFocus(this.parts.controls, (it) => `${it.parentElement.getAttribute("aria-label")} ${it.dataset.value ?? it.getAttribute("aria-label")}`, () => this.parts.controls.replaceChildren(...[
      choice("Run", runs, String(this.step.runs.indexOf(this.run)), (at) => this.choose({ run: this.step.runs[at] })),
      choice("Colours", modes, this.mode, (mode) => this.choose({ mode })),
      choice("Axis", axes, this.axis, (axis) => this.choose({ axis })),
      el("div", { class: "choice", role: "group", "aria-label": "Zoom" }, zoom("−", "Zoom out", () => this.zoom(2)), zoom("+", "Zoom in", () => this.zoom(0.5)), zoom("All", "Show all", () => this.show(0, this.longest))),
      el("input", { type: "search", class: "search", placeholder: `Find a ${this.step.words.thing}`, "aria-label": `Find a ${this.step.words.thing} by its name or its line of Python`, value: this.sought, oninput: (event) => ((this.sought = event.target.value.trim()), this.below()) }),
      this.crumb = el("button", { type: "button", class: "crumb", hidden: true, title: "Clear the filter", onclick: () => this.pick(null) }),
    ].filter(Boolean)));
  }

  choose(change) {
    Object.assign(this, change);
    if (this.run.measured) this.axis = "time"; // its positions are instants
    this.instant = this.hovered = null;
    if (change.run || change.axis) this.lay();
    else this.control(), this.legend();
    this.pick(this.filterPath, true);
    this.fit();
  }

  legend() {
    const chips = this.grouping.groups.map((group) => {
      const box = el("i", { class: `chip pattern${group.pattern}` });
      box.style.backgroundColor = group.colour;
      return el("span", {}, box, group.label);
    });
    for (const other of this.compared) chips.push(el("span", {}, el("i", { class: "dash" }), `${other.name}: peak ${FORMATS.bytes(other.peak)}`));
    this.parts.legend.replaceChildren(...chips);
    this.streamLegend();
  }

  // What the colours of the streams mean, beside their heading.
  streamLegend() {
    if (!this.streamKey) return;
    const box = (ink, name, pattern) => {
      const made = el("i", { class: `chip ${pattern || ""}` });
      made.style.backgroundColor = ink;
      return el("span", {}, made, name);
    };
    const phases = [...new Set(this.step.ops.phase)].map((phase) => box(PHASES[phase], phase));
    this.streamKey.replaceChildren(...(this.mode === "layer" ? [] : phases), box(this.mode === "layer" ? "#8A8F98" : RECOMPUTED, "recomputed", "pattern1"), box("var(--stall)", "compute waits"));
  }

  fit() {
    this.most = this.highest();
    const width = Math.max(280, this.memory.sheet.element.clientWidth || 900);
    for (const { sheet } of this.views) sheet.fit(width);
    this.draw();
    this.below();
  }

  draw() {
    for (const view of this.views) view.draw();
    this.ruler();
    this.glass();
  }
  ruler() {
    const sheet = this.memory.sheet;
    this.axisSheet.width = sheet.picture.width;
    this.axisSheet.height = 26 * sheet.ratio;
    const pen = this.axisSheet.getContext("2d");
    pen.setTransform(sheet.ratio, 0, 0, sheet.ratio, 0, 0);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textAlign = "center";
    pen.fillStyle = colour("muted");
    const unit = this.axis === "time" ? "seconds" : "number";
    const wanted = Math.max(3, Math.floor(sheet.plot / 130));
    const span = this.window[1] - this.window[0];
    for (const at of ticks(...this.window, wanted, unit)) {
      const x = this.px(at);
      pen.fillRect(x, 0, 1, 5);
      if (x > this.right - 24) continue;
      pen.textAlign = x < GUTTER + 18 ? "left" : "center"; // beside the name of the axis
      pen.fillText(this.axis === "time" ? preciseTime(at, span) : show(at, unit), x, 17);
    }
    pen.textAlign = "right";
    pen.fillText(this.axis === "time" ? "time" : this.step.words.position, GUTTER - 8, 17);
    this.element.dataset.window = this.window.join(" ");
  }
  // What follows the pointer: the instant in all views, the tensor in all views.
  glass() {
    for (const view of this.views) {
      const pen = view.sheet.pen(view.sheet.glass);
      pen.save();
      pen.beginPath();
      pen.rect(GUTTER, 0, view.sheet.plot, view.sheet.height);
      pen.clip();
      view.over(pen);
      const line = (x, alpha) => {
        pen.globalAlpha = alpha;
        pen.fillStyle = colour("ink");
        pen.fillRect(Math.round(x), 0, 1, view.sheet.height);
        pen.globalAlpha = 1;
      };
      if (this.instant !== null) line(this.px(this.run.edges[this.axis][this.instant]), 0.9);
      if (this.hovered) line(this.hovered.x, 0.45);
      if (this.brush) {
        pen.fillStyle = colour("accent");
        pen.globalAlpha = 0.18;
        pen.fillRect(Math.min(...this.brush), 0, Math.abs(this.brush[1] - this.brush[0]), view.sheet.height);
      }
      pen.restore();
    }
    this.element.dataset.selected = this.selected === null ? "" : this.step.nameOf(this.selected);
  }

  listen(view) {
    const area = view.sheet.element;
    const place = (event) => {
      const box = area.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let pressed = null;
    area.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pressed = { x: place(event)[0], pan: event.shiftKey, window: [...this.window] };
      if (event.pointerType === "mouse") area.setPointerCapture(event.pointerId);
    });
    area.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (pressed && event.pointerType === "mouse" && Math.abs(x - pressed.x) > 4) {
        if (pressed.pan) {
          const moved = ((pressed.x - x) / this.memory.sheet.plot) * (pressed.window[1] - pressed.window[0]);
          this.show(pressed.window[0] + moved, pressed.window[1] + moved);
        } else {
          this.brush = [pressed.x, x];
          this.hovered = null;
          hush();
          this.glass();
        }
        return;
      }
      this.hover(view, x, y, event);
    });
    area.addEventListener("pointerup", (event) => {
      const [x, y] = place(event);
      const brush = this.brush;
      const was = pressed;
      this.brush = pressed = null;
      if (brush && Math.abs(brush[1] - brush[0]) > 4) this.show(this.at(Math.min(...brush)), this.at(Math.max(...brush)));
      else if (was && !was.pan) this.press(view, x, y);
    });
    area.addEventListener("pointercancel", () => ((pressed = this.brush = null), this.glass()));
    area.addEventListener("pointerleave", (event) => {
      if (pressed || event.pointerType !== "mouse") return; // a finger leaves as it lifts, and what it touched is told
      this.hovered = null;
      hush();
      this.glass();
    });
    area.addEventListener("dblclick", () => this.show(0, this.longest));
    area.addEventListener("wheel", (event) => this.wheel(event, place(event)[0]), { passive: false });
    area.addEventListener("keydown", (event) => this.key(event));
  }
  wheel(event, x) {
    const span = this.window[1] - this.window[0];
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.004), this.at(Math.max(GUTTER, x)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const moved = ((event.deltaX || event.deltaY) / this.memory.sheet.plot) * span;
      this.show(this.window[0] + moved, this.window[1] + moved);
    }
  }
  key(event) {
    const span = this.window[1] - this.window[0];
    const shift = (share) => this.show(this.window[0] + share * span, this.window[1] + share * span);
    const acts = {
      ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2), a: () => shift(-0.2), d: () => shift(0.2),
      ArrowUp: () => this.zoom(0.5), ArrowDown: () => this.zoom(2), w: () => this.zoom(0.5), s: () => this.zoom(2), "+": () => this.zoom(0.5), "-": () => this.zoom(2),
      Home: () => this.show(0, this.longest), ",": () => this.stand((this.instant ?? this.run.peakAt) - 1), ".": () => this.stand((this.instant ?? this.run.peakAt) + 1),
      p: () => this.stand(this.run.peakAt), Escape: () => this.clear(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // The window, within the step and never narrower than what a picture can show. Details come when it rests.
  show(from, until) {
    const whole = this.longest;
    const least = whole / Math.max(2000, 40 * this.run.positions);
    const span = Math.min(whole, Math.max(least, until - from));
    const begin = Math.min(Math.max(0, from), whole - span);
    this.window = [begin, begin + span];
    this.hovered = null;
    hush();
    this.moving = true;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.rest);
    this.frame = requestAnimationFrame(() => this.draw());
    this.rest = setTimeout(() => ((this.moving = false), this.draw()), 90);
  }
  zoom(factor, about = this.focus) {
    const [from, until] = this.window;
    this.show(about - (about - from) * factor, about + (until - about) * factor);
  }
  get focus() {
    const at = this.instant === null ? null : this.run.edges[this.axis][this.instant];
    return at !== null && at >= this.window[0] && at <= this.window[1] ? at : (this.window[0] + this.window[1]) / 2;
  }

  hover(view, x, y, event) {
    if (x < GUTTER || x > this.right) return void ((this.hovered = null), hush(), this.glass());
    const found = view.find(x, y);
    this.hovered = found ? { ...found, x } : { tensor: null, x };
    this.glass();
    if (!found) return hush();
    tell(this.describe(found, view), event.clientX, event.clientY);
  }
  describe(found, view) {
    const { run, step } = this;
    if (found.stall !== undefined) {
      const seconds = run.stall_ended[found.stall] - run.stall_begun[found.stall];
      return [`compute waits ${FORMATS.seconds(seconds)}`, ["for", run.stall_cause[found.stall]], ["at", FORMATS.seconds(run.stall_begun[found.stall])]];
    }
    if (found.event !== undefined && run.stream[found.event] === 0) {
      const op = run.target[found.event];
      const flops = step.ops.flops[op];
      const line = step.lines.source(step.linesOfOp(op));
      return [`${run.verbs[run.verb[found.event]]} ${step.ops.name[op]}`, ["layer", step.layers[step.ops.layer[op]] || "none"], ["phase", step.ops.phase[op]], line ? ["line", line] : null,
        ["takes", `${FORMATS.seconds(run.ended[found.event] - run.begun[found.event])} from ${FORMATS.seconds(run.begun[found.event])}`],
        flops ? ["computes", FORMATS.flops(flops)] : null, found.tensor === null ? null : ["makes", this.size(found.tensor)]];
    }
    if (found.tensor === null) return [run.at(found.position), [step.words.place, FORMATS.bytes(run.total[found.position] || 0)], view === this.memory ? null : "nothing here"];
    const lines = [step.nameOf(found.tensor), ["size", this.size(found.tensor, true)], [step.words.kind, spelled(step.kindOf(found.tensor))]];
    if (found.tensor >= 0 && step.tensors.shape[found.tensor]) lines.push(["shape", step.tensors.shape[found.tensor]]);
    const layer = step.layers[step.layerOf(found.tensor)];
    if (layer) lines.push(["layer", layer]);
    const line = step.lines.source(step.linesOf(found.tensor));
    if (line) lines.push(["line", line]);
    if (found.event !== undefined) lines.push([run.verbs[run.verb[found.event]], `${FORMATS.seconds(run.begun[found.event])} to ${FORMATS.seconds(run.ended[found.event])}`]);
    const history = run.history(found.tensor).filter(([, what]) => !what.startsWith("read by"));
    lines.push(...history.slice(0, 7).map(([when, what]) => [when, what]));
    return lines;
  }
  size(tensor, plain) {
    const { run, step } = this;
    const nbytes = tensor >= 0 ? step.tensors.nbytes[tensor] : run.nbytes[run.tensor.indexOf(tensor)];
    return plain ? `${FORMATS.bytes(nbytes)} (${nbytes.toLocaleString("en")} bytes)` : `${step.nameOf(tensor)}, ${FORMATS.bytes(nbytes)}`;
  }

  press(view, x, y) {
    if (x < GUTTER || x > this.right) return;
    const found = view.find(x, y);
    if (!found) return;
    this.instant = found.position;
    this.select(found.tensor === this.selected ? null : found.tensor);
  }
  select(tensor) {
    this.selected = tensor;
    this.glass();
    this.below();
  }
  stand(position) {
    this.instant = Math.min(this.run.positions - 1, Math.max(0, position));
    const at = this.run.edges[this.axis][this.instant];
    const span = this.window[1] - this.window[0];
    if (at < this.window[0] || at > this.window[1]) this.show(at - span / 2, at + span / 2);
    this.glass();
    this.below();
  }
  clear() {
    this.selected = this.instant = this.hovered = null;
    this.sought = this.element.querySelector(".search").value = "";
    hush();
    this.pick(null);
    this.below();
  }

  // A node of the tree as a filter of all views; null for none.
  pick(path, quiet) {
    const find = (node) => (node.path === path ? node : node.children.map(find).find(Boolean));
    const node = path === null ? null : find(this.step.root);
    this.filterPath = node ? path : null;
    this.filter = node ? new Set(node.layers) : null;
    this.crumb.hidden = !node;
    this.crumb.textContent = node ? `only ${path} ×` : "";
    this.element.dataset.filter = node ? path : "";
    if (this.treeView) this.treeView.mark(this.filterPath);
    if (!quiet) this.draw();
  }

  below() {
    const position = this.instant ?? this.run.peakAt;
    const tree = this.step.layers.length > 1 ? (this.treeView ||= new TreeView(this)) : null;
    if (tree) tree.show(position);
    this.parts.below.classList.toggle("single", !tree);
    const facts = el("div", {}, this.instantTable(position), this.card());
    if (tree && tree.element.parentElement !== this.parts.below) this.parts.below.prepend(tree.element); // once: it would lose its place
    keepingFocus(this.parts.below, (it) => it.dataset.tensor, () => (this.facts ? this.facts.replaceWith(facts) : this.parts.below.append(facts)));
    this.facts = facts;
  }
  // The largest tensors at an instant, or of all whose name or line is searched for.
  instantTable(position) {
    const { run, step } = this;
    const sought = this.sought.toLowerCase();
    const lines = sought ? step.lines.matching(sought) : null;
    const isSought = (tensor) => step.nameOf(tensor).toLowerCase().includes(sought) || step.linesOf(tensor).some((frame) => lines.has(frame));
    const spans = [...run.start.keys()].filter((i) => (sought ? isSought(run.tensor[i]) : run.start[i] <= position && position < run.end[i]));
    const sizes = new Map(spans.map((i) => [run.tensor[i], run.nbytes[i]]));
    const found = [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a));
    const shaped = step.tensors.shape.some(Boolean);
    const rows = found.slice(0, TENSORS_LISTED).map((tensor) => {
      const chosen = tensor === this.selected;
      const button = el("button", { type: "button", class: "link", "aria-pressed": String(chosen), "data-tensor": tensor, onclick: () => this.select(chosen ? null : tensor) }, step.nameOf(tensor));
      const nbytes = sizes.get(tensor);
      return el("tr", { class: chosen ? "chosen" : null }, el("th", { scope: "row" }, button), el("td", {}, spelled(step.kindOf(tensor))), shaped ? el("td", {}, tensor >= 0 ? step.tensors.shape[tensor] : "") : null, el("td", { class: "number", title: `${nbytes.toLocaleString("en")} bytes` }, FORMATS.bytes(nbytes)));
    });
    const rest = found.slice(TENSORS_LISTED).reduce((sum, tensor) => sum + sizes.get(tensor), 0);
    if (rest) rows.push(el("tr", { class: "rest" }, el("th", { scope: "row" }, `${found.length - TENSORS_LISTED} more`), el("td", {}), shaped ? el("td", {}) : null, el("td", { class: "number" }, FORMATS.bytes(rest))));
    const where = this.instant === null || position === run.peakAt ? "At the peak" : "At the chosen instant";
    const { thing, place } = step.words;
    const heading = sought ? `${found.length} ${thing}s whose name or line has “${this.sought}”` : `${where}, ${run.at(position)}: ${FORMATS.bytes(run.total[position] || 0)} ${place}`;
    const head = el("tr", {}, [`largest ${thing}s`, this.step.words.kind, ...(shaped ? ["shape"] : []), "size"].map((name) => el("th", { scope: "col", class: name === "size" ? "number" : null }, name)));
    return el("div", { class: "instant" }, el("h3", {}, heading), el("div", { class: "wide" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
  }
  card() {
    if (this.selected === null) return el("p", { class: "note" }, `Click a ${this.step.words.thing} in any view to follow it through all of them. Drag to zoom in, double-click to see all; ctrl and wheel zooms, shift and drag moves. ${this.help}`);
    const { run, step } = this;
    const tensor = this.selected;
    const facts = [["size", this.size(tensor, true)], [step.words.kind, spelled(step.kindOf(tensor))], ["shape", tensor >= 0 ? step.tensors.shape[tensor] : ""], ["layer", step.layers[step.layerOf(tensor)] || ""], ["line", step.lines.source(step.linesOf(tensor))]];
    const history = run.history(tensor);
    const shown = history.length > 14 ? [...history.slice(0, 7), ["…", `${history.length - 14} more`], ...history.slice(-7)] : history;
    return el("div", { class: "card" }, el("h3", {}, step.nameOf(tensor)),
      el("dl", {}, facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      step.lines.lists(step.linesOf(tensor)),
      el("ol", { class: "history" }, shown.map(([when, what]) => el("li", {}, el("span", {}, when), what))));
  }
}

// What had the focus has it again after `change`, found by its `key`.
function keepingFocus(holder, key, change) {
  const active = holder.contains(document.activeElement) && document.activeElement.tagName === "BUTTON" ? key(document.activeElement) : null;
  change();
  if (active !== null && active !== undefined) [...holder.querySelectorAll("button")].find((it) => key(it) === active)?.focus();
}

// A time that can be told from its neighbours on the ruler.
function preciseTime(seconds, span) {
  const [factor, unit] = span >= 2 ? [1, "s"] : span >= 2e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10((span * factor) / 8))));
  return `${(seconds * factor).toFixed(digits)} ${unit}`;
}
