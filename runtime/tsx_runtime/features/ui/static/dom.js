// DOM elements without a framework: created once, then changed only where they differ, so that focus and selection stay.

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "textContent", "htmlFor", "open", "selected", "srcObject"]);

/** An element; `on...` attributes are listeners, children may be text, nodes, lists of them, or nothing. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

export function show(node, shown) {
  if (node.hidden === Boolean(shown)) node.hidden = !shown;
}

/** Replace the content of a node if the data differs from that of the last call. */
export function refill(node, data, content) {
  const text = JSON.stringify(data);
  if (node.dataOfContent === text) return;
  node.dataOfContent = text;
  node.replaceChildren(...[content()].flat().filter(Boolean));
}

/** One child for each item, kept for as long as its key is there. `make(item)` gives an object with `node` and, if need be, `update(item)`. */
export function keyed(parent, items, key, make) {
  const rows = (parent.kept ??= new Map());
  const wanted = new Set(items.map(key));
  for (const [name, row] of rows) {
    if (!wanted.has(name)) {
      row.node.remove();
      rows.delete(name);
    }
  }
  items.forEach((item, place) => {
    const name = key(item);
    let row = rows.get(name);
    if (!row) rows.set(name, (row = make(item)));
    if (parent.children[place] !== row.node) parent.insertBefore(row.node, parent.children[place] ?? null);
    row.update?.(item);
  });
}

/** A table whose cells are texts or nodes. `columns`: its headings; `numbers`: which of them hold numbers. `folds`: see `liveTable`. */
export function table(caption, columns, rows, numbers = [], folds = true) {
  const made = liveTable(caption, columns, numbers, folds);
  made.body.append(...rows.map((row) => h("tr", {}, cells(columns, row.map((cell, column) => h("td", numbers.includes(column) ? { class: "number" } : {}, cell))))));
  return made.node;
}

/** A table whose rows are put into `body`. On a narrow screen each row that `folds` becomes a list of its headings and cells. */
export function liveTable(caption, columns, numbers = [], folds = true) {
  const body = h("tbody");
  const node = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: folds ? "folds" : null },
      h("thead", {}, h("tr", {}, columns.map((text, column) => h("th", { scope: "col", class: numbers.includes(column) && "number" }, text)))), body));
  return { node, body };
}

/** The cells of a row, each with the heading that it has on a narrow screen. */
export function cells(columns, nodes) {
  nodes.forEach((node, column) => (node.dataset.label = columns[column]));
  return nodes;
}

/** Calls `take(file)` with a file that is dropped on the node. */
export function takesFiles(node, take) {
  node.addEventListener("dragover", (event) => { event.preventDefault(); node.classList.add("over"); });
  node.addEventListener("dragleave", () => node.classList.remove("over"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    node.classList.remove("over");
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
  return node;
}

let drawn = 0;

/** An id for `for` and `aria-...`. */
export function newId() {
  drawn += 1;
  return `i${drawn}`;
}

/** A field of a form under its label. */
export function field(label, input, hint) {
  input.id ||= newId();
  const note = hint && h("small", { id: newId(), class: "quiet" }, hint);
  if (note) input.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, note);
}
