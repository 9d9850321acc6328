// A model's charts and versions, with the actions on each version.

import { path } from "./api.js";
import { chart } from "./chart.js";
import { field, h, keyed, say, show } from "./dom.js";
import { chip, memoryText, pointsOf, spanOf, tile, workersText } from "./figures.js";
import { bytes, duration, number, since } from "./format.js";
import { live } from "./live.js";
import { act, ask } from "./talk.js";

const COLORS = 8; // of lines that can be distinguished
const SPANS = [["1 minute", 60], ["10 minutes", 600], ["All data", null]];
const LIMITS = {
  batch_size: "Batch size", max_batch_delay: "Longest wait for a full batch, ms", job_queue_size: "Queue size",
  response_timeout: "Response timeout, seconds", client_timeout: "Deadline of a request, ms (0: none)",
};

export function overviewTab(name) {
  const rate = chart("Requests per second", number);
  const latency = chart("Latency", duration);
  const failures = chart("Failures per second", number);
  const queue = chart("Requests in the queue", number);
  const versions = h("div");
  const left = h("p", { class: "quiet", hidden: true });
  let wanted = null;
  let newest = null;
  const spans = h("fieldset", { class: "segments" }, h("legend", {}, "Time shown"), SPANS.map(([label, seconds]) =>
    h("label", {}, h("input", { type: "radio", name: `span-${name}`, checked: seconds === wanted, onchange: () => { wanted = seconds; if (newest) draw(newest); } }), h("span", {}, label))));
  const draw = (model) => {
    const drawn = drawnOf(model);
    const span = wanted ?? spanOf(drawn.map(({ version }) => pointsOf(model.name, version)));
    const lines = (value) => drawn.map(({ version }, color) => ({ name: version, color, points: pointsOf(model.name, version), value }));
    const pair = (which) => drawn.flatMap(({ version }, color) => {
      const points = pointsOf(model.name, version);
      const before = model.versions.length > 1 ? `${version} ` : "";
      return [{ name: `${before}${which}`, color: model.versions.length > 1 ? color : which === "p50" ? 0 : 1, points, value: (point) => point[which] }];
    });
    rate.update(lines((point) => point.rate), live.newest, span);
    latency.update(model.versions.length > 1 ? pair("p99") : [...pair("p50"), ...pair("p99")], live.newest, span);
    failures.update(lines((point) => point.failures), live.newest, span);
    queue.update(lines((point) => point.waiting), live.newest, span);
    show(left, drawn.length < model.versions.length);
    say(left, `The charts show ${drawn.length} of ${model.versions.length} versions: those with the most recent requests.`);
  };
  return {
    node: h("div", {}, spans, h("div", { class: "charts" }, rate.node, latency.node, failures.node, queue.node), left, h("h2", {}, "Versions"), versions),
    update(model, server) {
      newest = model;
      draw(model);
      keyed(versions, model.versions, ({ version }) => version, (version) => versionCard(name, version));
      for (const row of versions.kept.values()) row.refine(model, server);
    },
  };
}

/** The versions that have a line each: all of a few, or those with the most requests, as many as there are colours. */
function drawnOf(model) {
  if (model.versions.length <= COLORS) return model.versions;
  const asked = new Map(model.versions.map((each) => [each, pointsOf(model.name, each.version).reduce((sum, { rate, waiting }) => sum + rate + waiting, 0)]));
  const busy = model.versions.filter((each) => asked.get(each) || each.version === model.default).sort((one, other) => asked.get(other) - asked.get(one)).slice(0, COLORS);
  return model.versions.filter((each) => busy.includes(each)); // in their own order
}

function versionCard(name, { version }) {
  const state = chip();
  const isDefault = h("span", { class: "chip off", hidden: true }, "default");
  const tiles = { workers: tile("Workers"), device: tile("Device"), memory: tile("Memory"), waiting: tile("Waiting"), requests: tile("Requests"), failed: tile("Failed"), restarts: tile("Restarts"), batch: tile("Batch size") };
  const body = h("tbody");
  const where = (...more) => path("models", name, version, ...more);
  const makeDefault = h("button", { onclick: () => act(makeDefault, "PUT", where("set-default")) }, "Make default");
  const remove = h("button", { class: "danger", onclick: async () => {
    if (await ask(`Unregister version ${version} of ${name}? Accepted requests are answered first; the archive is kept.`, "Unregister")) act(remove, "DELETE", where());
  } }, "Unregister");
  const workers = h("p", { class: "quiet" }, "No workers: requests are refused until some are added.");
  const scale = scaleForm(where);
  const about = h("p", { class: "quiet" });
  const measured = h("p", { class: "quiet", hidden: true });
  const why = h("p", { hidden: true }, "Not all of its workers are ready. ", h("a", { href: `#/model/${encodeURIComponent(name)}/errors` }, "Errors and log"), " shows why.");
  const node = h("section", { class: "card", "aria-label": `Version ${version}` },
    h("div", { class: "row" }, h("h3", {}, `Version ${version}`), state.node, isDefault, h("span", { class: "grow" }), makeDefault, remove),
    about, measured, why,
    h("dl", { class: "tiles small" }, Object.values(tiles).map((each) => each.node)),
    workers,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Workers of version ${version}` },
      h("table", {}, h("thead", {}, h("tr", {}, ["Worker", "State", "Process", "Device", "Memory", "Since", "Restarts"].map((text) => h("th", { scope: "col" }, text)))), body)),
    h("div", { class: "row top" }, scale.node, limitsForm(where)));
  return {
    node,
    update(now) {
      state.update(now.state);
      say(about, [now.url, now.handler && `handler ${now.handler}`].filter(Boolean).join(" · "));
      show(measured, now.measured);
      show(why, now.errors && ["failed", "degraded"].includes(now.state));
      say(measured, now.measured ?? "");
      const devices = [...new Set(now.workers.map(({ device }) => device).filter(Boolean))];
      scale.update(now.minWorkers);
      tiles.workers.update(workersText([now]));
      tiles.device.update(devices.join(", ") || "–");
      tiles.memory.update(memoryText([now]));
      tiles.waiting.update(number(now.waiting));
      tiles.requests.update(number(now.requests));
      tiles.failed.update(number(now.failed));
      tiles.restarts.update(number(now.restarts));
      tiles.batch.update(number(now.batchSize));
      show(workers, !now.workers.length);
      show(body.closest(".scroll"), now.workers.length);
      keyed(body, now.workers, ({ id }) => id, workerRow);
    },
    refine(model, server) {
      show(isDefault, model.default === version);
      show(makeDefault, model.default !== version);
      const only = model.versions.length === 1;
      show(remove, server.modelApi && !model.workflow && (only || model.default !== version));
    },
  };
}

function workerRow() {
  const state = chip();
  const cells = ["id", "pid", "device", "memory", "since", "restarts"].map(() => h("td"));
  const [id, pid, device, memory, started, restarts] = cells;
  return {
    node: h("tr", {}, id, h("td", {}, state.node), pid, device, memory, started, restarts),
    update(worker) {
      state.update(worker.state);
      say(id, worker.id);
      say(pid, worker.pid ?? "–");
      say(device, worker.device ?? "–");
      say(memory, worker.memory ? bytes(worker.memory) : "–");
      say(started, since(worker.started, live.state.server.now));
      say(restarts, worker.restarts);
    },
  };
}

function scaleForm(where) {
  let edited = false;
  const least = h("input", { type: "number", min: "0", max: "1024", required: true, oninput: () => (edited = true) });
  const submit = h("button", { type: "submit" }, "Scale");
  const send = async (event) => {
    event.preventDefault();
    if (await act(submit, "PUT", where(), { min_worker: least.value, max_worker: least.value, synchronous: "true" })) edited = false;
  };
  return {
    node: h("form", { class: "inline", onsubmit: send }, field("Workers", least), submit),
    update(workers) {
      if (!edited) least.value = workers;
    },
  };
}

function limitsForm(where) {
  const which = h("select", {}, Object.entries(LIMITS).map(([value, text]) => h("option", { value }, text)));
  const value = h("input", { type: "number", min: "0", required: true });
  const submit = h("button", { type: "submit" }, "Change");
  const send = (event) => {
    event.preventDefault();
    act(submit, "PUT", where(), { [which.value]: value.value });
  };
  return h("form", { class: "inline", onsubmit: send }, field("Limit", which), field("New value", value), submit);
}
