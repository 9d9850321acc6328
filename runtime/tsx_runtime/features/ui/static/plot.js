// Charts of stored figures: histograms, and lines with intervals, drawn as SVG in the available width.

import { stepOf } from "./chart.js";
import { h, s, say } from "./dom.js";
import { clock, percent } from "./format.js";

const LEFT = 46, RIGHT = 14, TOP = 10, BOTTOM = 22; // pixels around the plot
const HEIGHT = 150;
const MAX_BARS = 16; // more bins of quantiles are merged
const MAX_CATEGORIES = 12;
const MAX_SPREAD = 20; // of all bins, times what they had with the median width; otherwise the bars are equally wide
const LABEL_WIDTH = 84; // pixels that a label of the x axis needs
const DAY = 86400;

/** A number in three digits. */
export const digits = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));

/** Draw again whenever the width changes; `draw(width)` returns the elements of the chart. */
function drawn(svg, draw) {
  const redraw = () => {
    const width = svg.clientWidth || 300;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren(...draw(width));
  };
  new ResizeObserver(redraw).observe(svg);
  return redraw;
}

/** Distributions of one column as charts with one scale. `series`: `{name, color, shares}`. */
export function histograms({ edges, categories }, series) {
  return categories ? categoryCharts(categories, series) : numberCharts(edges ?? [], series);
}

function numberCharts(edges, series) {
  const { last, inner, borders, equal } = barsOf(edges);
  const charts = series.map(({ name, color, shares }) => ({
    name, color, bars: last.map((bin, bar) => shares.slice(bar ? last[bar - 1] + 1 : 0, bin + 1).reduce((sum, share) => sum + share, 0)),
  }));
  const height = (share, bar) => share / (borders[bar + 1] - borders[bar]);
  const highest = Math.max(...charts.flatMap(({ bars }) => bars.map(height))) || 1;
  return charts.map(({ name, color, bars }) => {
    const mode = bars.indexOf(Math.max(...bars));
    const label = `${name}: most values ${rangeOf(inner, mode)} (${percent(bars[mode])})`;
    const svg = s("svg", { class: "plot", role: "img", "aria-label": label });
    drawn(svg, (width) => {
      const x = (border) => 6 + border * (width - 12);
      const y = (value) => TOP + (1 - value / highest) * (HEIGHT - TOP - BOTTOM);
      const rects = bars.map((share, bar) => s("rect", { class: `column c${color}`, x: x(borders[bar]) + 0.5, y: y(height(share, bar)), width: Math.max(1, x(borders[bar + 1]) - x(borders[bar]) - 1), height: HEIGHT - BOTTOM - y(height(share, bar)) },
        s("title", {}, `${rangeOf(inner, bar)}: ${percent(share)}`)));
      const floor = s("line", { class: "grid floor", x1: 6, x2: width - 6, y1: y(0), y2: y(0) });
      let free = 0;
      const labels = inner.flatMap((edge, index) => {
        if (edge === null) return [];
        const middle = x(borders[index + 1]), half = 4 * digits(edge).length;
        if (middle - half < free || middle + half > width) return [];
        free = middle + half + 14;
        return [s("text", { class: "axis", x: middle, y: HEIGHT - 6, "text-anchor": "middle" }, digits(edge))];
      });
      return [...rects, floor, ...labels];
    });
    return h("figure", { class: "chart" }, h("figcaption", {}, name, h("span", { class: "when" }, equal ? "bins of equal width" : "")), svg);
  });
}

/**
 * Merge the bins between edges into bars: `last` bin of each, `inner` edges between them, and their `borders` from 0 to 1.
 * The first and the last bar are open: each is as wide as its neighbour. So is a first bin that holds only the smallest value;
 * the edge before it is null.
 */
function barsOf(edges) {
  const places = [...edges], tiny = 1e-9 * Math.max(Math.abs(edges[0]), Math.abs(edges.at(-1)), Number.MIN_VALUE);
  const single = edges.length > 1 && edges[1] - edges[0] <= tiny;
  if (single) places[0] = edges.length > 2 ? 2 * edges[1] - edges[2] : edges[1] - 1;
  const range = places.at(-1) - places[0];
  const widths = places.slice(1).map((place, bin) => place - places[bin]).filter((width) => width > tiny).sort((one, other) => one - other);
  const equal = range > MAX_SPREAD * places.length * widths[widths.length >> 1];
  const step = Math.ceil((edges.length + 1) / MAX_BARS), least = equal ? tiny : range / (2 * MAX_BARS);
  const last = [];
  places.forEach((place, bin) => {
    if (!last.length || (bin - last.at(-1) >= step && place - places[last.at(-1)] >= least)) last.push(bin);
  });
  if (last.length > 1) last[last.length - 1] = edges.length - 1; // what is over the largest edge stays apart
  const inner = last.map((bin) => places[bin]);
  const limits = equal || inner.length < 2 ? [...inner, 0, 0].map((_, bar) => bar) : [2 * inner[0] - inner[1], ...inner, 2 * inner.at(-1) - inner.at(-2)];
  const total = limits.at(-1) - limits[0];
  if (single) inner[0] = null;
  return { last: [...last, edges.length], inner, borders: limits.map((limit) => (limit - limits[0]) / total), equal };
}

function rangeOf(inner, bar) {
  if (!inner.length) return "of all kinds";
  const [low, high] = [inner[bar - 1], inner[bar]];
  if (high === null) return `under ${digits(inner[1])}`;
  if (low === null) return `of ${digits(high)}`;
  if (!bar) return `up to ${digits(high)}`;
  return high === undefined ? `over ${digits(low)}` : `${digits(low)} to ${digits(high)}`;
}

function categoryCharts(categories, series) {
  const size = (index) => Math.max(...series.map(({ shares }) => shares[index] ?? 0));
  const order = categories.map((_, index) => index).sort((one, other) => size(other) - size(one));
  const most = size(order[0]) || 1;
  return series.map(({ name, color, shares }) => h("figure", { class: "chart" }, h("figcaption", {}, name),
    h("ol", { class: "bars", "aria-label": `${name}: share of the rows by category` }, order.slice(0, MAX_CATEGORIES).map((index) => {
      const bar = h("span", { class: `bar c${color}` });
      bar.style.width = `${(100 * (shares[index] ?? 0)) / most}%`;
      return h("li", {}, h("span", { class: "label", title: categories[index] }, categories[index]), h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", { class: "number" }, percent(shares[index] ?? 0)));
    })),
    order.length > MAX_CATEGORIES && h("p", { class: "quiet small" }, `${order.length - MAX_CATEGORIES} rarer categories are not shown.`)));
}

/**
 * A chart of lines with the bands of their intervals. `series`: `{name, color, points}` with points `{x, y, low, high, count}`.
 * `format` writes a height and `across` an x. `floor`: the lowest height, otherwise that of the data. `limit`: `{value, name}` of a
 * dashed line. `diagonal`: draw the line of equal x and y.
 */
export function lineChart(title, series, { format, across = null, floor = null, limit = null, diagonal = false, note = "" }) {
  const points = series.flatMap((line) => line.points);
  const stops = [...new Set(points.map(({ x }) => x))].sort((one, other) => one - other);
  const [first, last] = diagonal ? [0, 1] : stops.length > 1 ? [stops[0], stops.at(-1)] : [stops[0] - 1, stops[0] + 1];
  const written = across ?? timeFormat(last - first);
  const heights = [...points.flatMap(({ y, low, high }) => [y, low ?? y, high ?? y]), ...(limit ? [limit.value] : []), ...(diagonal ? [0, 1] : [])];
  const range = Math.max(...heights) - (floor ?? Math.min(...heights));
  const step = stepOf(range > 0 ? range : Math.max(...heights) || 1);
  const bottom = floor ?? Math.floor(Math.min(...heights) / step + 1e-9) * step;
  const top = bottom + step * Math.max(1, Math.ceil((Math.max(...heights) - bottom) / step - 1e-9));
  const svg = s("svg", { class: "plot", role: "img", tabindex: "0" });
  const when = h("span", { class: "when" });
  const legend = h("ul", { class: "legend" }, series.map(({ name, color }) => h("li", {}, h("span", { class: `swatch c${color}` }), h("span", {}, name), h("b"))));
  let pointed = null; // index of the stop whose values are shown
  const redraw = drawn(svg, (width) => {
    const x = (value) => LEFT + ((value - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    const path = (list, height) => list.map((point, index) => `${index ? "L" : "M"}${x(point.x).toFixed(1)} ${y(height(point)).toFixed(1)}`).join("");
    const bands = series.map(({ color, points: line }) => {
      const sure = line.filter(({ low, high }) => typeof low === "number" && typeof high === "number");
      return s("path", { class: `area c${color}`, d: sure.length ? `${path(sure, ({ high }) => high)}${path([...sure].reverse(), ({ low }) => low).replace("M", "L")}Z` : "" });
    });
    const lines = series.map(({ color, points: line }) => s("path", { class: `line c${color}`, d: path(line, (point) => point.y) }));
    const dots = series.flatMap(({ color, points: line }) => line.filter((point) => line.length < 25 || point.x === stops[pointed]).map((point) => s("circle", { class: `dot c${color}`, cx: x(point.x), cy: y(point.y), r: point.x === stops[pointed] ? 4.5 : 3 })));
    const dashed = (x1, x2, y1, y2) => s("line", { class: "limit", x1, x2, y1, y2 });
    return [...gridOf(width, { x, y, bottom, top, step, first, last, format, written }),
      diagonal && dashed(x(0), x(1), y(0), y(1)), limit && dashed(LEFT, width - RIGHT, y(limit.value), y(limit.value)),
      pointed !== null && s("line", { class: "cross", x1: x(stops[pointed]), x2: x(stops[pointed]), y1: TOP, y2: HEIGHT - BOTTOM }),
      ...bands, ...lines, ...dots].filter(Boolean);
  });
  const point = (index) => {
    pointed = index;
    say(when, index === null ? note || (limit ? limit.name : "") : written(stops[index]));
    series.forEach(({ points: line }, place) => {
      const value = index === null ? line.at(-1) : line.find(({ x }) => x === stops[index]);
      say(legend.children[place].lastChild, value ? intervalText({ value: value.y, ...value }, format) : "–");
    });
    redraw();
  };
  svg.addEventListener("pointermove", ({ clientX }) => {
    const box = svg.getBoundingClientRect();
    const wanted = first + ((clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (last - first);
    point(stops.reduce((best, stop, index) => (Math.abs(stop - wanted) < Math.abs(stops[best] - wanted) ? index : best), 0));
  });
  for (const event of ["pointerleave", "blur"]) svg.addEventListener(event, () => point(null));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    point(Math.min(stops.length - 1, Math.max(0, (pointed ?? stops.length) + move)));
  });
  point(null);
  svg.setAttribute("aria-label", `${title}: ${series.map(({ name }, place) => `${name} ${legend.children[place].lastChild.textContent}`).join(", ")}`);
  return h("figure", { class: "chart" }, h("figcaption", {}, title, when), svg, legend);
}

function gridOf(width, { x, y, bottom, top, step, first, last, format, written }) {
  const rows = Array.from({ length: Math.round((top - bottom) / step) + 1 }, (_, index) => bottom + index * step);
  const places = Math.max(1, Math.min(6, Math.floor((width - LEFT - RIGHT) / LABEL_WIDTH)));
  const columns = Array.from({ length: places + 1 }, (_, index) => first + (index / places) * (last - first));
  return [
    ...rows.flatMap((value, index) => [s("line", { class: index ? "grid" : "grid floor", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      s("text", { class: "axis", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value))]),
    ...columns.map((value, index) => s("text", { class: "axis", x: x(value), y: HEIGHT - 5, "text-anchor": !index ? "start" : index === places ? "end" : "middle" },
      index && written(value) === written(columns[index - 1]) ? "" : written(value))),
  ];
}

function timeFormat(span) {
  const day = (seconds) => new Date(1000 * seconds).toLocaleDateString("sv").slice(5);
  if (span > 4 * DAY) return day;
  return (seconds) => `${span > DAY ? `${day(seconds)} ` : ""}${clock(seconds).slice(-8, -3)}`;
}

/** A figure with its 95 % confidence interval. */
export function intervalText({ value, low, high }, format) {
  if (value === null || value === undefined) return "–";
  return typeof low === "number" && typeof high === "number" ? `${format(value)} (${format(low)} to ${format(high)})` : format(value);
}
