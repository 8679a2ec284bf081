function stepOf(section) {
  return el("div", {}, `${section.runs[0].positions} instructions`);
}
