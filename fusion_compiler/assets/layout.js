// Where the boxes lie. Every open module is laid out by itself (dagre, top to bottom) and is one box to
// the frame around it, so that opening one moves nothing inside the others and only what shows is laid out.
// Edges that cross a frame enter at the middle of its top and leave at the middle of its bottom.

const SIZE = { title: 26, pad: 14, callWidth: 176, unitWidth: 246, moduleWidth: 206, moduleHeight: 58 };
const CHIP = { height: 17, gap: 4, rows: 5, inset: 12, top: 46 };
const FONTS = {
  title: "600 12.5px system-ui, sans-serif",
  small: "11px system-ui, sans-serif",
  chip: "10.5px ui-monospace, monospace",
};

const pencil = document.createElement("canvas").getContext("2d");
const widths = new Map();

function textWidth(text, font) {
  const key = `${font}|${text}`;
  if (!widths.has(key)) {
    pencil.font = FONTS[font];
    widths.set(key, pencil.measureText(text).width);
  }
  return widths.get(key);
}

/** As much of the text as fits, an ellipsis after it. */
function fitText(text, font, width) {
  if (textWidth(text, font) <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(`${text.slice(0, middle)}…`, font) <= width) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}

/** {w, h, chips, more} of a unit's box: a chip for each op, in rows; `more` counts those left out. */
function unitBox(unit) {
  if (unit.ops.length <= 1) return { w: SIZE.callWidth, h: 46, chips: [], more: 0 };
  const inner = SIZE.unitWidth - 2 * CHIP.inset;
  const chips = [];
  let [x, row] = [0, 0];
  for (const name of unit.ops) {
    const label = fitText(name, "chip", 150);
    const w = textWidth(label, "chip") + 10;
    const room = row === CHIP.rows - 1 ? inner - 56 : inner; // the last row may end in "+12 more"
    if (x > 0 && x + w > room) {
      row += 1;
      x = 0;
    }
    if (row === CHIP.rows) break;
    chips.push({ name, label, x: CHIP.inset + x, y: CHIP.top + row * (CHIP.height + CHIP.gap), w });
    x += w + CHIP.gap;
  }
  const rows = Math.min(row + 1, CHIP.rows);
  const h = CHIP.top + rows * (CHIP.height + CHIP.gap) + 6;
  return { w: SIZE.unitWidth, h, chips, more: unit.ops.length - chips.length };
}

/** Boxes and lines of a node at (0, 0); `cache` keeps the frames that have not changed. */
function layOut(node, open, cache) {
  if (node.unit) return { node, ...unitBox(node.unit) };
  if (!open.has(node)) return { node, w: SIZE.moduleWidth, h: SIZE.moduleHeight };
  if (!cache.has(node)) cache.set(node, layOutFrame(node, open, cache));
  return cache.get(node);
}

function layOutFrame(frame, open, cache) {
  const boxes = frame.children.map((child) => layOut(child, open, cache));
  const graph = new libraries.dagre.graphlib.Graph();
  graph.setGraph({ nodesep: 22, ranksep: 34, edgesep: 10, marginx: 0, marginy: 0 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const box of boxes) graph.setNode(String(box.node.id), { width: box.w, height: box.h });
  const links = [...frame.links.values()].filter((link) => link.from !== link.to);
  for (const link of links) {
    for (const end of [link.from, link.to])
      if (end === IN || end === OUT) graph.setNode(end, { width: 1, height: 1 });
    graph.setEdge(keyOf(link.from), keyOf(link.to), { weight: Math.min(link.edges.length, 4) });
  }
  holdLoose(frame, graph);
  holdPorts(graph);
  libraries.dagre.layout(graph);
  return placed(frame, boxes, links, graph);
}

function keyOf(end) {
  return end === IN || end === OUT ? end : String(end.id);
}

/** A box that no line touches stands above the one that comes after it in execution order. */
function holdLoose(frame, graph) {
  const names = frame.children.map((child) => String(child.id));
  const loose = new Set(names.filter((name) => graph.nodeEdges(name).length === 0));
  names.forEach((name, i) => {
    const next = names.slice(i + 1).find((other) => !loose.has(other));
    if (loose.has(name) && next !== undefined) graph.setEdge(name, next, { weight: 1 });
  });
}

/** The points where edges come in stay above all boxes, those where they leave below all. */
function holdPorts(graph) {
  const others = graph.nodes().filter((name) => name !== IN && name !== OUT);
  const [hasIn, hasOut] = [graph.hasNode(IN), graph.hasNode(OUT)];
  for (const name of others) {
    const sources = graph.predecessors(name).length === 0;
    const sinks = graph.successors(name).length === 0;
    if (hasIn && sources) graph.setEdge(IN, name, { weight: 0 });
    if (hasOut && sinks) graph.setEdge(name, OUT, { weight: 0 });
  }
}

function placed(frame, boxes, links, graph) {
  const root = frame.parent === null;
  const left = root ? 0 : SIZE.pad;
  const top = root ? 0 : SIZE.title + (graph.hasNode(IN) ? 0 : SIZE.pad);
  const extent = graph.graph();
  const titleWidth = root ? 0 : textWidth(frame.label, "title") + 150;
  const w = Math.max(finite(extent.width) + 2 * left, titleWidth);
  const shift = left + (w - 2 * left - finite(extent.width)) / 2;
  const bottom = top + finite(extent.height);
  const ranks = rankHeights(boxes, graph);
  const children = boxes.map((box) => {
    const at = graph.node(String(box.node.id));
    const spare = ranks.get(Math.round(at.y)) - box.h / 2; // to the highest box of the rank
    return { box, x: at.x - box.w / 2 + shift, y: at.y - box.h / 2 + top, spare };
  });
  const result = {
    node: frame,
    w,
    h: bottom + (root || graph.hasNode(OUT) ? 0 : SIZE.pad),
    children,
    lines: [],
  };
  const byNode = new Map(children.map((child) => [child.box.node, child]));
  for (const link of links) {
    const bends = graph.edge(keyOf(link.from), keyOf(link.to)).points.slice(1, -1);
    const inner = bends
      .flatMap((p) => straightThrough(p, ranks))
      .map((p) => ({ x: p.x + shift, y: p.y + top }));
    result.lines.push({ link, points: ended(link, inner, byNode, result), into: link.to });
  }
  return result;
}

function finite(value) {
  return Number.isFinite(value) ? value : 0; // dagre's extent of nothing
}

/** Half the height of each rank of boxes, by the y of its middle. */
function rankHeights(boxes, graph) {
  const half = new Map();
  for (const box of boxes) {
    const y = Math.round(graph.node(String(box.node.id)).y);
    half.set(y, Math.max(half.get(y) ?? 0, box.h / 2));
  }
  return half;
}

/** A bend beside boxes is drawn as a vertical as long as they are high, so that curves keep clear of them. */
function straightThrough(point, ranks) {
  const half = ranks.get(Math.round(point.y)) ?? 0;
  if (half === 0) return [point];
  return [
    { x: point.x, y: point.y - half },
    { x: point.x, y: point.y + half },
  ];
}

/** The line's points with both ends: borders of boxes, or the frame's own points of entry. */
function ended(link, bends, byNode, frame) {
  const from = byNode.get(link.from);
  const to = byNode.get(link.to);
  if (from && to && from.y >= to.y) return upwards(from, to, bends);
  const start = from ? { x: towards(bends[0], from), y: from.y + from.box.h } : { x: frame.w / 2, y: 0 };
  const end = to ? { x: towards(bends[bends.length - 1], to), y: to.y } : { x: frame.w / 2, y: frame.h };
  const straight = [from && { x: start.x, y: start.y + from.spare }, to && { x: end.x, y: end.y - to.spare }];
  return [start, straight[0], ...bends, straight[1], end].filter(Boolean);
}

/** Where a line meets a box: below or above its next bend; of a frame, the middle. */
function towards(bend, { x, box }) {
  if (!bend || box.children) return x + box.w / 2;
  return Math.min(Math.max(bend.x, x + 16), x + box.w - 16);
}

/** From the lower box's bottom round it and up to the higher one's top: modules that wait for each other. */
function upwards(from, to, bends) {
  const middle = ({ x, box }) => x + box.w / 2;
  const beside = (bend, { x, box }) => (bend && bend.x < x + box.w / 2 ? x - 11 : x + box.w + 11);
  const [first, last] = [beside(bends[0], from), beside(bends[bends.length - 1], to)];
  return [
    { x: middle(from), y: from.y + from.box.h },
    { x: first, y: from.y + from.box.h },
    { x: first, y: from.y },
    ...bends.sort((p, q) => q.y - p.y),
    { x: last, y: to.y + to.box.h },
    { x: last, y: to.y },
    { x: middle(to), y: to.y },
  ];
}

const TURN = 24; // how far a line swings out that turns round: three quarters of it

/** An SVG path through the points; every bend is entered and left vertically. */
function pathOf(points) {
  const n = (value) => value.toFixed(1);
  let text = `M${n(points[0].x)},${n(points[0].y)}`;
  for (let i = 1; i < points.length; i += 1) {
    const [p, q] = [points[i - 1], points[i]];
    if (p.x === q.x && p.y === q.y) continue;
    const turn = i === 1 ? TURN : -TURN;
    const middle = p.y === q.y ? p.y + turn : (p.y + q.y) / 2;
    text += ` C${n(p.x)},${n(middle)} ${n(q.x)},${n(middle)} ${n(q.x)},${n(q.y)}`;
  }
  return text;
}

/** node -> {x, y, w, h} in the drawing for every box that shows, and frames. */
function positions(layout) {
  const found = new Map();
  const walk = (box, x, y) => {
    found.set(box.node, { x, y, w: box.w, h: box.h });
    for (const child of box.children ?? []) walk(child.box, x + child.x, y + child.y);
  };
  walk(layout, 0, 0);
  return found;
}
