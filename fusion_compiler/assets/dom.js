// Elements and numbers as text. Every text from the report becomes a text node: nothing of it is parsed.

const CLASSES = ["contraction", "normalization", "element-wise", "layout", "random", "opaque"];

/** h("p", {class: "note", onclick: f}, "text", element): null children are left out. */
function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function s(tag, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function button(label, onclick, attributes) {
  return h("button", { type: "button", onclick, ...attributes }, label);
}

/** A button that reads as part of a sentence or table. */
function link(label, onclick, attributes) {
  return button(label, onclick, { class: "link", ...attributes });
}

function table(head, rows, attributes) {
  const cells = head.map(([text, kind]) => h("th", { scope: "col", class: kind }, text));
  const body = rows.map(({ cells: values, ...rest }) =>
    h(
      "tr",
      rest,
      values.map((value, i) => h("td", { class: head[i][1] }, value)),
    ),
  );
  return h("table", attributes, h("thead", {}, h("tr", {}, cells)), h("tbody", {}, body));
}

/** Colours by class are in the style sheet; a class that it does not know is drawn as opaque. */
function colour(name) {
  return CLASSES.includes(name) ? name : "opaque";
}

function dot(name) {
  return h("i", { class: "dot", "data-class": colour(name) });
}

function scaled(value, units) {
  for (const [unit, size] of units)
    if (Math.abs(value) >= size) return `${significant(value / size)} ${unit}`;
  const [unit, size] = units[units.length - 1];
  return `${significant(value / size)} ${unit}`;
}

/** Three digits, and all of those before the point; two below one: 1,234, 12.3, 1.23, 0.12, 0.0041, 3e-9. */
function significant(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4) return value.toExponential(0);
  if (size < 1) return value.toLocaleString("en", { maximumSignificantDigits: 2 });
  const after = Math.max(0, 2 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { minimumFractionDigits: after, maximumFractionDigits: after });
}

const showUs = (us) =>
  scaled(us, [
    ["s", 1e6],
    ["ms", 1e3],
    ["us", 1],
  ]);
const showBytes = (bytes) =>
  scaled(bytes, [
    ["TB", 1e12],
    ["GB", 1e9],
    ["MB", 1e6],
    ["KB", 1e3],
    ["B", 1],
  ]);
const showFlop = (flop) =>
  scaled(flop, [
    ["Tflop", 1e12],
    ["Gflop", 1e9],
    ["Mflop", 1e6],
    ["flop", 1],
  ]);
const showPercent = (share) => `${significant(100 * share)}%`;
const wholePercent = (share) => `${Math.round(100 * share)}%`;
const showCount = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** "would save 1.2 us", "would cost 3 us"; "at most" where no kernel of both exists. */
function showSaving(edge) {
  if (edge.saving_us === 0) return "would save nothing";
  const text = `${edge.saving_us < 0 ? "would cost" : "would save"} ${showUs(Math.abs(edge.saving_us))}`;
  return edge.at_most ? `${text} at most` : text;
}

/** "aten.add.Tensor" -> "add"; "aten._to_copy.default" -> "_to_copy". */
function shortTarget(target) {
  const parts = target.split(".");
  return parts.length > 1 ? parts[1] : target;
}

/** "model.py:12": the file without its folders. */
function showPlace(source) {
  return `${source.file.split(/[\\/]/).pop()}:${source.line}`;
}

/** Python text as an element with its syntax marked; highlight.js escapes what it is given. */
function pythonCode(text, tag = "code") {
  const element = h(tag, { class: "python" });
  element.innerHTML = libraries.hljs.highlight(text, { language: "python", ignoreIllegals: true }).value;
  return element;
}
