// What a step is, without how it looks: positions and time, who is on the device when, and what each layer takes.

// Okabe and Ito's colours, which the colour-blind tell apart; kinds that come together have a pattern as well.
const KINDS = {
  parameter: ["#0072B2", 0], optimizer_state: ["#CC79A7", 2], buffer: ["#56B4E9", 1], input: ["#8A8F98", 0],
  gradient: ["#E69F00", 0], activation: ["#009E73", 0], output_gradient: ["#D9C81E", 2], temporary: ["#B6A6E0", 1],
  communication: ["#332288", 2], workspace: ["#9C6B4A", 3],
};
// Light to dark, for what has an order: sizes, and layers from first to last.
const SHADES = ["#FDE725", "#B5DE2B", "#6ECE58", "#35B779", "#1F9E89", "#26828E", "#3E6FA3", "#6A5ACD"];
const MOST_GROUPS = 8;
const MOST_STACKS = 8;
const spelled = (kind) => kind.replaceAll("_", " ");

// The first index at which a sorted column is above `value`.
function above(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

class StepModel {
  constructor(section) {
    this.layers = section.layers;
    this.tensors = section.tensors;
    for (const name of ["nbytes", "maker", "layer", "frame"]) this.tensors[name] = column(this.tensors[name]);
    this.ops = section.ops;
    for (const name of ["layer", "flops", "first_read", "read", "first_written", "written", "first_frame", "frame"]) this.ops[name] = column(this.ops[name]);
    this.lines = new SourceLines(section.frames);
    this.marks = section.marks;
    this.words = section.words;
    this.runs = section.runs.map((run) => new RunModel(this, run));
    this.root = this.tree();
    this.byKind = this.kinds();
    this.byLayer = this.layers.length > 1 ? this.chunks() : null;
  }

  // Of a tensor, or of the workspace of an op where the number is negative.
  nameOf(tensor) {
    return tensor < 0 ? `workspace of ${this.ops.name[-1 - tensor]}` : this.tensors.name[tensor];
  }
  kindOf(tensor) {
    return tensor < 0 ? "workspace" : this.tensors.kind[tensor];
  }
  layerOf(tensor) {
    return tensor < 0 ? this.ops.layer[-1 - tensor] : this.tensors.layer[tensor];
  }
  reads(op) {
    return this.ops.read.subarray(this.ops.first_read[op], this.ops.first_read[op + 1]);
  }
  writes(op) {
    return this.ops.written.subarray(this.ops.first_written[op], this.ops.first_written[op + 1]);
  }
  // The lines of Python that ran an op, and those that made a tensor.
  linesOfOp(op) {
    return this.ops.frame.subarray(this.ops.first_frame[op], this.ops.first_frame[op + 1]);
  }
  linesOf(tensor) {
    const maker = tensor < 0 ? -1 - tensor : this.tensors.maker[tensor];
    const made = maker < 0 ? [] : this.linesOfOp(maker);
    const own = tensor < 0 || !this.tensors.frame.length ? -1 : this.tensors.frame[tensor];
    return own < 0 || made.includes(own) ? made : [own];
  }
  opText(op) {
    const layer = this.layers[this.ops.layer[op]];
    return `${this.ops.name[op]} (${layer ? `${layer}, ` : ""}${this.ops.phase[op]})`;
  }

  // The tree of layers by the parts of their names; a node with a single child is joined with it.
  tree() {
    const root = { name: "all layers", path: "", children: new Map(), layers: [] };
    this.layers.forEach((layer, index) => {
      let node = root;
      node.layers.push(index);
      for (const part of (layer || "(outside layers)").split(".")) {
        if (!node.children.has(part)) {
          node.children.set(part, { name: part, path: node.path ? `${node.path}.${part}` : part, children: new Map(), layers: [] });
        }
        node = node.children.get(part);
        node.layers.push(index);
      }
    });
    const join = (node) => {
      let children = [...node.children.values()].map(join);
      if (children.length === 1 && node !== root) {
        const only = children[0];
        return { ...only, name: `${node.name}.${only.name}`, layers: node.layers };
      }
      return { ...node, children };
    };
    return join(root);
  }

  // Groups are what the stack is made of: a label, a colour, a pattern, and for each tensor its group.
  kinds() {
    const present = new Set(this.tensors.kind);
    if (this.runs.some((run) => run.tensor.some((tensor) => tensor < 0))) present.add("workspace");
    const known = Object.keys(KINDS).filter((kind) => present.has(kind));
    const others = [...present].filter((kind) => !(kind in KINDS)).sort((a, b) => this.sizeOfKind(b) - this.sizeOfKind(a));
    const groups = known.map((kind) => ({ label: spelled(kind), colour: KINDS[kind][0], pattern: KINDS[kind][1] }));
    others.forEach((kind, at) => {
      const shade = SHADES[Math.round((at * (SHADES.length - 1)) / Math.max(1, others.length - 1))];
      groups.push({ label: kind, colour: shade, pattern: 0 });
    });
    const number = new Map([...known, ...others].map((kind, at) => [kind, at]));
    return { groups, of: (tensor) => number.get(this.kindOf(tensor)) };
  }
  sizeOfKind(kind) {
    return this.tensors.nbytes[this.tensors.kind.indexOf(kind)];
  }

  // Layers in the order in which they run, neighbours together until there are few groups.
  chunks() {
    let nodes = [this.root];
    for (;;) {
      const widest = nodes.filter((node) => node.children.length).sort((a, b) => b.layers.length - a.layers.length)[0];
      if (!widest || nodes.length >= MOST_GROUPS) break;
      nodes = nodes.flatMap((node) => (node === widest ? node.children : [node]));
    }
    nodes.sort((a, b) => a.layers[0] - b.layers[0]);
    const weight = new Float64Array(this.layers.length);
    this.tensors.layer.forEach((layer, tensor) => layer >= 0 && (weight[layer] += this.tensors.nbytes[tensor]));
    const weights = nodes.map((node) => node.layers.reduce((sum, layer) => sum + weight[layer], 0));
    const share = weights.reduce((sum, found) => sum + found, 0) / MOST_GROUPS;
    const parts = [];
    let filled = 0;
    nodes.forEach((node, at) => {
      const wanted = Math.min(MOST_GROUPS - 1, Math.floor((filled + weights[at] / 2) / (share || 1)));
      filled += weights[at];
      const last = parts[parts.length - 1];
      if (last && (nodes.length > MOST_GROUPS ? last.wanted === wanted : false)) last.nodes.push(node);
      else parts.push({ wanted, nodes: [node] });
    });
    const home = new Int32Array(this.layers.length);
    parts.forEach((part, at) => part.nodes.forEach((node) => node.layers.forEach((layer) => (home[layer] = at))));
    const groups = parts.map((part, at) => {
      const first = part.nodes[0].path, last = part.nodes[part.nodes.length - 1].path;
      const shade = SHADES[Math.round((at * (SHADES.length - 1)) / Math.max(1, parts.length - 1))];
      return { label: first === last ? first : `${first} … ${last}`, colour: shade, pattern: at % 2 ? 1 : 0 };
    });
    groups.push({ label: "outside layers", colour: "#8A8F98", pattern: 0 });
    return { groups, of: (tensor) => (this.layerOf(tensor) < 0 ? groups.length - 1 : home[this.layerOf(tensor)]) };
  }
}

const NUMBERS = [
  "seconds", "start", "end", "tensor", "nbytes", "offset", "stream", "verb", "target", "begun", "ended", "event_at", "stall_begun", "stall_ended",
];

class RunModel {
  constructor(step, run) {
    Object.assign(this, run);
    this.step = step;
    for (const name of NUMBERS) this[name] = column(run[name]);
    this.timed = this.seconds.length > 0;
    // `edges[p]` is when position p begins, and the last one when all ends.
    this.edges = { positions: Float64Array.from({ length: run.positions + 1 }, (_, at) => at) };
    this.edges.time = this.edges.positions;
    if (this.timed) {
      this.edges.time = new Float64Array(run.positions + 1);
      this.edges.time.set(this.seconds, 1);
    }
    this.total = this.sums(() => 0, 1)[0];
    this.peakAt = this.total.reduce((best, nbytes, at) => (nbytes > this.total[best] ? at : best), 0);
    this.peak = this.total[this.peakAt] || 0;
    this.eventsOf = this.streams.map((_, stream) => {
      const found = [];
      this.stream.forEach((at, event) => at === stream && found.push(event));
      return found.sort((a, b) => this.begun[a] - this.begun[b]);
    });
    this.stacks = new Map();
  }

  // Bytes on the device at each position, for each group of spans.
  sums(groupOf, count) {
    const found = Array.from({ length: count }, () => new Float64Array(this.positions + 1));
    for (let i = 0; i < this.start.length; i++) {
      const sum = found[groupOf(this.tensor[i])];
      sum[this.start[i]] += this.nbytes[i];
      sum[this.end[i]] -= this.nbytes[i];
    }
    for (const sum of found) for (let p = 1; p <= this.positions; p++) sum[p] += sum[p - 1];
    return found.map((sum) => sum.subarray(0, this.positions));
  }

  // The stack under a grouping: its parts, and spans in the order in which they lie on one another. A part is a group, or
  // under a filter what of a group passes it, and upon that the rest; `sums` has the bytes of each at each position. In
  // each part the large spans lie below, so that each can be drawn by itself; `large` are they.
  stack(key, grouping, least, filter = null) {
    const name = `${key} ${least} ${filter ? [...filter].join() : ""}`;
    if (this.stacks.has(name)) return this.stacks.get(name);
    const parts = grouping.groups.flatMap((_, group) => (filter ? [true, false] : [true]).map((passes) => ({ group, passes })));
    const partOf = (tensor) => (filter ? 2 * grouping.of(tensor) + !filter.has(this.step.layerOf(tensor)) : grouping.of(tensor));
    const part = Int32Array.from(this.tensor, partOf);
    const order = Array.from(part, (_, at) => at).sort(
      (a, b) => part[a] - part[b] || (this.nbytes[b] >= least) - (this.nbytes[a] >= least) || this.start[a] - this.start[b] || a - b,
    );
    const made = { parts, part, order, large: order.filter((span) => this.nbytes[span] >= least), sums: this.sums(partOf, parts.length) };
    if (this.stacks.size >= MOST_STACKS) this.stacks.clear();
    this.stacks.set(name, made);
    return made;
  }
  // The bytes beneath a span in a stack, at each position.
  beneath(span, stack) {
    const found = new Float64Array(this.positions + 1);
    for (const other of stack.order) {
      if (other === span) break;
      found[this.start[other]] += this.nbytes[other];
      found[this.end[other]] -= this.nbytes[other];
    }
    for (let p = 1; p <= this.positions; p++) found[p] += found[p - 1];
    return found;
  }

  endOf(axis) {
    return this.edges[axis][this.positions] || 1;
  }
  // A time on the axis that is shown, and back.
  place(seconds, axis) {
    if (axis === "time") return seconds;
    const p = Math.min(this.positions - 1, Math.max(0, above(this.edges.time, seconds) - 1));
    const width = this.edges.time[p + 1] - this.edges.time[p];
    return p + (width > 0 ? Math.min(1, (seconds - this.edges.time[p]) / width) : 0);
  }
  eventPlace(event, axis) {
    if (axis === "time") return [this.begun[event], this.ended[event]];
    if (this.stream[event] === 0) return [this.event_at[event], this.event_at[event] + 1];
    return [this.place(this.begun[event], axis), this.place(this.ended[event], axis)];
  }
  positionAt(x, axis) {
    return Math.min(this.positions - 1, Math.max(0, above(this.edges[axis], x) - 1));
  }
  live(position, order) {
    return order.filter((span) => this.start[span] <= position && position < this.end[span]);
  }
  at(position) {
    return this.timed ? FORMATS.seconds(this.edges.time[position]) : `${this.step.words.position} ${position}`;
  }

  // What becomes of a tensor, in order: [when, what].
  history(tensor) {
    const found = [];
    const note = (position, what) => found.push([position, this.at(position), what]);
    for (let i = 0; i < this.start.length; i++) {
      if (this.tensor[i] !== tensor) continue;
      if (this.start[i] === 0 && this.step.tensors.maker[tensor] !== 0) note(0, "there from the beginning");
      if (this.end[i] < this.positions) note(this.end[i], this.leaves(tensor, this.end[i]) ? "gone from the device, kept in the store" : "freed");
      else note(this.positions, "still there at the end");
    }
    for (let event = 0; event < this.target.length; event++) {
      const verb = this.verbs[this.verb[event]], op = this.target[event];
      if (this.stream[event] > 0) {
        if (op === tensor) found.push([this.event_at[event], FORMATS.seconds(this.begun[event]), `${verb} until ${FORMATS.seconds(this.ended[event])}`]);
      } else if (tensor >= 0 && this.step.writes(op).includes(tensor)) {
        const what = verb === "recompute" ? "made again by" : op === this.step.tensors.maker[tensor] ? "made by" : "updated by";
        found.push([this.event_at[event], FORMATS.seconds(this.begun[event]), `${what} ${this.step.opText(op)}`]);
      } else if (tensor >= 0 && this.step.reads(op).includes(tensor)) {
        found.push([this.event_at[event], FORMATS.seconds(this.begun[event]), `read by ${this.step.opText(op)}`]);
      }
    }
    return found.sort((a, b) => a[0] - b[0]).map(([, when, what]) => [when, what]);
  }
  // Whether it comes back from the store after `position`.
  leaves(tensor, position) {
    for (let event = 0; event < this.target.length; event++) {
      if (this.stream[event] > 0 && this.target[event] === tensor && this.event_at[event] >= position && this.verbs[this.verb[event]] === "prefetch") return true;
    }
    return false;
  }

  // For each layer: bytes of its tensors at `position`, and seconds of compute.
  byLayer(position) {
    const nbytes = new Float64Array(this.step.layers.length), seconds = new Float64Array(this.step.layers.length);
    for (let i = 0; i < this.start.length; i++) {
      const layer = this.step.layerOf(this.tensor[i]);
      if (layer >= 0 && this.start[i] <= position && position < this.end[i]) nbytes[layer] += this.nbytes[i];
    }
    for (const event of this.eventsOf[0] || []) seconds[this.step.ops.layer[this.target[event]]] += this.ended[event] - this.begun[event];
    return { nbytes, seconds };
  }
}
