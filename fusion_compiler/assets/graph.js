// Draws the layout as SVG: boxes, lines, and what is selected.

/**
 * on: {unit(unit), module(node), edges(edges)}, called when something is clicked.
 * Returns {show, level, fit, by, mark, bringTo, focusMarked}.
 */
function graphView(element, on) {
  const scene = s("g", { class: "scene" });
  element.append(arrowHead(), scene);
  const svg = libraries.select(element);
  const view = {
    element,
    scene,
    svg,
    index: null,
    open: new Set(),
    cache: new Map(),
    places: new Map(),
    lines: [],
    overlay: s("g"),
  };
  view.zoom = libraries
    .zoom()
    .scaleExtent([0.02, 3])
    .on("zoom", ({ transform }) => {
      scene.setAttribute("transform", transform.toString());
      element.classList.toggle("far", transform.k < 0.42);
    });
  svg.call(view.zoom).on("dblclick.zoom", null);
  element.addEventListener("click", (event) => clicked(view, on, event));
  element.addEventListener("keydown", (event) => keyPressed(view, on, event));
  return {
    show: (index, open) => {
      Object.assign(view, { index, open, cache: new Map(), marked: null });
      draw(view);
      home(view);
    },
    level: (step) => changeLevel(view, step),
    fit: () => fit(view, [...view.places.values()]),
    by: (factor) => view.zoom.scaleBy(view.svg, factor),
    mark: (marked) => mark(view, marked),
    bringTo: (nodes) => bringTo(view, nodes),
    focusMarked: () => focusBox(view, markedNode(view), false),
  };
}

function arrowHead() {
  const marker = (id) =>
    s(
      "marker",
      {
        id,
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerUnits: "userSpaceOnUse",
        markerWidth: 9,
        markerHeight: 9,
        orient: "auto",
      },
      s("path", { d: "M0,0.8L8,4L0,7.2z" }),
    );
  return s("defs", {}, ["arrow", "arrow-missed", "arrow-lit"].map(marker));
}

function draw(view) {
  const layout = layOut(view.index.root, view.open, view.cache);
  view.places = positions(layout);
  view.lines = [];
  const focused = document.activeElement?.closest?.(".box")?.dataset.id;
  const layers = [s("g", {}), s("g", {}), s("g", {}), s("g", { class: "overlay" })];
  [view.frames, view.edges, view.boxes, view.overlay] = layers;
  drawInside(view, layout, 0, 0);
  view.scene.replaceChildren(...layers);
  view.nodes = new Map([...view.places.keys()].map((node) => [String(node.id), node]));
  const stop = view.scene.querySelector(".box");
  if (stop) stop.setAttribute("tabindex", "0"); // one stop for Tab; arrows move from there
  if (focused !== undefined) focusBox(view, view.nodes.get(focused), false);
  mark(view, view.marked);
}

function drawInside(view, frame, x, y) {
  for (const child of frame.children) {
    const [cx, cy] = [x + child.x, y + child.y];
    if (child.box.children) {
      view.frames.append(drawFrame(child.box, cx, cy));
      view.frames.append(drawTitle(child.box, cx, cy));
      drawInside(view, child.box, cx, cy);
    } else
      view.boxes.append(
        child.box.node.unit ? drawUnit(view, child.box, cx, cy) : drawModule(child.box, cx, cy),
      );
  }
  for (const line of frame.lines) {
    const d = pathOf(line.points.map((p) => ({ x: p.x + x, y: p.y + y })));
    view.edges.append(drawLine(view, line, d));
  }
}

function drawLine(view, { link, into }, d) {
  const found = link.edges.map(missedBy);
  const missed = found.includes("missed") ? "missed" : found.includes("bound") ? "missed bound" : "";
  const arrow = missed ? "url(#arrow-missed)" : "url(#arrow)";
  const lands = into !== OUT && !(into.children && view.open.has(into));
  const title = link.edges
    .slice(0, 4)
    .map((e) => `${e.a} → ${e.b}${e.records[0] ? `: ${e.records[0].rule}` : ""}`);
  if (link.edges.length > 4) title.push(`and ${link.edges.length - 4} more`);
  const element = s(
    "g",
    { class: `line ${missed}` },
    s("title", {}, title.join("\n")),
    s("path", { class: "hit", d }),
    s("path", { class: "ink", d, "marker-end": lands ? arrow : null }),
  );
  element.report = link.edges;
  view.lines.push({ element, arrow, edges: new Set(link.edges) });
  return element;
}

function boxGroup(node, x, y, attributes, ...children) {
  return s(
    "g",
    { "data-id": node.id, tabindex: -1, role: "button", transform: `translate(${x},${y})`, ...attributes },
    ...children,
  );
}

function drawFrame(box, x, y) {
  return s("rect", { class: "frame", x, y, width: box.w, height: box.h, rx: 8 });
}

function drawTitle(box, x, y) {
  const node = box.node;
  const label = `${node.label}, open, ${showUs(node.us)}`;
  return boxGroup(
    node,
    x,
    y,
    { class: "box title", "aria-label": label, "aria-expanded": "true" },
    s("title", {}, `${node.path || node.label}: click to close`),
    s("rect", { class: "back", width: box.w, height: SIZE.title, rx: 8 }),
    s("text", { class: "name", x: 10, y: 17 }, `▾ ${node.label}`),
    s("text", { class: "time", x: box.w - 10, y: 17 }, showUs(node.us)),
  );
}

function drawModule(box, x, y) {
  const node = box.node;
  const kernels = node.units.filter((u) => u.sort === "cluster").length;
  const calls = node.units.length - kernels;
  const counts = [kernels ? showCount(kernels, "kernel") : "", calls ? showCount(calls, "call") : ""];
  const about = counts.filter(Boolean).join(", ");
  const time = showUs(node.us);
  const label = `module ${node.path || node.label}, closed, ${about}, ${time}`;
  return boxGroup(
    node,
    x,
    y,
    { class: "box module", "aria-label": label, "aria-expanded": "false" },
    s("title", {}, `${node.run ? node.label : node.path || node.label}: click to open`),
    s("rect", { class: "back", width: box.w, height: box.h, rx: 8 }),
    s(
      "text",
      { class: "name", x: 10, y: 19 },
      `▸ ${fitText(node.label, "title", box.w - 46 - textWidth(time, "small"))}`,
    ),
    s("text", { class: "time", x: box.w - 10, y: 19 }, time),
    s("text", { class: "about", x: 12, y: 36 }, about),
    shareBar(node, 12, 44, box.w - 24),
  );
}

function shareBar(node, x, y, width) {
  let at = x;
  const total = node.us || 1;
  const parts = CLASSES.map((name) => {
    const us = sum([...node.usByClass], ([key, value]) => (colour(key) === name ? value : 0));
    const w = (width * us) / total;
    at += w;
    return w > 0
      ? s("rect", { class: "share", "data-class": name, x: at - w, y, width: w, height: 5 })
      : null;
  });
  return s("g", {}, parts);
}

function drawUnit(view, box, x, y) {
  const unit = box.node.unit;
  const time = showUs(unit.us);
  const sort = unit.sort === "cluster" ? showCount(unit.ops.length, "op") : `${unit.sort} call`;
  const where = [sort, unit.readers > MANY_READERS ? `read by ${unit.readers}` : "", insideOf(box.node)];
  const about = where.filter(Boolean).join(" · ");
  const label = `${unit.sort} ${unit.name}, ${unit.class}, ${time}`;
  const attributes = {
    class: `box unit ${unit.sort}`,
    "data-unit": unit.name,
    "data-class": colour(unit.class),
    "aria-label": label,
  };
  return boxGroup(
    box.node,
    x,
    y,
    attributes,
    s("title", {}, `${unit.name}: ${[sort, unit.module].filter(Boolean).join(" · ")}`),
    s("rect", { class: "back", width: box.w, height: box.h, rx: unit.sort === "cluster" ? 6 : 0 }),
    s("rect", { class: "strip", width: 5, height: box.h, rx: unit.sort === "cluster" ? 2 : 0 }),
    s(
      "text",
      { class: "name", x: 12, y: 18 },
      fitText(unit.name, "title", box.w - 30 - textWidth(time, "small")),
    ),
    s("text", { class: "time", x: box.w - 9, y: 18 }, time),
    s("text", { class: "about", x: 12, y: 35 }, fitText(about, "small", box.w - 20)),
    drawChips(view, box),
  );
}

/** A unit's module as seen from the frame around it: "query" in model.layers.0.attention. */
function insideOf(node) {
  const around = node.parent.path;
  if (around === "") return node.path;
  return node.path === around ? "" : node.path.slice(around.length + 1);
}

function drawChips(view, box) {
  if (box.chips.length === 0) return null;
  const last = box.chips[box.chips.length - 1];
  const ops = box.chips.map((chip) =>
    s(
      "g",
      { class: "chip", "data-op": chip.name, "data-class": colour(view.index.ops.get(chip.name)?.class) },
      s("rect", { x: chip.x, y: chip.y, width: chip.w, height: CHIP.height, rx: 3 }),
      s("text", { x: chip.x + 5, y: chip.y + 12.5 }, chip.label),
    ),
  );
  if (box.more > 0)
    ops.push(s("text", { class: "about", x: last.x + last.w + 6, y: last.y + 12.5 }, `+${box.more} more`));
  return s("g", { class: "chips" }, ops);
}

// -- what is selected ---------------------------------------------------------------------------------

/** marked: null or {units: [name], edges: [edge], op: name or undefined, node}. */
function mark(view, marked) {
  view.marked = marked;
  for (const element of view.scene.querySelectorAll(".marked, .found"))
    element.classList.remove("marked", "found");
  view.overlay.replaceChildren();
  const edges = new Set(marked?.edges ?? []);
  for (const line of view.lines) {
    const lit = [...edges].some((edge) => line.edges.has(edge));
    line.element.classList.toggle("lit", lit);
    const ink = line.element.querySelector(".ink");
    if (ink.hasAttribute("marker-end")) ink.setAttribute("marker-end", lit ? "url(#arrow-lit)" : line.arrow);
    if (lit) view.edges.append(line.element); // above the others
  }
  if (!marked) return;
  const nodes = marked.units.map((name) => visibleFor(view.index.leaves.get(name), view.open));
  for (const node of marked.node ? [marked.node] : nodes) boxElement(view, node)?.classList.add("marked");
  if (marked.op !== undefined)
    for (const chip of view.scene.querySelectorAll(".marked .chip"))
      chip.classList.toggle("found", chip.dataset.op === marked.op);
  for (const edge of edges) if (!edge.drawn && (edge.flow || edges.size === 1)) drawAcross(view, edge);
}

/** An edge that the layout leaves out: from box to box, over everything. */
function drawAcross(view, edge) {
  const [a, b] = [edge.a, edge.b].map((name) => visibleFor(view.index.leaves.get(name), view.open));
  if (a === b) return;
  const [p, q] = [view.places.get(a), view.places.get(b)];
  const below = q.y > p.y + p.h;
  const d = below
    ? pathOf([
        { x: p.x + p.w / 2, y: p.y + p.h },
        { x: q.x + q.w / 2, y: q.y },
      ])
    : `M${p.x + p.w},${p.y + p.h / 2} C${p.x + p.w + 60},${p.y + p.h / 2} ${q.x + q.w + 60},${q.y + q.h / 2} ${q.x + q.w},${q.y + q.h / 2}`;
  view.overlay.append(
    s("path", {
      class: edge.flow ? "across" : "across apart",
      d,
      "marker-end": edge.flow ? "url(#arrow-lit)" : null,
    }),
  );
}

function markedNode(view) {
  return view.nodes.get(view.scene.querySelector(".box.marked")?.dataset.id);
}

function boxElement(view, node) {
  return view.scene.querySelector(`.box[data-id="${node.id}"]`);
}
