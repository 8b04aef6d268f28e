// What is said of the whole step: totals, where time goes, data movement, missed fusions.

function overview(page) {
  const { report } = page;
  const t = report.totals;
  if (report.graphs.length === 0)
    return [h("p", {}, "No graph was captured: there is nothing to plan."), notesSection(report)];
  return [
    h(
      "div",
      { class: "tiles" },
      tile(
        `${t.launches_before.toLocaleString("en")} → ${t.launches_after.toLocaleString("en")}`,
        "launches",
      ),
      tile(
        `${showUs(t.us_before)} → ${showUs(t.us_after)}`,
        `predicted${t.us_after > 0 ? `, ${significant(t.us_before / t.us_after)}x` : ""}`,
      ),
      tile(`${showBytes(t.bytes_before)} → ${showBytes(t.bytes_after)}`, "moved"),
      tile(t.intermediates.toLocaleString("en"), "intermediates never stored"),
    ),
    h(
      "p",
      {},
      `${showCount(t.ops, "op")}: ${t.fused_ops.toLocaleString("en")} in ${showCount(t.kernels, "kernel")} `,
      `(${t.distinct_kernels.toLocaleString("en")} distinct), ${showCount(t.library_calls, "library call")}, ${t.eager_ops.toLocaleString("en")} eager.`,
    ),
    section("Where the time goes, by class", timeChart(report)),
    measuredSection(page),
    notesSection(report),
  ];
}

function tile(value, label) {
  return h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label));
}

/** Bars before and after fusion for each class, over all graphs; measured ones where there are. */
function timeChart(report) {
  const units = report.graphs.flatMap((graph) => graph.units).filter((unit) => unit.measured);
  const measured = sumBy(
    units,
    (unit) => unit.class,
    (unit) => unit.measured.us,
  );
  const rows = report.movement.classes.filter((row) => row.us_before > 0 || row.us_after > 0);
  const most = Math.max(...rows.flatMap((r) => [r.us_before, r.us_after, measured.get(r.class) ?? 0]), 1e-9);
  const bar = (us, kind, name) =>
    h(
      "div",
      { class: `bar ${kind}` },
      widthOf(h("i", { "data-class": colour(name) }), (72 * us) / most),
      h("span", {}, showUs(us)),
    );
  const groups = rows.map((row) =>
    h(
      "div",
      {
        class: "group",
        role: "img",
        "aria-label": `${row.class}: ${showUs(row.us_before)} before, ${showUs(row.us_after)} after fusion`,
      },
      h("span", { class: "class" }, dot(row.class), row.class),
      h(
        "div",
        {},
        bar(row.us_before, "before", row.class),
        bar(row.us_after, "after", row.class),
        measured.has(row.class) ? bar(measured.get(row.class), "measured", row.class) : null,
      ),
    ),
  );
  const stack = (key, label) =>
    h(
      "div",
      { class: "group" },
      h("span", { class: "class" }, label),
      h(
        "div",
        { class: "stack" },
        rows.map((row) =>
          widthOf(
            h("i", { "data-class": colour(row.class), title: `${row.class}: ${showUs(row[key])}` }),
            stackShare(rows, row[key]),
          ),
        ),
        h("span", {}, showUs(sum(rows, (r) => r[key]))),
      ),
    );
  const key = [
    ["before", "before"],
    ["after", "after fusion"],
    ...(measured.size ? [["measured", "measured"]] : []),
  ];
  return h(
    "div",
    { class: "chart" },
    stack("us_before", "before"),
    stack("us_after", "after"),
    h(
      "p",
      { class: "key" },
      key.map(([kind, text]) =>
        h("span", { class: `bar ${kind}` }, h("i", { "data-class": "layout" }), h("span", {}, text)),
      ),
    ),
    groups,
  );
}

function stackShare(rows, us) {
  const longest = Math.max(
    sum(rows, (r) => r.us_before),
    sum(rows, (r) => r.us_after),
    1e-9,
  );
  return (78 * us) / longest;
}

function widthOf(element, percent) {
  element.style.width = `${percent}%`;
  return element;
}

function measuredSection(page) {
  const { measured, graphs } = page.report;
  if (measured === null) return null;
  const units = graphs.flatMap((graph, i) =>
    graph.units.filter((u) => u.measured && u.measured.error !== null).map((unit) => ({ unit, i })),
  );
  const worst = units
    .sort((x, y) => Math.abs(y.unit.measured.error) - Math.abs(x.unit.measured.error))
    .slice(0, 10);
  const rows = worst.map(({ unit, i }) => ({
    cells: [
      [dot(unit.class), link(unit.name, () => page.go.unit(unit.name, undefined, i))],
      showUs(unit.us),
      showUs(unit.measured.us),
      showPercent(unit.measured.error),
    ],
  }));
  const where = measured.clock === "host" ? ", on the host's clock" : "";
  const text =
    `${showUs(measured.step_us)} a step on ${measured.device}${where} (${showCount(measured.repetitions, "repetition")}), ` +
    `${showUs(measured.outside_us)} of it in kernels of no unit.`;
  const others = measured.unmatched.map((other) => ({
    cells: [other.kernel, other.calls.toLocaleString("en"), showUs(other.us)],
  }));
  return section(
    "Measured",
    h("p", {}, text),
    rows.length > 0
      ? [
          h("p", { class: "note" }, "Furthest from the prediction:"),
          table(
            [
              ["unit", "name"],
              ["predicted", "number"],
              ["measured", "number"],
              ["error", "number"],
            ],
            rows,
          ),
        ]
      : null,
    others.length > 0
      ? [
          h("p", { class: "note" }, "Kernels of no unit:"),
          table(
            [
              ["kernel", "name"],
              ["calls", "number"],
              ["measured", "number"],
            ],
            others,
            { class: "others" },
          ),
        ]
      : null,
  );
}

function notesSection(report) {
  const { versions } = report;
  const rows = [
    ["captured by", report.captured_by],
    ["not whole", report.not_whole],
    ["incomplete", report.incomplete],
    ...(report.breaks ?? []).map(({ source, reason }) => [
      "graph break",
      `${source ? `${source.file}:${source.line}: ${source.code}: ` : ""}${reason}`,
    ]),
    ...report.graphs.flatMap((graph) =>
      Object.entries(graph.notes).map(([key, text]) => [`${graph.name}: ${key}`, String(text)]),
    ),
    [
      "versions",
      `fusion_compiler ${versions.fusion_compiler}, torch ${versions.torch}${versions.triton ? `, triton ${versions.triton}` : ""}`,
    ],
  ].filter(([, value]) => value);
  return section(
    "Notes",
    h(
      "dl",
      { class: "facts" },
      rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    ),
  );
}

// -- missed -------------------------------------------------------------------------------------------

/** Where a row's pair is, with how many pairs are alike in other layers, and how many could be fused instead. */
function missedPlace(edge) {
  const alike = edge.times > 1 ? `, and ${edge.times - 1} alike elsewhere` : "";
  return `${edge.graph}${alike}${edge.others ? `; or ${edge.others} other pairs like it instead` : ""}`;
}

function missedTable(page) {
  const { missed } = page.report;
  if (missed.length === 0) return [h("p", {}, "No pair of neighbours would have saved time as one kernel.")];
  const rows = missed.map((edge, i) => {
    const row = h(
      "tr",
      { tabindex: i === 0 ? 0 : -1, "data-missed": i },
      h("td", { class: "number" }, i + 1),
      h(
        "td",
        {},
        h("b", {}, edge.a),
        " + ",
        h("b", {}, edge.b),
        h("br"),
        h("span", { class: "in" }, missedPlace(edge)),
        h("p", {}, h("b", {}, edge.rule), ": ", edge.reason),
      ),
      h(
        "td",
        { class: "number saving" },
        showUs(edge.total_us),
        edge.at_most ? [h("br"), h("span", { class: "in" }, "at most")] : null,
      ),
    );
    const choose = () => {
      for (const other of row.parentElement.rows) other.setAttribute("aria-selected", String(other === row));
      page.go.pair(edge);
    };
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => {
      const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
      if (event.key === "Enter" || event.key === " ") choose();
      else if (next) moveStop(row, next);
      else return;
      event.preventDefault();
    });
    return row;
  });
  return [
    h(
      "p",
      { class: "note" },
      "Neighbours that stayed two launches, by what one would have saved; at most where no kernel of both exists, so that it is a bound. A row shows its pair in the drawing.",
    ),
    h(
      "table",
      { class: "missed", role: "grid" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, ""),
          h("th", {}, "pair and reason"),
          h("th", { class: "number" }, "would save"),
        ),
      ),
      h("tbody", {}, rows),
    ),
  ];
}

/** Keyboard focus goes from one element of a list to another; Tab comes back to it. */
function moveStop(from, to) {
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

// -- data movement ------------------------------------------------------------------------------------

function movementTables(page) {
  const rows = page.report.movement.classes.map((row) => ({
    cells: [
      [dot(row.class), row.class],
      arrow(row.calls, row.units),
      significant(row.gflop),
      [`${significant(row.input_mwords)} in`, h("br"), `${significant(row.output_mwords)} out`],
      arrow(showBytes(row.bytes_before), showBytes(row.bytes_after)),
      arrow(showUs(row.us_before), showUs(row.us_after)),
      showPercent(row.flop_share),
      showPercent(row.share),
      arrow(wholePercent(row.mue_before), wholePercent(row.mue_after)),
    ],
  }));
  const head = [
    ["class", "name"],
    ["calls", "number"],
    ["Gflop", "number"],
    ["Mwords", "number"],
    ["moved", "number"],
    ["time", "number"],
    ["of flop", "number"],
    ["of time", "number"],
    ["MUE", "number"],
  ];
  return [
    section(
      "By class, all graphs",
      h("div", { class: "wide" }, table(head, rows, { class: "movement" })),
      h(
        "p",
        { class: "note" },
        "Eager's calls → the plan's units. A word is one element of a tensor. MUE, memory usage efficiency: the time that the device's copy bandwidth takes for the bytes that have to move, over the time predicted.",
      ),
    ),
    page.index ? section(`Calls of eager in ${page.index.graph.name}`, callsTable(page)) : null,
  ];
}

function arrow(before, after) {
  return [h("span", { class: "in" }, `${before} → `), h("br"), after];
}

const COLUMNS = [
  ["call", "name", (call) => call.target],
  ["Gflop", "number", (call) => call.gflop],
  ["Mwords", "number", (call) => call.input_mwords + call.output_mwords],
  ["moved", "number", (call) => call.bytes],
  ["flop/B", "number", (call) => call.intensity],
  ["time", "number", (call) => call.us],
  ["share", "number", (call) => call.share],
  ["MUE", "number", (call) => call.mue],
];
const TIME = 5;
const CALLS_SHOWN = 100;

/** Sorted by the column whose head is pressed, at first by time. */
function callsTable(page) {
  const place = h("div", { class: "wide" });
  const fill = (column, all) => {
    const key = COLUMNS[column][2];
    const down = COLUMNS[column][1] === "number" ? -1 : 1;
    const calls = [...page.index.graph.calls].sort(
      (x, y) => down * (key(x) < key(y) ? -1 : key(x) > key(y) ? 1 : 0),
    );
    const rows = (all ? calls : calls.slice(0, CALLS_SHOWN)).map((call) => ({
      cells: [
        [
          dot(call.class),
          link(call.name, () => page.go.op(call.name)),
          h("br"),
          h("span", { class: "in" }, call.target),
        ],
        significant(call.gflop),
        [`${significant(call.input_mwords)} in`, h("br"), `${significant(call.output_mwords)} out`],
        showBytes(call.bytes),
        significant(call.intensity),
        showUs(call.us),
        showPercent(call.share),
        wholePercent(call.mue),
      ],
    }));
    const head = COLUMNS.map(([name, kind], i) => [
      link(name, () => fill(i, all), { "aria-pressed": String(i === column) }),
      kind,
    ]);
    const rest = calls.length - rows.length;
    place.replaceChildren(
      table(head, rows, { class: "calls" }),
      ...(rest > 0 ? [button(`Show ${rest} more`, () => fill(column, true))] : []),
    );
  };
  fill(TIME, false);
  return place;
}
