// Sums over versions and workers, and small elements that several views share.

import { h, say, show } from "./dom.js";
import { bytes, duration, number, percent } from "./format.js";
import { live } from "./live.js";

const WORDS = {
  ready: "ready", degraded: "degraded", loading: "loading", failed: "failed", idle: "no workers",
  READY: "ready", LOADING: "loading", UNLOADING: "ending", BACKING_OFF: "backing off", FAILED: "failed",
};
const CLASSES = { ready: "good", READY: "good", loading: "busy", LOADING: "busy", UNLOADING: "busy", idle: "off" };
const WORST = ["failed", "degraded", "loading", "idle", "ready"];

/** A state as a word with a colour; `update(state)`. */
export function chip() {
  const node = h("span", { class: "chip" });
  return {
    node,
    update(state) {
      node.className = `chip ${CLASSES[state] ?? "bad"}`;
      say(node, WORDS[state] ?? state);
    },
  };
}

export function pointsOf(name, version) {
  return live.points.get(`${name}/${version}`) ?? [];
}

/** Of all versions together, by the second: rates add up, of latencies the worst counts. */
export function together(lists) {
  if (lists.length === 1) return lists[0];
  const sums = new Map();
  for (const point of lists.flat()) {
    const sum = sums.get(point.number);
    if (!sum) sums.set(point.number, { ...point });
    else {
      for (const name of ["rate", "failures", "waiting"]) sum[name] += point[name];
      for (const name of ["p50", "p99"]) if (point[name] !== null) sum[name] = Math.max(sum[name] ?? 0, point[name]);
    }
  }
  return [...sums.values()].sort((one, other) => one.number - other.number);
}

export function pointsOfModel(model) {
  return together(model.versions.map(({ version }) => pointsOf(model.name, version)));
}

const SPANS = [60, 120, 300, 600];

/** Seconds that a chart shows: as many as there is anything to see of, from a minute to all that is kept. */
export function spanOf(lists) {
  const oldest = Math.min(...lists.map((points) => points[0]?.number ?? Infinity));
  return SPANS.find((span) => oldest > live.newest - span) ?? 600;
}

/** The mean of the last seconds. */
export function recent(points, name, seconds = 5) {
  const values = points.filter((point) => point.number > live.newest - seconds).map((point) => point[name]).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

export function stateOf(model) {
  const found = model.versions.find(({ version }) => version === model.default);
  return found?.state ?? WORST.find((state) => model.versions.some((version) => version.state === state)) ?? "idle";
}

export function workersOf(versions) {
  const workers = versions.flatMap((version) => version.workers);
  const ready = workers.filter(({ state }) => state === "READY").length;
  const devices = [...new Set(workers.map(({ device }) => device).filter(Boolean))].sort();
  return { workers, ready, devices, memory: workers.reduce((sum, { memory }) => sum + memory, 0) };
}

export function workersText(versions) {
  const { workers, ready } = workersOf(versions);
  return ready === workers.length ? number(ready) : `${ready} of ${workers.length}`;
}

export function memoryText(versions) {
  const { memory } = workersOf(versions);
  return memory ? bytes(memory) : "–";
}

/** A name and a value under it; `update(text)`. */
export function tile(label) {
  const value = h("dd", {}, "–");
  return { node: h("div", { class: "tile" }, h("dt", {}, label), value), update: (text) => say(value, text) };
}

/** Where the time of one request went, as bars; `update([{name, seconds}])`. */
export function stagesList() {
  const node = h("ul", { class: "stages", "aria-label": "Where the time went", hidden: true });
  return {
    node,
    update(found) {
      const parts = found.filter(({ name }) => name !== "total");
      const total = parts.reduce((sum, { seconds }) => sum + seconds, 0);
      show(node, total > 0);
      node.replaceChildren(...parts.map(({ name, seconds }, color) => {
        const bar = h("span", { class: `bar c${color}` });
        bar.style.width = `${Math.max(1, (100 * seconds) / (total || 1))}%`;
        return h("li", {}, h("span", { class: "label" }, name), h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", { class: "number" }, `${duration(seconds)}, ${percent(seconds / (total || 1), 0)}`));
      }));
    },
  };
}
