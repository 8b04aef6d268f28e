// What the report says, indexed: units and their edges, and the tree of modules that they lie in.
// Maps and Sets throughout: names come from the user's model and may be "constructor" or "__proto__".

const MANY_READERS = 8; // a seed, a mask: its edges would cover the drawing, so they show on selection
const MANY_CHILDREN = 40; // more boxes than this in one frame are put into runs, in execution order
const RUN = 24;

/** One graph of the report: {graph, ops, units, unitsOfOp, callOf, edges, edgesOf, root, leaves}. */
function indexGraph(graph, missed) {
  const ops = new Map(graph.ops.map((op) => [op.name, op]));
  const units = new Map(graph.units.map((unit, position) => [unit.name, { ...unit, position }]));
  const unitsOfOp = new Map();
  for (const unit of units.values()) for (const name of unit.ops) push(unitsOfOp, name, unit);
  for (const op of graph.ops) {
    // The unit that an op itself names comes first: others compute it again.
    const own = op.unit === null ? undefined : units.get(op.unit);
    if (own) unitsOfOp.set(op.name, [own, ...(unitsOfOp.get(op.name) ?? []).filter((u) => u !== own)]);
  }
  const callOf = new Map(graph.calls.flatMap((call) => call.ops.map((name) => [name, call])));
  const index = { graph, ops, units, unitsOfOp, callOf };
  index.edges = edgesOfGraph(index);
  for (const record of missed) {
    const edge = edgeOf(index, record);
    if (edge) edge.ranked = true;
  }
  index.edgesOf = new Map([...units.keys()].map((name) => [name, []]));
  for (const edge of index.edges)
    for (const name of new Set([edge.a, edge.b])) index.edgesOf.get(name).push(edge);
  for (const unit of units.values())
    unit.readers = index.edgesOf.get(unit.name).filter((e) => e.flow && e.a === unit.name).length;
  for (const edge of index.edges) edge.drawn = edge.flow && units.get(edge.a).readers <= MANY_READERS;
  Object.assign(index, moduleTree(units));
  for (const edge of index.edges) if (edge.drawn) spread(index, edge);
  return index;
}

function push(map, key, value) {
  if (!map.has(key)) map.set(key, []);
  map.get(key).push(value);
}

/** Units whose results are behind a tensor: through views, and ops that every reader computes again. */
function makersOf(index) {
  const storedBy = new Map();
  for (const unit of index.units.values()) for (const name of unit.outputs) storedBy.set(name, unit.name);
  const found = new Map();
  const makers = (name) => {
    if (storedBy.has(name)) return [storedBy.get(name)];
    if (found.has(name)) return found.get(name);
    found.set(name, []); // a ring of views cannot be, but must not hang the page
    const op = index.ops.get(name);
    if (!op) return []; // an input of the graph
    if (op.unit !== null && index.units.has(op.unit)) found.set(name, [op.unit]);
    else found.set(name, [...new Set(op.inputs.flatMap(makers))]);
    return found.get(name);
  };
  return makers;
}

/** {a, b, tensors, flow, records}: who reads from whom, joined with what the report says of the pair. */
function edgesOfGraph(index) {
  const pairs = new Map();
  const pair = (a, b) => {
    if (!pairs.has(a)) pairs.set(a, new Map());
    if (!pairs.get(a).has(b)) pairs.get(a).set(b, { a, b, tensors: [], flow: false, records: [] });
    return pairs.get(a).get(b);
  };
  const makers = makersOf(index);
  for (const unit of index.units.values())
    for (const tensor of new Set(unit.inputs))
      for (const maker of makers(tensor)) {
        if (maker === unit.name) continue;
        const edge = pair(maker, unit.name);
        edge.flow = true;
        edge.tensors.push(tensor);
      }
  const unitOf = (name) => (index.units.has(name) ? name : index.unitsOfOp.get(name)?.[0].name);
  for (const record of index.graph.edges) {
    const [a, b] = [unitOf(record.a), unitOf(record.b)];
    if (a === undefined || b === undefined || a === b) continue;
    const turned = !pairs.get(a)?.has(b) && pairs.get(b)?.has(a);
    (turned ? pair(b, a) : pair(a, b)).records.push(record);
  }
  const edges = [...pairs.values()].flatMap((inner) => [...inner.values()]);
  for (const edge of edges)
    edge.saving = Math.max(-Number.MAX_VALUE, ...edge.records.map((r) => r.saving_us));
  return edges;
}

/** "missed" where fusing a pair is predicted to save time, "bound" where one of the ten missed may, else "". */
function missedBy(edge) {
  if (edge.records.some((record) => !record.at_most && record.saving_us > 0)) return "missed";
  return edge.ranked ? "bound" : "";
}

/** The edge that a record of the report speaks of, in either direction; undefined where it is none. */
function edgeOf(index, record) {
  const [a, b] = [record.a, record.b].map((name) =>
    index.units.has(name) ? name : index.unitsOfOp.get(name)?.[0].name,
  );
  return index.edges.find((edge) => (edge.a === a && edge.b === b) || (edge.a === b && edge.b === a));
}

// -- the tree of modules ------------------------------------------------------------------------

/** {root, leaves: unit name -> its node}. A node is a unit's (`unit`) or a module's (`children`). */
function moduleTree(units) {
  const root = { path: "", label: "model", children: [], byName: new Map() };
  const leaves = new Map();
  for (const unit of units.values()) {
    let at = root;
    for (const name of unit.module === "" ? [] : unit.module.split(".")) {
      if (!at.byName.has(name)) {
        const path = at === root ? name : `${at.path}.${name}`;
        const made = { path, label: name, children: [], byName: new Map() };
        at.byName.set(name, made);
        at.children.push(made);
      }
      at = at.byName.get(name);
    }
    const leaf = { unit, path: unit.module, label: unit.name };
    leaves.set(unit.name, leaf);
    at.children.push(leaf);
  }
  simplify(root);
  finish(root, null, 0, { next: 0 });
  return { root, leaves };
}

/** Modules of one module become one node, those of one unit the unit; long rows of boxes get runs. */
function simplify(node) {
  if (node.unit) return node;
  node.children = node.children.map((child) => {
    const simple = simplify(child);
    if (simple.unit || simple.children.length > 1) return simple;
    const [only] = simple.children;
    return only.unit ? only : { ...only, label: `${simple.label}.${only.label}` };
  });
  node.children.sort((a, b) => firstPosition(a) - firstPosition(b));
  while (node.children.length > MANY_CHILDREN) node.children = inRuns(node);
  return node;
}

function inRuns(node) {
  const count = Math.ceil(node.children.length / RUN);
  const size = Math.ceil(node.children.length / count);
  return Array.from({ length: count }, (_, i) => {
    const children = node.children.slice(i * size, (i + 1) * size);
    const ends = [children[0], children[children.length - 1]].map((c) => c.label.split(" … "));
    const label = `${ends[0][0]} … ${ends[1][ends[1].length - 1]}`;
    return { path: node.path, label, run: true, children };
  });
}

function firstPosition(node) {
  return node.unit ? node.unit.position : Math.min(...node.children.map(firstPosition));
}

/** Sets parent, depth, id and, for modules, the units below with their time by class. */
function finish(node, parent, depth, ids) {
  Object.assign(node, { parent, depth, id: ids.next++ });
  if (node.unit) return [node.unit];
  node.byName = undefined;
  node.units = node.children.flatMap((child) => finish(child, node, depth + 1, ids));
  node.us = sum(node.units, (u) => u.us);
  node.usByClass = sumBy(
    node.units,
    (u) => u.class,
    (u) => u.us,
  );
  node.links = new Map(); // "from,to" of children, IN or OUT -> {from, to, edges}
  return node.units;
}

const IN = "in";
const OUT = "out";

/** Puts an edge into every frame that it would cross were all open: out of a's, across, into b's. */
function spread(index, edge) {
  let [a, b] = [index.leaves.get(edge.a), index.leaves.get(edge.b)];
  const link = (frame, from, to) => {
    const key = `${from === IN ? IN : from.id},${to === OUT ? OUT : to.id}`;
    if (!frame.links.has(key)) frame.links.set(key, { from, to, edges: [] });
    frame.links.get(key).edges.push(edge);
  };
  while (a.parent !== b.parent) {
    if (a.depth >= b.depth) {
      link(a.parent, a, OUT);
      a = a.parent;
    } else {
      link(b.parent, IN, b);
      b = b.parent;
    }
  }
  if (a !== b) link(a.parent, a, b);
}

/** Modules to open at first: whole levels, as long as no more than `limit` boxes show. */
function openingLevels(root, limit) {
  const open = new Set([root]);
  let level = root.children;
  for (;;) {
    const next = level.flatMap((node) => (node.unit ? [node] : node.children));
    if (next.length > limit || level.every((node) => node.unit)) return open;
    for (const node of level) if (!node.unit) open.add(node);
    level = next;
  }
}

/** The nodes from the root's child down to `node`. */
function pathTo(node) {
  const path = [];
  for (let at = node; at.parent; at = at.parent) path.unshift(at);
  return path;
}

/** The box that stands for a node: itself, or the outermost closed module around it. */
function visibleFor(node, open) {
  return pathTo(node).find((at) => at.unit || !open.has(at)) ?? node;
}

function sum(values, of) {
  return values.reduce((total, value) => total + of(value), 0);
}

function sumBy(values, key, of) {
  const sums = new Map();
  for (const value of values) sums.set(key(value), (sums.get(key(value)) ?? 0) + of(value));
  return sums;
}
