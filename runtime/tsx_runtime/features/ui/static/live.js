// Polls the server's state once a second while the page is visible, and reconnects after it stops answering.

import { get, Refused } from "./api.js";

const EVERY = 1000; // ms
const SLOWEST = 5000; // ms between two tries while the server does not answer
export const KEPT = 600; // points, as many as the server keeps

/** `state` is the newest answer; `points` holds the points of each version, by `NAME/VERSION`; the time of a point is its number and `base`. */
export const live = { state: null, points: new Map(), newest: 0, base: 0, connection: "connecting", error: "" };

const listeners = new Set();
let newest = 0;
let pause = EVERY;
let timer = null;
let asking = null;

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function model(name) {
  return live.state?.models.find((each) => each.name === name);
}

/** Ask now, and go on from there. */
export async function refresh() {
  clearTimeout(timer);
  asking ??= ask().finally(() => (asking = null));
  await asking;
  clearTimeout(timer);
  timer = document.hidden || live.connection === "locked" ? null : setTimeout(refresh, pause);
}

async function ask() {
  try {
    take(await newestState());
    live.connection = "live";
    live.error = "";
    pause = EVERY;
  } catch (error) {
    live.connection = error instanceof Refused && error.wantsToken ? "locked" : "lost";
    live.error = error.message;
    pause = Math.min(SLOWEST, 1.5 * pause);
  }
  for (const listener of [...listeners]) {
    try {
      listener();
    } catch (error) {
      console.error(error); // a view that fails holds up no other, nor the next question
    }
  }
}

async function newestState() {
  const state = await get("ui/api/state", { since: newest });
  if (!live.state || state.server.start === live.state.server.start) return state;
  live.points.clear(); // another start counts from the beginning
  return get("ui/api/state");
}

function take(state) {
  newest = state.newest;
  const kept = new Map();
  for (const each of state.models) {
    for (const version of each.versions) {
      const key = `${each.name}/${version.version}`;
      const points = live.points.get(key) ?? [];
      points.push(...version.points.map(([number, rate, failures, p50, p99, waiting, refused, places, stages, generation]) => ({ number, rate, failures, p50, p99, waiting, refused, places, stages, generation })));
      kept.set(key, points.slice(-KEPT));
    }
  }
  live.points = kept;
  live.newest = state.newest;
  const base = state.server.now - state.newest;
  if (Math.abs(base - live.base) > 1.5) live.base = Math.round(base); // whole and kept, so that labels of charts do not tremble
  live.state = state;
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && live.connection !== "locked") refresh();
});
