// The page: the verdict first, then each section, then what a reader must know besides.

function build() {
  document.body.append(TOOLTIP);
  const header = el("header", {}, el("div", {}, el("h1", {}, CONTENT.title)), themeButton());
  const verdict = CONTENT.verdict;
  const tone = verdict.good === null ? "plain" : verdict.good ? "good" : "bad";
  const sign = { good: "✓", bad: "✕", plain: "" }[tone];
  const figures = verdict.figures.map((figure) => {
    const note = figure.note ? el("div", { class: "note" }, figure.note) : null;
    return el("div", { class: "figure" }, el("div", { class: "label" }, figure.label), el("div", { class: "value" }, figure.value), note);
  });
  const sentence = el("p", { class: "sentence" }, sign ? el("span", { class: "sign", "aria-hidden": "true" }, sign) : null, verdict.text);
  REPORT.replaceChildren(header, el("section", { class: `verdict ${tone}`, "aria-label": "Verdict" }, sentence, el("div", { class: "figures" }, figures)));
  const draw = { Table: tableOf, Lines: chartOf, Points: chartOf, Step: stepOf };
  for (const section of CONTENT.sections) {
    const heading = section.title ? el("h2", {}, section.title) : null;
    const note = section.note ? el("p", { class: "note" }, section.note) : null;
    REPORT.append(el("section", { class: section.is.toLowerCase() }, heading, draw[section.is](section), note));
  }
  if (CONTENT.notes.length) REPORT.append(el("section", {}, el("h2", {}, "Notes"), el("ul", {}, CONTENT.notes.map((note) => el("li", {}, note)))));
  if (CONTENT.next.length) REPORT.append(el("section", {}, el("h2", {}, "What to do next"), el("pre", { class: "wide", tabindex: "0" }, CONTENT.next.join("\n"))));
  REPORT.append(el("footer", {}, "Made by Overspill. This file holds everything it shows."));
}

build();
redraw();
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) (width = innerWidth), redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// On paper everything is dark on white, and as wide as the paper.
addEventListener("beforeprint", () => {
  REPORT.dataset.before = document.documentElement.dataset.theme || "";
  setTheme("light");
});
addEventListener("afterprint", () => setTheme(REPORT.dataset.before || null));
