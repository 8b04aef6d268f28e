// One box that finds ops, units, source lines and modules of all graphs.

const RESULTS = 40;

/** Everything that can be found: {kind, text, about, graph, target}, in the order of the report. */
function searchEntries(indexes) {
  const entries = [];
  indexes.forEach((index, graph) => {
    const add = (kind, text, about, target) =>
      entries.push({ kind, text, about, graph, target, lower: `${text}\n${about}`.toLowerCase() });
    for (const unit of index.units.values())
      add(
        unit.sort === "cluster" ? "cluster" : "call",
        unit.name,
        [unit.class, unit.module, unit.pattern].filter(Boolean).join(" · "),
        unit.name,
      );
    const lines = new Map();
    for (const op of index.ops.values()) {
      const call = index.callOf.get(op.name);
      const of = call && call.name !== op.name ? `piece of ${call.target} (${call.name})` : call?.target;
      add("op", op.name, [op.target, of, op.source?.module].filter(Boolean).join(" · "), op.name);
      if (op.source) push(lines, `${showPlace(op.source)} ${op.source.code.trim()}`, op);
    }
    for (const [text, ops] of lines)
      add("line", text, showCount(ops.length, "op"), (ops.find((op) => op.unit !== null) ?? ops[0]).name);
    const walk = (node) => {
      if (node.parent && !node.run) add("module", node.path, showCount(node.units.length, "unit"), node);
      for (const child of node.children) if (!child.unit) walk(child);
    };
    walk(index.root);
  });
  return entries;
}

/** The best matches: whole names first, then beginnings, then all that holds every word. */
function found(entries, text, current) {
  const query = text.trim().toLowerCase();
  if (query === "") return [];
  const words = query.split(/\s+/);
  const order = ["cluster", "call", "op", "module", "line"];
  const matches = [];
  for (const entry of entries) {
    if (!words.every((word) => entry.lower.includes(word))) continue;
    const name = entry.text.toLowerCase();
    const rank = name === query ? 0 : name.startsWith(query) ? 1 : name.includes(query) ? 2 : 3;
    matches.push({
      entry,
      score: rank * 100 + (entry.graph === current ? 0 : 50) + order.indexOf(entry.kind),
    });
  }
  return matches
    .sort((x, y) => x.score - y.score)
    .slice(0, RESULTS)
    .map((match) => match.entry);
}

/** Wires the input and its list (a combobox in ARIA's terms). choose(entry) is called with what is picked. */
function searchBox(input, list, indexes, current, choose) {
  const entries = searchEntries(indexes);
  let shown = [];
  let at = -1;
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const pick = (entry) => {
    close();
    choose(entry);
  };
  const point = (position) => {
    at = position;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    input.setAttribute("aria-activedescendant", `result-${at}`);
    list.children[at]?.scrollIntoView({ block: "nearest" });
  };
  const open = () => {
    shown = found(entries, input.value, current());
    const several = indexes.length > 1;
    list.replaceChildren(
      ...shown.map((entry, i) =>
        h(
          "li",
          {
            id: `result-${i}`,
            role: "option",
            onmousedown: (e) => e.preventDefault(),
            onclick: () => pick(entry),
          },
          h("span", { class: `kind ${entry.kind}` }, entry.kind),
          h("span", { class: "text" }, entry.text),
          h(
            "span",
            { class: "about" },
            several ? `${indexes[entry.graph].graph.name} · ${entry.about}` : entry.about,
          ),
        ),
      ),
    );
    if (shown.length === 0 && input.value.trim())
      list.append(h("li", { class: "none" }, "nothing by that name"));
    list.hidden = input.value.trim() === "";
    input.setAttribute("aria-expanded", String(!list.hidden));
    if (shown.length > 0) point(0);
  };
  input.addEventListener("input", open);
  input.addEventListener("focus", () => input.value && open());
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && shown.length) point((at + 1) % shown.length);
    else if (event.key === "ArrowUp" && shown.length) point((at + shown.length - 1) % shown.length);
    else if (event.key === "Enter" && !list.hidden && shown[at]) pick(shown[at]);
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}
