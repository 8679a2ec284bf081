// The model as a tree of layers, with bytes at the instant and seconds of compute; a layer filters all views.
class TreeView {
  constructor(views) {
    this.views = views;
    const most = [...views.step.root.children].sort((a, b) => b.layers.length - a.layers.length)[0];
    this.opened = new Set(["", most.path]);
    this.list = el("ul", { role: "tree", "aria-label": "Layers", onkeydown: (event) => this.key(event) });
    this.element = el("div", { class: "tree" }, el("h3", {}, "Layers"), el("div", { class: "row head", "aria-hidden": "true" }, el("span", {}, "click to filter"), el("span", {}, "bytes here"), el("span", {}, views.run.timed ? "compute" : "")), this.list);
  }
  show(position) {
    const { nbytes, seconds } = this.views.run.byLayer(position);
    this.sum = (node) => [node.layers.reduce((sum, layer) => sum + nbytes[layer], 0), node.layers.reduce((sum, layer) => sum + seconds[layer], 0)];
    this.whole = this.sum(this.views.step.root);
    this.fill(this.list.contains(document.activeElement) ? document.activeElement.dataset.path : undefined);
  }
  fill(focused) {
    const rows = [];
    const add = (node, depth) => {
      rows.push(this.row(node, depth));
      if (this.opened.has(node.path)) node.children.forEach((child) => add(child, depth + 1));
    };
    add(this.views.step.root, 0);
    const scrolled = this.list.scrollTop;
    this.list.replaceChildren(...rows);
    this.list.scrollTop = scrolled;
    this.mark(this.views.filterPath);
    const wanted = focused !== undefined ? rows.find((row) => row.dataset.path === focused) : null;
    (wanted || rows[0]).tabIndex = 0;
    if (wanted) wanted.focus();
  }
  row(node, depth) {
    const [nbytes, seconds] = this.sum(node);
    const inner = node.children.length > 0;
    const open = this.opened.has(node.path);
    const sign = el("span", { class: "sign", "aria-hidden": "true", onclick: (event) => (event.stopPropagation(), this.turn(node)) }, inner ? (open ? "▾" : "▸") : "");
    const name = el("span", { class: "layer" }, sign, el("bdi", {}, node.name));
    name.style.paddingLeft = `${depth * 14}px`;
    const bar = (value, whole, text) => {
      const made = el("span", { class: "amount" }, text);
      made.style.setProperty("--share", whole ? value / whole : 0);
      return made;
    };
    const made = el("li", { class: "row", role: "treeitem", tabindex: -1, "aria-level": depth + 1, "aria-expanded": inner ? String(open) : null, "data-path": node.path, title: node.path || null, onclick: () => this.choose(node) },
      name, bar(nbytes, this.whole[0], FORMATS.bytes(nbytes)), bar(seconds, this.whole[1], this.views.run.timed ? FORMATS.seconds(seconds) : ""));
    made.node = node;
    return made;
  }
  choose(node) {
    this.views.pick(node.path === "" || node.path === this.views.filterPath ? null : node.path);
  }
  turn(node) {
    if (!node.children.length) return;
    if (!this.opened.delete(node.path)) this.opened.add(node.path);
    this.fill(node.path);
  }
  mark(path) {
    for (const row of this.list.children) row.setAttribute("aria-selected", String(row.dataset.path === path && path !== null));
  }
  key(event) {
    const rows = [...this.list.children];
    const at = rows.indexOf(document.activeElement);
    if (at < 0) return;
    const node = rows[at].node;
    const open = this.opened.has(node.path);
    const go = (to) => {
      if (!rows[to]) return;
      rows[at].tabIndex = -1;
      rows[to].tabIndex = 0;
      rows[to].focus();
    };
    const acts = {
      ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), Home: () => go(0), End: () => go(rows.length - 1),
      ArrowRight: () => (open || !node.children.length ? go(at + 1) : this.turn(node)), ArrowLeft: () => (open && node.children.length ? this.turn(node) : go(at - 1)),
      Enter: () => this.choose(node), " ": () => this.choose(node), Escape: () => this.views.clear(),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }
}
