// Sums over versions and workers, and small elements that several views share.

import { mean, spark } from "./chart.js";
import { h, say, show } from "./dom.js";
import { bytes, duration, number, percent } from "./format.js";
import { live } from "./live.js";

export const STAGES = ["queue", "batch", "preprocess", "inference", "postprocess", "other"];
const WORDS = {
  ready: "ready", degraded: "degraded", loading: "loading", failed: "failed", idle: "no workers", asleep: "asleep",
  READY: "ready", LOADING: "loading", UNLOADING: "ending", BACKING_OFF: "backing off", FAILED: "failed",
};
const CLASSES = { ready: "good", READY: "good", done: "good", queued: "busy", running: "busy", cancelled: "off", expired: "off", loading: "busy", LOADING: "busy", UNLOADING: "busy", idle: "off", asleep: "off" };
export const WORST = ["failed", "degraded", "loading", "idle", "asleep", "ready"];
const MOST = 600; // seconds that are kept
const TOLERATED = 0.01; // share of errors

/** A state as a word with a colour, which is not green for a model that fails; `update(state, share of errors)`. */
export function chip() {
  const node = h("span", { class: "chip" });
  return {
    node,
    update(state, share = 0) {
      node.className = `chip ${share > TOLERATED ? "off" : CLASSES[state] ?? "bad"}`;
      say(node, WORDS[state] ?? state);
    },
  };
}

export function pointsOf(name, version) {
  return live.points.get(`${name}/${version}`) ?? [];
}

/** Of all versions together, by the second: rates add up, of latencies the worst counts, of stages the mean over all requests. */
export function together(lists) {
  if (lists.length === 1) return lists[0];
  const sums = new Map();
  for (const point of lists.flat()) {
    const sum = sums.get(point.number);
    if (!sum) {
      sums.set(point.number, { ...point });
      continue;
    }
    if (point.stages) sum.stages = sum.stages ? sum.stages.map((each, place) => (each * sum.rate + point.stages[place] * point.rate) / (sum.rate + point.rate)) : point.stages;
    for (const name of ["rate", "failures", "waiting", "refused", "places"]) sum[name] += point[name];
    for (const name of ["p50", "p99"]) if (point[name] !== null) sum[name] = Math.max(sum[name] ?? 0, point[name]);
  }
  return [...sums.values()].sort((one, other) => one.number - other.number);
}

export function pointsOfModel(model) {
  return together(model.versions.map(({ version }) => pointsOf(model.name, version)));
}

/** The share of requests that failed; null without requests. */
export const errorShare = ({ rate, refused, failures }) => (rate + refused > 0 ? Math.min(1, failures / (rate + refused)) : null);

/** How full the batches were; null without batches. */
export const batchFill = ({ rate, places }) => (places > 0 ? Math.min(1, rate / places) : null);

export const shareText = (share) => (share === null ? "–" : `${number(100 * share)} %`);

/** The mean of the last ten seconds; of a share, over all requests of these. */
export function recent(points, name, seconds = 10) {
  return mean(points, (point) => point[name], live.newest, seconds);
}

export function recentShare(points, share, seconds = 10) {
  const sums = points.slice(-1.5 * seconds).filter((point) => point.number > live.newest - seconds).reduce((sum, point) => {
    for (const name of ["rate", "refused", "failures"]) sum[name] += point[name];
    if (point.places) sum.filled += point.rate;
    sum.places += point.places;
    return sum;
  }, { rate: 0, refused: 0, failures: 0, places: 0, filled: 0 });
  return share(share === batchFill ? { ...sums, rate: sums.filled } : sums);
}

/** The share of requests that failed in the last ten minutes; null without requests. */
export const errorsLately = (points) => recentShare(points, errorShare, MOST);

/** That share in red, with a link to the traceback of the last error; `update(name, share, versions)`. */
export function errorsLink() {
  const link = h("a", { hidden: true });
  return {
    node: link,
    update(name, share, versions) {
      const errors = versions.map(({ lastError }) => lastError).filter(Boolean);
      const { text = "", request = "" } = errors[0] ?? {};
      show(link, share > 0);
      link.className = `chip ${share > TOLERATED ? "bad" : "busy"}`;
      link.href = ["#/model", name, "errors", ...(request ? [request] : [])].map((part, place) => (place ? encodeURIComponent(part) : part)).join("/");
      link.title = [`of the requests of the last 10 minutes`, text && `last error: ${text}`].filter(Boolean).join("; ");
      say(link, `${shareText(share)} errors`);
    },
  };
}

/** The six numbers that tell how a model, or the whole server, is: each with its trend. `update(points, versions)`. */
export function stateTiles() {
  const tiles = {
    rate: stat("Requests/s"), errors: stat("Errors"), p50: stat("p50"), p99: stat("p99"), queue: stat("Queue"), fill: stat("Batch fill"),
  };
  return {
    node: h("dl", { class: "stats", "aria-label": "State, mean of ten seconds" }, Object.values(tiles).map((each) => each.node)),
    update(points, versions) {
      const failing = recentShare(points, errorShare);
      const fill = recentShare(points, batchFill);
      const failures = recent(points, "failures") ?? 0;
      const waiting = versions.reduce((sum, each) => sum + each.waiting, 0);
      const room = versions.some((each) => each.slo) ? Infinity : versions.reduce((sum, each) => sum + each.limits.job_queue_size, 0); // a target changes it
      const largest = Math.max(1, ...versions.map((each) => each.limits.batch_size));
      tiles.rate.update(number(recent(points, "rate") ?? 0), "", points, (point) => point.rate);
      tiles.errors.update(shareText(failing), failures ? `${number(failures)}/s` : "", points, errorShare, failing > 0.01 ? "bad" : failing > 0 ? "busy" : "");
      tiles.p50.update(duration(recent(points, "p50")), "", points, (point) => point.p50);
      tiles.p99.update(duration(recent(points, "p99")), "", points, (point) => point.p99);
      tiles.queue.update(number(waiting), room < Infinity ? `of ${number(room)}` : "", points, (point) => point.waiting, waiting > room / 2 ? "busy" : "");
      tiles.fill.update(shareText(fill), largest === 1 ? "batch size 1" : versions.length === 1 ? `of ${largest}` : "", points, batchFill);
    },
  };
}

/** A number with its trend; `update(text, note, points, value, tone)`. */
function stat(label) {
  const value = h("b", {}, "–"), note = h("small", { class: "quiet" });
  const line = spark();
  const node = h("div", { class: "stat" }, h("dt", {}, label), h("dd", {}, value, " ", note, line.node));
  return {
    node,
    update(text, more, points, height, tone = "") {
      say(value, text);
      say(note, more);
      if (node.dataset.tone !== tone) node.dataset.tone = tone;
      line.update(points, live.newest, height);
    },
  };
}

const SPANS = [60, 120, 300, 600];

/** Seconds that a chart shows: as many as there is anything to see of, from a minute to all that is kept. */
export function spanOf(lists) {
  const oldest = Math.min(...lists.map((points) => points[0]?.number ?? Infinity));
  return SPANS.find((span) => oldest > live.newest - span) ?? MOST;
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
  const now = ready === workers.length ? number(ready) : `${ready} of ${workers.length}`;
  const [{ minWorkers, maxWorkers } = {}, ...more] = versions;
  return more.length || !(maxWorkers > minWorkers) ? now : `${now} (${minWorkers} to ${maxWorkers})`;
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
