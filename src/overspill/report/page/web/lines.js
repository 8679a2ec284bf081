// The lines of Python behind ops and tensors: each is kept once, with the line that called it.

class SourceLines {
  constructor(frames) {
    this.files = frames.files;
    this.functions = frames.function;
    for (const name of ["file", "line", "caller", "backward"]) this[name] = column(frames[name]);
  }
  get known() {
    return this.functions.length > 0;
  }
  // With its folders, as it stands in a stack.
  place(frame) {
    return `${this.files[this.file[frame]]}:${this.line[frame]} ${this.functions[frame]}`;
  }
  // As it is named in one line.
  name(frame) {
    const file = this.files[this.file[frame]].split(/[/\\]/).pop();
    return `${this.backward[frame] ? "backward of " : ""}${file}:${this.line[frame]} ${this.functions[frame]}`;
  }
  // Of a kernel of several ops there are several.
  source(frames) {
    const names = [...new Set(Array.from(frames, (frame) => this.name(frame)))];
    return names.length > 1 ? `${names[0]} and ${names.length - 1} more` : names[0] || "";
  }
  // The outermost line first. A caller comes before what it called.
  stack(frame) {
    const found = [];
    for (let at = frame, above = this.functions.length; at >= 0 && at < above; above = at, at = this.caller[at]) found.push(at);
    return found.reverse();
  }
  // The lines in which a text in small letters is found.
  matching(sought) {
    const found = new Set();
    for (let frame = 0; frame < this.functions.length; frame++) if (this.place(frame).toLowerCase().includes(sought)) found.add(frame);
    return found;
  }
  // Whole stacks, as a list each.
  lists(frames) {
    return Array.from(frames, (frame) =>
      el("ol", { class: "stack", "aria-label": "Stack, the outermost line first" }, this.stack(frame).map((at) => el("li", {}, this.place(at)))),
    );
  }
}
