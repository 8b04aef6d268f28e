// Puts the page together: the report is read, a graph drawn, and what is clicked shown in the panel.

const BOXES_AT_FIRST = 44;

function start(report) {
  const indexes = report.graphs.map((graph) =>
    indexGraph(
      graph,
      report.missed.filter((edge) => edge.graph === graph.name),
    ),
  );
  const page = {
    report,
    indexes,
    current: 0,
    index: indexes[0],
    opened: indexes.map(() => null),
    tab: "overview",
    selected: null,
  };
  page.svg = document.getElementById("graph");
  page.graph = graphView(page.svg, {
    unit: (unit, op) => select(page, unitSelection(page, unit, op)),
    module: (node) => select(page, moduleSelection(page, node)),
    edges: (edges) => select(page, edgeSelection(page, edges)),
  });
  page.go = ways(page);
  header(page);
  tabs(page);
  legend(page);
  controls(page);
  resizable(document.getElementById("divider"), document.body);
  showGraph(page, 0);
  showTab(page, "overview");
}

function header(page) {
  const { report } = page;
  document.getElementById("model").textContent = report.model;
  document.getElementById("about").textContent = `planned for ${report.device}`;
  const choice = document.getElementById("graphs");
  choice.append(...page.indexes.map((index, i) => h("option", { value: i }, index.graph.name)));
  choice.addEventListener("change", () => {
    showGraph(page, Number(choice.value));
    select(page, null);
  });
  const search = document.getElementById("search");
  searchBox(
    search,
    document.getElementById("results"),
    page.indexes,
    () => page.current,
    (entry) => {
      if (entry.kind === "module") page.go.module(entry.target, entry.graph);
      else if (entry.kind === "op" || entry.kind === "line") page.go.op(entry.target, entry.graph);
      else page.go.unit(entry.target, undefined, entry.graph);
      page.graph.focusMarked();
    },
  );
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing) search.focus();
    else if (event.key === "Escape" && page.selected) select(page, null);
    else return;
    event.preventDefault();
  });
}

function showGraph(page, number) {
  const index = page.indexes[number];
  document.querySelector(".tools").hidden = !index;
  if (!index) return; // a report of no graph: there is nothing to draw
  page.opened[number] ??= openingLevels(index.root, BOXES_AT_FIRST);
  page.current = number;
  page.index = index;
  document.getElementById("graphs").value = String(number);
  page.graph.show(index, page.opened[number]);
  if (page.tab === "movement") showTab(page, "movement");
}

// -- selection ----------------------------------------------------------------------------------------

/** A selection is {mark: what the drawing shows, panel: () => elements}. */
function unitSelection(page, unit, op) {
  const edges = page.index.edgesOf.get(unit.name).filter((edge) => edge.flow);
  return { mark: { units: [unit.name], edges, op }, panel: () => unitPanel(page, unit, op) };
}

function moduleSelection(page, node) {
  return { mark: { units: [], edges: [], node }, panel: () => modulePanel(page, node) };
}

function edgeSelection(page, edges) {
  const units = [...new Set(edges.flatMap((edge) => [edge.a, edge.b]))];
  return { mark: { units, edges }, panel: () => edgePanel(page, edges) };
}

function select(page, selection, stay = false) {
  page.selected = selection;
  page.graph.mark(selection?.mark ?? null);
  if (!stay) showTab(page, selection ? "selection" : page.tab);
}

/** Selects something, by name, in any graph, and brings it into view. */
function ways(page) {
  const inGraph = (number) => {
    if (number !== undefined && number !== page.current) showGraph(page, number);
  };
  const to = (selection, nodes, stay) => {
    page.graph.bringTo(nodes);
    select(page, selection, stay);
  };
  const leaves = (names) => names.map((name) => page.index.leaves.get(name));
  const edge = (found, stay) => to(edgeSelection(page, [found]), leaves([found.a, found.b]), stay);
  return {
    edge,
    unit: (name, op, number) => {
      inGraph(number);
      to(unitSelection(page, page.index.units.get(name), op), leaves([name]));
    },
    module: (node, number) => {
      inGraph(number);
      to(moduleSelection(page, node), [node]);
    },
    op: (name, number) => {
      inGraph(number);
      const [unit] = page.index.unitsOfOp.get(name) ?? [];
      if (unit) page.go.unit(unit.name, name);
      else looseOp(page, name, to);
    },
    pair: (record) => {
      inGraph(page.indexes.findIndex((index) => index.graph.name === record.graph));
      const found = edgeOf(page.index, record);
      if (found) edge(found, true);
    },
  };
}

function looseOp(page, name, to) {
  const readers = readersOf(page.index, name);
  const names = readers.map((unit) => unit.name);
  const selection = {
    mark: { units: names, edges: [] },
    panel: () => looseOpPanel(page, page.index.ops.get(name), readers),
  };
  if (names.length > 0) to(selection, [page.index.leaves.get(names[0])]);
  else select(page, selection);
}

/** Units that read an op, through the views between. */
function readersOf(index, name) {
  const behind = new Set([name]);
  for (const op of index.ops.values())
    if (!index.unitsOfOp.has(op.name) && op.inputs.some((input) => behind.has(input))) behind.add(op.name);
  return [...index.units.values()].filter((unit) => unit.inputs.some((input) => behind.has(input)));
}

// -- tabs, legend, controls -----------------------------------------------------------------------------

const TABS = {
  overview: (page) => overview(page),
  selection: (page) =>
    page.selected?.panel() ?? [h("p", { class: "note" }, "Click a box or a line of the drawing, or search.")],
  missed: (page) => missedTable(page),
  movement: (page) => movementTables(page),
};

function tabs(page) {
  const buttons = [...document.querySelectorAll("[role=tab]")];
  buttons.forEach((tab, i) => {
    tab.addEventListener("click", () => showTab(page, tab.dataset.tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = buttons[(i + step + buttons.length) % buttons.length];
      showTab(page, next.dataset.tab);
      next.focus();
      event.preventDefault();
    });
  });
}

function showTab(page, name) {
  page.tab = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
  }
  const panel = document.getElementById("panel");
  panel.setAttribute("aria-labelledby", `tab-${name}`);
  panel.replaceChildren(...TABS[name](page).flat(Infinity).filter(Boolean));
  panel.scrollTop = 0;
  panel.querySelector("tr.found")?.scrollIntoView({ block: "center" });
}

/** Pressing a class shows it alone. */
function legend(page) {
  const present = new Set(
    page.indexes.flatMap((index) => index.graph.units.map((unit) => colour(unit.class))),
  );
  for (const index of page.indexes)
    for (const op of index.graph.ops) if (op.unit !== null) present.add(colour(op.class));
  const buttons = CLASSES.filter((name) => present.has(name)).map((name) => {
    const one = button(
      [dot(name), name],
      () => {
        const only = page.svg.dataset.only === name ? "" : name;
        page.svg.dataset.only = only;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === one && only !== ""));
      },
      { "aria-pressed": "false", title: `show ${name} alone` },
    );
    return one;
  });
  const sorts = [
    ["cluster", "one kernel"],
    ["library", "library call"],
    ["eager", "eager call"],
  ].map(([kind, text]) => h("span", { class: "sort" }, h("i", { class: kind }), text));
  document
    .getElementById("legend")
    .append(
      ...buttons,
      ...sorts,
      h("span", { class: "sort" }, h("i", { class: "missed" }), "one kernel would save time"),
      h("span", { class: "sort" }, h("i", { class: "missed bound" }), "may: one of the ten missed"),
    );
}

function controls(page) {
  const actions = {
    in: () => page.graph.by(1.3),
    out: () => page.graph.by(1 / 1.3),
    fit: () => page.graph.fit(),
    open: () => page.graph.level(1),
    close: () => page.graph.level(-1),
  };
  for (const control of document.querySelectorAll("[data-do]"))
    control.addEventListener("click", actions[control.dataset.do]);
}

/** The bar between drawing and panel: dragged, or moved by arrow keys. */
function resizable(bar, body) {
  const set = (width) =>
    body.style.setProperty("--panel", `${Math.min(Math.max(width, 280), innerWidth - 300)}px`);
  const width = () => document.getElementById("side").getBoundingClientRect().width;
  bar.addEventListener("pointerdown", (event) => {
    bar.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  bar.addEventListener(
    "pointermove",
    (event) => bar.hasPointerCapture(event.pointerId) && set(innerWidth - event.clientX),
  );
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 40, ArrowRight: -40 }[event.key];
    if (step) set(width() + step);
  });
}

start(JSON.parse(document.getElementById("report").textContent));
document.documentElement.dataset.ready = String(performance.now()); // milliseconds since navigation began
