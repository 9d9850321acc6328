// Charts of the last minutes, drawn as SVG in the available size: lines over filled areas, or areas on top of each other.

import { h, s, say } from "./dom.js";
import { clock } from "./format.js";
import { live } from "./live.js";

const LEFT = 54, BOTTOM = 20, TOP = 8, RIGHT = 10; // pixels around the plot
const HEIGHT = 176;
const TICK = 68; // pixels that a label of the time needs
const STEPS = [1, 2, 2.5, 5, 10];
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300];
const SHORTEST = 5; // seconds: what a chart shows at least
const MEAN = 10; // seconds of the mean in the legend

let pointed = null; // the second under the pointer: one crosshair for all charts

/**
 * `format` writes a value. `stacked` lines lie on each other; `whole` values have no fractions; the axis of nothing reaches to `least`.
 * `update(lines, newest, span)`: lines are `{name, color, points, value}`, `value(point)` the height of a point.
 */
export function chart(title, format, { stacked = false, whole = false, least = 1 } = {}) {
  const kind = { stacked, whole, least };
  const plot = s("svg", { class: "plot", role: "img", tabindex: "0", "aria-label": title });
  const cross = s("g");
  const legend = h("ul", { class: "legend" });
  const when = h("span", { class: "when" });
  const node = h("figure", { class: "chart" }, h("figcaption", {}, title, when), plot, legend);
  let shown = null;
  const draw = () => {
    if (!shown) return;
    const area = scale(plot, shown, kind);
    plot.setAttribute("viewBox", `0 0 ${area.width} ${HEIGHT}`);
    plot.classList.toggle("dense", 2 * (shown.newest - area.from) > area.width);
    plot.replaceChildren(...axes(area, format), ...shapes(area, shown.lines, stacked), cross);
    node.point();
  };
  node.point = () => {
    if (!shown) return;
    const area = scale(plot, shown, kind);
    const inside = pointed !== null && pointed >= area.from && pointed <= shown.newest;
    say(when, inside ? clock(pointed + live.base) : `${MEAN} s mean`);
    cross.replaceChildren(...(inside ? marks(area, shown.lines, pointed) : []));
    describe(legend, shown.lines, format, ({ points, value }) => (inside ? at(points, value, pointed) : mean(points, value, shown.newest)));
  };
  new ResizeObserver(draw).observe(plot);
  const follow = (event) => {
    if (!shown) return;
    const { width, from } = scale(plot, shown, kind);
    const box = plot.getBoundingClientRect();
    const share = ((event.clientX - box.left) * (width / box.width) - LEFT) / (width - LEFT - RIGHT);
    pointAt(Math.round(from + Math.min(1, Math.max(0, share)) * (shown.newest - from)));
  };
  for (const each of ["pointermove", "pointerdown"]) plot.addEventListener(each, follow); // a finger only touches
  for (const each of ["pointerleave", "blur"]) plot.addEventListener(each, () => pointAt(null));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!step || !shown) return;
    event.preventDefault();
    pointAt(Math.min(shown.newest, Math.max(scale(plot, shown, kind).from, (pointed ?? shown.newest) + step)));
  });
  return {
    node,
    update(lines, newest, span) {
      shown = { lines, newest, span };
      const values = lines.map(({ name, points, value }) => `${name} ${format(mean(points, value, newest))}`);
      plot.setAttribute("aria-label", `${title}, ${MEAN} s mean: ${values.join(", ") || "nothing"}`);
      draw();
    },
  };
}

function pointAt(number) {
  if (pointed === number) return;
  pointed = number;
  for (const each of document.querySelectorAll("figure.chart")) each.point?.();
}

function describe(legend, lines, format, value) {
  while (legend.children.length > lines.length) legend.lastChild.remove();
  lines.forEach((line, place) => {
    const item = legend.children[place] ?? legend.appendChild(h("li", {}, h("span", { class: "swatch" }), h("span"), h("b")));
    item.firstChild.className = `swatch c${line.color}`;
    say(item.children[1], line.name);
    say(item.children[2], format(value(line)));
  });
}

function at(points, value, number) {
  const point = points.find((each) => each.number === number);
  return point ? value(point) : null;
}

/** Of the last seconds in which there was a value. */
export function mean(points, value, newest, seconds = MEAN) {
  const values = points.slice(-seconds - 5).filter(({ number }) => number > newest - seconds).map(value).filter((each) => each !== null);
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
}

/** The distance between two labels of an axis, of which up to six reach to `most`. */
export function stepOf(most, whole = false) {
  if (!(most > 0)) return 1;
  const least = most / 5;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = STEPS.find((each) => each * power >= least * 0.999) * power;
  return whole ? Math.max(1, Math.ceil(step)) : step;
}

/** The heights of the lines at a point: a stacked one lies on the sum of those before it in the same second. */
function heights(lines, stacked) {
  if (!stacked) return lines.map(({ value }) => ({ low: () => 0, top: value }));
  let below = new Map();
  return lines.map(({ points, value }) => {
    const low = below, top = new Map(low);
    for (const point of points) if (value(point) !== null) top.set(point.number, (low.get(point.number) ?? 0) + value(point));
    below = top;
    return { low: ({ number }) => low.get(number) ?? 0, top: (point) => (value(point) === null ? null : top.get(point.number)) };
  });
}

function scale(plot, { lines, newest, span }, { stacked, whole, least }) {
  const width = plot.clientWidth || 400;
  const oldest = Math.min(...lines.map(({ points }) => points[0]?.number ?? newest));
  const from = Math.min(newest - SHORTEST, Math.max(newest - span, oldest)); // no plot is half empty after the start
  const drawn = heights(lines, stacked);
  const most = lines.reduce((all, { points }, place) => points.reduce((top, point) => (point.number < from ? top : Math.max(top, drawn[place].top(point) ?? 0)), all), 0) || least;
  const step = stepOf(most, whole);
  const top = step * Math.max(1, Math.ceil(most / step - 1e-9));
  const x = (number) => LEFT + ((number - from) / (newest - from)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  return { width, from, newest, step, top, x, y, drawn };
}

function axes({ width, from, newest, step, top, x, y }, format) {
  const parts = [];
  for (let place = 0; place * step <= top * 1.0001; place += 1) {
    const height = y(place * step);
    parts.push(s("line", { class: place ? "grid" : "grid floor", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }));
    parts.push(s("text", { class: "axis", x: LEFT - 7, y: height + 4, "text-anchor": "end" }, format(place * step)));
  }
  const seconds = SECONDS.find((each) => ((newest - from) / each) * TICK <= width - LEFT - RIGHT) ?? SECONDS.at(-1);
  for (let number = from + ((seconds - ((from + live.base) % seconds)) % seconds); number <= newest; number += seconds) {
    const middle = x(number);
    if (middle < LEFT + 24 || middle > width - RIGHT - 20) continue;
    parts.push(s("line", { class: "grid tick", x1: middle, x2: middle, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
    parts.push(s("text", { class: "axis", x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, clock(number + live.base).slice(-8, seconds < 60 ? undefined : -3)));
  }
  return parts;
}

function shapes({ from, x, y, drawn }, lines, stacked) {
  const across = ({ number }) => x(number);
  const paths = lines.map(({ color, points }, place) => {
    const { low, top } = drawn[place];
    const runs = runsOf(points.filter(({ number }) => number >= from), top);
    const upper = runs.map((run) => lineOf(run, across, (point) => y(top(point))));
    const area = runs.map((run, each) => `${upper[each]}${lineOf([...run].reverse(), across, (point) => y(low(point))).replace("M", "L")}Z`);
    return [s("path", { class: `area c${color}${stacked ? " stacked" : ""}`, d: area.join("") }), s("path", { class: `line c${color}`, d: upper.join("") })];
  });
  return [...paths.map(([area]) => area), ...paths.map(([, line]) => line)];
}

function marks({ x, y, drawn }, lines, number) {
  const dots = lines.flatMap(({ color, points }, place) => {
    const height = at(points, drawn[place].top, number);
    return height === null ? [] : [s("circle", { class: `dot c${color}`, cx: x(number), cy: y(height), r: 3.5 })];
  });
  return [s("line", { class: "cross", x1: x(number), x2: x(number), y1: TOP, y2: HEIGHT - BOTTOM }), ...dots];
}

/** Seconds that follow each other and have a value. */
function runsOf(points, value) {
  const runs = [];
  let before = null;
  for (const point of points) {
    if (value(point) === null) continue;
    if (before !== null && before === point.number - 1) runs.at(-1).push(point);
    else runs.push([point]);
    before = point.number;
  }
  return runs;
}

/** An SVG path; a short stroke where a point stands alone. */
function lineOf(points, x, y) {
  const path = points.map((point, place) => `${place ? "L" : "M"}${x(point).toFixed(1)} ${y(point).toFixed(1)}`).join("");
  return points.length === 1 ? `${path}h.1` : path;
}

/** A line without words, for a tile or a row of a list. */
export function spark() {
  const line = s("path", { class: "line" }), area = s("path", { class: "area" });
  const node = s("svg", { class: "spark c0", viewBox: "0 0 120 30", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return {
    node,
    update(points, newest, value, span = 120) {
      const from = Math.min(newest - SHORTEST, Math.max(newest - span, points[0]?.number ?? newest));
      const inside = points.filter(({ number }) => number >= from);
      const top = inside.reduce((most, point) => Math.max(most, value(point) ?? 0), 0) || 1;
      const x = ({ number }) => ((number - from) / (newest - from)) * 120;
      const y = (point) => 28.5 - (value(point) / top) * 26;
      const runs = runsOf(inside, value);
      line.setAttribute("d", runs.map((run) => lineOf(run, x, y)).join(""));
      area.setAttribute("d", runs.map((run) => `${lineOf(run, x, y)}L${x(run.at(-1)).toFixed(1)} 30L${x(run[0]).toFixed(1)} 30Z`).join(""));
    },
  };
}
