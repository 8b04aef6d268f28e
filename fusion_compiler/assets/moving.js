// Moves about in the drawing: clicks, keys, what is opened and looked at.

const FRAME_MARGIN = 28;

function clicked(view, on, event) {
  const line = event.target.closest?.(".line");
  if (line) return on.edges(line.report);
  const box = event.target.closest?.(".box");
  if (!box) return undefined;
  focusBox(view, view.nodes.get(box.dataset.id), false);
  const op = event.target.closest?.(".chip")?.dataset.op;
  return act(view, on, view.nodes.get(box.dataset.id), op);
}

function act(view, on, node, op) {
  if (node.unit) return on.unit(node.unit, op);
  toggle(view, node);
  return on.module(node);
}

/** Opens or closes a module; its corner stays where it is on the screen. */
function toggle(view, node) {
  const before = view.places.get(node);
  if (view.open.has(node)) view.open.delete(node);
  else view.open.add(node);
  for (let at = node; at; at = at.parent) view.cache.delete(at);
  draw(view);
  const after = view.places.get(node);
  if (before && after) view.zoom.translateBy(view.svg, before.x - after.x, before.y - after.y);
}

/** Opens all closed modules that show, or closes the innermost open ones. */
function changeLevel(view, step) {
  const showing = [...view.places.keys()].filter((node) => !node.unit && node.parent);
  if (step > 0) for (const node of showing) view.open.add(node);
  else {
    const deepest = Math.max(0, ...showing.filter((n) => view.open.has(n)).map((n) => n.depth));
    for (const node of showing) if (node.depth === deepest) view.open.delete(node);
  }
  view.cache.clear();
  draw(view);
  home(view);
}

function extentOf(places) {
  const left = Math.min(...places.map((p) => p.x));
  const top = Math.min(...places.map((p) => p.y));
  const right = Math.max(...places.map((p) => p.x + p.w));
  const bottom = Math.max(...places.map((p) => p.y + p.h));
  return { x: left, y: top, w: right - left, h: bottom - top };
}

/** Shows an extent, scaled between `least` and `most`; what does not fit from its top, around `anchor`. */
function lookAt(view, extent, least, most, slowly, anchor = 0) {
  const { width, height } = view.element.getBoundingClientRect();
  const room = { w: width - 2 * FRAME_MARGIN, h: height - 2 * FRAME_MARGIN };
  const k = Math.min(Math.max(Math.min(room.w / extent.w, room.h / extent.h), least), most);
  const [w, h] = [extent.w * k, extent.h * k];
  const y = h <= height ? (height - h) / 2 : FRAME_MARGIN;
  const leftmost = width - FRAME_MARGIN - w;
  const around = Math.min(Math.max(width / 2 - (anchor - extent.x) * k, leftmost), FRAME_MARGIN);
  const x = w <= width ? (width - w) / 2 : around;
  const transform = libraries.zoomIdentity.translate(x - extent.x * k, y - extent.y * k).scale(k);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  view.zoom.transform(slowly && !still ? view.svg.transition().duration(250) : view.svg, transform);
}

/** All that shows, but not so small that names cannot be read: then from the topmost box. */
function home(view) {
  const boxes = [...view.places].filter(([node]) => node.parent && !(view.open.has(node) && node.children));
  if (boxes.length === 0) return;
  const extent = extentOf([...view.places.values()]);
  const wide = (view.element.getBoundingClientRect().width - 2 * FRAME_MARGIN) / extent.w;
  const [, first] = boxes.reduce((one, other) => (other[1].y < one[1].y ? other : one));
  lookAt(view, extent, Math.min(Math.max(wide, 0.6), 0.8), 1, false, first.x + first.w / 2);
}

function fit(view, places) {
  if (places.length > 0) lookAt(view, extentOf(places), 0.02, 1.2, true);
}

/** Opens what hides the nodes and looks at them. */
function bringTo(view, nodes) {
  const hidden = nodes.flatMap((node) => pathTo(node).slice(0, -1)).filter((node) => !view.open.has(node));
  if (hidden.length > 0) {
    for (const node of hidden) view.open.add(node);
    view.cache.clear();
    draw(view);
  }
  const extent = extentOf(nodes.map((node) => view.places.get(node)));
  lookAt(view, extent, nodes.length > 1 ? 0.2 : 0.75, 1, true);
}

function focusBox(view, node, intoView) {
  const element = node && boxElement(view, node);
  if (!element) return;
  for (const other of view.scene.querySelectorAll('.box[tabindex="0"]')) other.setAttribute("tabindex", "-1");
  element.setAttribute("tabindex", "0");
  element.focus({ preventScroll: true });
  const place = view.places.get(node);
  const { k, x, y } = libraries.zoomTransform(view.element);
  const { width, height } = view.element.getBoundingClientRect();
  const [left, top] = [place.x * k + x, place.y * k + y];
  const outside = left < 0 || top < 0 || left + place.w * k > width || top + 30 > height;
  if (intoView && outside) view.zoom.translateTo(view.svg, place.x + place.w / 2, place.y + place.h / 2);
}

const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

function keyPressed(view, on, event) {
  const node = view.nodes?.get(event.target.closest?.(".box")?.dataset.id);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in ARROWS && node) focusBox(view, nearest(view, node, ARROWS[event.key]), true);
  else if ((event.key === "Enter" || event.key === " ") && node) act(view, on, node);
  else if (event.key === "+" || event.key === "=") view.zoom.scaleBy(view.svg, 1.25);
  else if (event.key === "-") view.zoom.scaleBy(view.svg, 0.8);
  else if (event.key === "0") fit(view, [...view.places.values()]);
  else return;
  event.preventDefault();
}

/** The next box in a direction; what lies aside counts as further away. */
function nearest(view, node, [dx, dy]) {
  const middle = ({ x, y, w, h }, other) => ({ x: x + w / 2, y: y + (other.children ? 0 : h / 2) });
  const from = middle(view.places.get(node), node);
  let best = null;
  let least = Infinity;
  for (const [other, place] of view.places) {
    if (other === node || !other.parent) continue;
    const to = middle(place, other);
    const along = (to.x - from.x) * dx + (to.y - from.y) * dy;
    const aside = Math.abs((to.x - from.x) * dy) + Math.abs((to.y - from.y) * dx);
    if (along > 1 && along + 2 * aside < least) [best, least] = [other, along + 2 * aside];
  }
  return best ?? node;
}
