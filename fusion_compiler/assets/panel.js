// The panel beside the drawing: a unit, an edge, or a module, whichever is selected.
// `page` is {report, index, go}; go.unit(name, op), go.edge(edge), go.module(node) select and look at it.

function unitPanel(page, unit, opName) {
  const report = page.report;
  const node = page.index.leaves.get(unit.name);
  const sort = { cluster: "cluster", library: "library call", eager: "eager call" }[unit.sort] ?? unit.sort;
  const tags = [
    h("span", { class: "tag", "data-class": colour(unit.class) }, unit.class),
    h("span", { class: "tag" }, sort),
    unit.pattern ? h("span", { class: "tag" }, `pattern ${unit.pattern}`) : null,
  ];
  const sections = [
    ["Ops", opsSection(page, unit, opName)],
    ["Kernel", unit.kernel === null ? null : kernelSection(page, unit, report.kernels[unit.kernel])],
    ["Why not one kernel", edgesSection(page, unit)],
    ["Tensors", tensorsSection(page, unit)],
    ["Eager", callsSection(page, unit)],
  ].filter(([, element]) => element);
  const jumps = sections.map(([name, element]) => link(name, () => element.scrollIntoView()));
  return [
    h("h2", {}, unit.name),
    h("p", { class: "tags" }, tags),
    modulePath(page, node),
    unit.why ? h("p", { class: "why" }, unit.why) : null,
    facts(unit),
    h("p", { class: "jumps" }, jumps),
    sections.map(([, element]) => element),
  ];
}

function modulePath(page, node) {
  const path = pathTo(node).slice(0, -1);
  if (path.length === 0) return null;
  const steps = path.map((at, i) => [i ? " › " : null, link(at.label, () => page.go.module(at))]);
  return h("p", { class: "path", "aria-label": "module" }, steps);
}

function facts(unit) {
  const moved = unit.bytes_read + unit.bytes_written;
  const rows = [
    [
      "predicted",
      unit.sort === "cluster" ? `${showUs(unit.us)}, in eager ${showUs(unit.eager_us)}` : showUs(unit.us),
    ],
  ];
  if (unit.measured) {
    const { us, bandwidth, error } = unit.measured;
    const compared = `at ${showBytes(bandwidth)}/s; the prediction is ${showPercent(Math.abs(error))} ${error < 0 ? "below" : "above"}`;
    rows.push(["measured", `${showUs(us)} ${error === null ? "on the host's clock" : compared}`]);
  }
  rows.push([
    "moves",
    `${showBytes(moved)}: ${showBytes(unit.bytes_read)} read, ${showBytes(unit.bytes_written)} written`,
  ]);
  rows.push(["computes", showFlop(unit.flops)]);
  rows.push(["bound by", unit.bound]);
  if (unit.space) rows.push(["iterates over", unit.space]);
  return h(
    "dl",
    { class: "facts" },
    rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/** Ops in order of execution, below the source line that they come from. */
function opsSection(page, unit, chosen) {
  const groups = [];
  for (const name of unit.ops) {
    const op = page.index.ops.get(name);
    const source = op?.source ?? null;
    const key = source && `${source.file}:${source.line}:${source.module}`;
    if (groups.length === 0 || groups[groups.length - 1].key !== key) groups.push({ key, source, names: [] });
    groups[groups.length - 1].names.push(name);
  }
  return section(
    showCount(unit.ops.length, "op"),
    groups.map(({ source, names }) => [
      source ? sourceLine(source) : h("p", { class: "source" }, "no source line"),
      h(
        "table",
        { class: "ops" },
        h(
          "tbody",
          {},
          names.map((name) => opRow(page, name, chosen)),
        ),
      ),
    ]),
  );
}

function sourceLine(source) {
  const place = h("span", { class: "place", title: `${source.file}:${source.line}` }, showPlace(source));
  const module = source.module ? h("span", { class: "in" }, ` in ${source.module}`) : null;
  return h("p", { class: "source" }, place, module, h("br"), pythonCode(source.code.trim()));
}

function opRow(page, name, chosen) {
  const op = page.index.ops.get(name);
  if (!op) return h("tr", { "data-op": name }, h("td", { colspan: 3 }, name));
  return h(
    "tr",
    { "data-op": name, class: name === chosen ? "found" : null },
    h("td", {}, dot(op.class), name),
    h("td", { title: `${op.target} (${op.kind})` }, shortTarget(op.target)),
    h("td", { class: "shape" }, op.shapes.join(", ")),
  );
}

/** The calls that eager makes for what a cluster does. */
function callsSection(page, unit) {
  const calls = page.index.graph.calls.filter((call) => call.unit === unit.name);
  if (unit.sort !== "cluster" || calls.length === 0) return null;
  const rows = calls.map((call) => ({
    cells: [[dot(call.class), call.name], call.target, showBytes(call.bytes), showUs(call.us)],
  }));
  const head = [
    ["call", "name"],
    ["of", ""],
    ["moves", "number"],
    ["predicted", "number"],
  ];
  return section(`Instead of ${showCount(calls.length, "call")} of eager`, table(head, rows));
}

function kernelSection(page, unit, source) {
  if (source === undefined) return section("Kernel", h("p", {}, `${unit.kernel}: not in the report`));
  const same = [...page.index.units.values()].filter((u) => u.kernel === unit.kernel && u.name !== unit.name);
  const shared =
    same.length === 0
      ? null
      : h(
          "p",
          { class: "note" },
          `Also runs as ${same.length === 1 ? "" : `${same.length} others: `}`,
          same.slice(0, 8).flatMap((u, i) => [i ? ", " : null, link(u.name, () => page.go.unit(u.name))]),
          same.length > 8 ? " …" : null,
        );
  const copy = button("Copy", () => copyText(code, copy), { class: "small" });
  const code = h("pre", { class: "kernel", tabindex: 0, "aria-label": "Triton kernel" }, pythonCode(source));
  return section(["Kernel ", h("code", {}, unit.kernel), copy], shared, code);
}

/** To the clipboard; where the browser keeps it from files, the text is selected for Ctrl+C. */
async function copyText(element, pressed) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    pressed.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(element);
    pressed.textContent = "Selected";
  }
}

function tensorsSection(page, unit) {
  const edges = page.index.edgesOf.get(unit.name).filter((edge) => edge.flow);
  const links = (chosen, other) =>
    chosen.flatMap((edge, i) => [i ? ", " : null, link(edge[other], () => page.go.unit(edge[other]))]);
  const reads = edges.filter((edge) => edge.b === unit.name);
  const read = edges.filter((edge) => edge.a === unit.name);
  return section(
    "Tensors",
    h(
      "dl",
      { class: "facts" },
      h("dt", {}, "reads"),
      h("dd", { class: "names" }, unit.inputs.join(", ") || "nothing"),
      h("dt", {}, "stores"),
      h("dd", { class: "names" }, unit.outputs.join(", ") || "nothing"),
      h("dt", {}, "after"),
      h(
        "dd",
        {},
        reads.length ? links(reads, "a") : unit.inputs.length ? "inputs of the graph alone" : "nothing",
      ),
      h("dt", {}, "read by"),
      h("dd", {}, read.length ? links(read, "b") : "outputs of the graph alone"),
    ),
  );
}

/** Why the neighbours are other kernels, the largest saving first. */
function edgesSection(page, unit) {
  const edges = page.index.edgesOf.get(unit.name).filter((edge) => edge.records.length > 0);
  edges.sort((x, y) => y.saving - x.saving);
  if (edges.length === 0) return null;
  const rows = edges.flatMap((edge) => {
    const other = edge.a === unit.name ? edge.b : edge.a;
    const way = !edge.flow ? "beside" : edge.a === unit.name ? "with its reader" : "with what it reads,";
    return edge.records.map((record) =>
      h(
        "li",
        {},
        reasonOf(
          record,
          h("span", { class: "way" }, `${way} `),
          link(other, () => page.go.edge(edge)),
        ),
      ),
    );
  });
  return section("Why not one kernel", h("ul", { class: "reasons" }, rows));
}

function reasonOf(record, ...lead) {
  const kind = record.saving_us > 0 && !record.at_most ? "saving missed" : "saving";
  return [
    h("div", { class: "head" }, h("span", {}, lead), h("span", { class: kind }, showSaving(record))),
    h("p", {}, h("b", {}, record.rule), ": ", record.reason),
  ];
}

// -- edges and modules --------------------------------------------------------------------------------

/** One edge, or all that a line of the drawing stands for. */
function edgePanel(page, edges) {
  const sorted = [...edges].sort((x, y) => y.saving - x.saving);
  const title = sorted.length === 1 ? null : h("h2", {}, showCount(sorted.length, "edge"));
  return [title, sorted.map((edge) => oneEdge(page, edge, sorted.length === 1))];
}

function oneEdge(page, edge, alone) {
  const heading = [
    link(edge.a, () => page.go.unit(edge.a)),
    edge.flow ? " → " : " beside ",
    link(edge.b, () => page.go.unit(edge.b)),
  ];
  const bytes = Math.max(0, ...edge.records.map((record) => record.bytes));
  const told = edge.records.flatMap((record) => record.tensors);
  const tensors = [...new Set(told.length > 0 ? told : edge.tensors)];
  const what = edge.flow ? "between them" : "both read";
  const size = bytes > 0 ? ` (${showBytes(bytes)})` : "";
  const reasons =
    edge.records.length > 0
      ? h(
          "ul",
          { class: "reasons" },
          edge.records.map((record) => h("li", {}, reasonOf(record))),
        )
      : h("p", { class: "note" }, "The report says nothing of this pair.");
  return h(
    "article",
    { class: "edge" },
    h(alone ? "h2" : "h3", {}, heading),
    tensors.length > 0 ? h("p", { class: "names" }, `${what}: ${tensors.join(", ")}${size}`) : null,
    reasons,
  );
}

function modulePanel(page, node) {
  const units = [...node.units].sort((x, y) => y.us - x.us);
  const classes = [...node.usByClass].sort((x, y) => y[1] - x[1]);
  const whole = sum(page.index.root.units, (u) => u.us) || 1;
  const before = sum(node.units, (u) => u.eager_us);
  const rows = units.slice(0, 200).map((u) => ({
    cells: [
      [dot(u.class), link(u.name, () => page.go.unit(u.name))],
      u.sort,
      showUs(u.us),
      showPercent(u.us / (node.us || 1)),
    ],
  }));
  return [
    h("h2", {}, node.run ? node.label : node.path),
    modulePath(page, node),
    h(
      "p",
      {},
      `${showUs(node.us)} predicted, ${showPercent(node.us / whole)} of the graph; in eager ${showUs(before)}.`,
    ),
    h(
      "p",
      {},
      classes.map(([name, us]) => h("span", { class: "share" }, dot(name), `${name} ${showUs(us)} `)),
    ),
    table(
      [
        ["unit", "name"],
        ["sort", ""],
        ["us", "number"],
        ["share", "number"],
      ],
      rows,
    ),
    units.length > 200 ? h("p", { class: "note" }, `and ${units.length - 200} more`) : null,
  ];
}

/** An op that no unit runs: a view, or what its readers compute again. */
function looseOpPanel(page, op, readers) {
  return [
    h("h2", {}, op.name),
    h(
      "p",
      { class: "tags" },
      h("span", { class: "tag", "data-class": colour(op.class) }, op.class),
      h("span", { class: "tag" }, op.target),
    ),
    h("p", { class: "why" }, "Runs nothing of its own: a view, or an op that its readers compute again."),
    op.source ? sourceLine(op.source) : null,
    h("p", { class: "names" }, op.shapes.join(", ")),
    h(
      "p",
      {},
      "Read by ",
      readers.length
        ? readers.flatMap((u, i) => [i ? ", " : null, link(u.name, () => page.go.unit(u.name))])
        : "outputs of the graph alone",
    ),
  ];
}

function section(title, ...children) {
  return h("section", {}, h("h3", {}, title), ...children);
}
