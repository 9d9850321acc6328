// Line charts of the last minutes, drawn as SVG in the available size.

import { h, s, say } from "./dom.js";

const LEFT = 52, BOTTOM = 18, TOP = 8, RIGHT = 8; // pixels around the lines
const HEIGHT = 170;
const STEPS = [1, 2, 2.5, 5, 10];

/** `format` writes a value. `update(lines, newest, span)`: lines are `{name, color, points, value}`, `value(point)` the height of a point. */
export function chart(title, format) {
  const plot = s("svg", { class: "plot", role: "img", "aria-label": title });
  const legend = h("ul", { class: "legend" });
  const tip = h("div", { class: "tip", hidden: true });
  const node = h("figure", { class: "chart" }, h("figcaption", {}, title, legend), h("div", { class: "canvas" }, plot, tip));
  let shown = null;
  const draw = () => shown && paint(plot, shown, format);
  new ResizeObserver(draw).observe(plot);
  plot.addEventListener("pointermove", (event) => shown && hover(event, plot, tip, shown, format));
  plot.addEventListener("pointerleave", () => (tip.hidden = true));
  return {
    node,
    update(lines, newest, span) {
      shown = { lines, newest, span };
      const values = lines.map(({ name, points, value }) => `${name} ${format(lastOf(points, value, newest))}`);
      plot.setAttribute("aria-label", `${title}, now: ${values.join(", ") || "nothing"}`);
      describe(legend, lines, newest, format);
      draw();
    },
  };
}

function describe(legend, lines, newest, format) {
  while (legend.children.length > lines.length) legend.lastChild.remove();
  lines.forEach(({ name, color, points, value }, place) => {
    const item = legend.children[place] ?? legend.appendChild(h("li", {}, h("span", { class: "swatch" }), h("span"), h("b")));
    item.firstChild.className = `swatch c${color}`;
    say(item.children[1], name);
    say(item.children[2], format(lastOf(points, value, newest)));
  });
}

/** The newest value of the last few seconds: a second in which nothing happened is no news. */
function lastOf(points, value, newest) {
  for (let place = points.length - 1; place >= 0 && points[place].number > newest - 5; place -= 1) {
    const found = value(points[place]);
    if (found !== null) return found;
  }
  return null;
}

/** A round number that nothing exceeds. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return STEPS.find((step) => step * power >= value) * power;
}

function scale(plot, { lines, newest, span }) {
  const width = plot.clientWidth || 400;
  const from = newest - span;
  const inside = lines.map(({ points, value }) => points.filter(({ number }) => number > from).map(value));
  const top = ceiling(inside.flat().reduce((most, value) => Math.max(most, value ?? 0), 0));
  const x = (number) => LEFT + ((number - from) / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  return { width, from, top, x, y };
}

function paint(plot, shown, format) {
  const { width, from, top, x, y } = scale(plot, shown);
  plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top);
    parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    parts.push(s("text", { class: "axis", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, format(share * top)));
  }
  for (const [number, text, anchor] of [[from, shown.span === 60 ? "1 minute ago" : `${shown.span / 60} minutes ago`, "start"], [shown.newest, "now", "end"]]) {
    parts.push(s("text", { class: "axis", x: x(number), y: HEIGHT - 4, "text-anchor": anchor }, text));
  }
  for (const { color, points, value } of shown.lines) {
    parts.push(s("path", { class: `line c${color}`, d: outline(points.filter(({ number }) => number > from), value, x, y) }));
  }
  plot.replaceChildren(...parts);
}

/** An SVG path; a gap where there is no value, and a short stroke where one stands alone. */
export function outline(points, value, x, y) {
  let path = "", before = null;
  for (const point of points) {
    const height = value(point);
    if (height !== null) {
      const alone = before === null || before !== point.number - 1;
      path += `${alone ? "M" : "L"}${x(point.number).toFixed(1)} ${y(height).toFixed(1)}${alone ? "h.1" : ""}`;
      before = point.number;
    }
  }
  return path;
}

function hover(event, plot, tip, shown, format) {
  const { width, from } = scale(plot, shown);
  const box = plot.getBoundingClientRect();
  const number = Math.round(from + ((event.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * shown.span);
  const values = shown.lines.flatMap(({ name, points, value }) => {
    const point = points.find((each) => each.number === number);
    return point && value(point) !== null ? [`${name}: ${format(value(point))}`] : [];
  });
  tip.hidden = !values.length;
  say(tip, `${values.join(" · ")} · ${Math.max(0, shown.newest - number)} s ago`);
  tip.style.left = `${Math.min(Math.max(event.clientX - box.left, 90), box.width - 90)}px`;
}

/** A line without words, for a row of a list. */
export function spark(label) {
  const line = s("path", { class: "line c0" });
  const node = s("svg", { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  return {
    node: h("span", { class: "sparkbox", title: label }, node),
    update(points, newest, value, span = 120) {
      const inside = points.filter(({ number }) => number > newest - span);
      const top = ceiling(inside.reduce((most, point) => Math.max(most, value(point) ?? 0), 0));
      const x = (number) => ((number - newest + span) / span) * 120;
      line.setAttribute("d", outline(inside, value, x, (height) => 26 - (height / top) * 24));
    },
  };
}
