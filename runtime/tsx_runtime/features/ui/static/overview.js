// A model's state, charts and versions, with the actions on each version.

import { call, path } from "./api.js";
import { chart } from "./chart.js";
import { differences, formDialog } from "./dialog.js";
import { cells, field, h, keyed, liveTable, say, show } from "./dom.js";
import { batchFill, chip, errorShare, errorsLately, errorsLink, shareText, memoryText, pointsOf, pointsOfModel, spanOf, STAGES, stateTiles, workersText } from "./figures.js";
import { bytes, duration, number, percent, since } from "./format.js";
import { generationCharts } from "./generation.js";
import { live, model as find } from "./live.js";
import { act, ask } from "./talk.js";

const COLORS = 8; // of lines that can be distinguished
const SPANS = [["1 minute", 60], ["10 minutes", 600], ["All data", null]];
const LIMITS = [
  ["batch_size", "Batch size", "requests of one batch", 1],
  ["max_batch_delay", "Longest wait for a full batch, ms", "only with batchPolicy: wait", 0],
  ["job_queue_size", "Queue size", "further requests are refused", 1],
  ["response_timeout", "Response timeout, seconds", "a worker that takes longer for a batch is replaced", 1],
  ["client_timeout", "Deadline of a request, ms", "0: none", 0],
];
const BY_SLO = ["batch_size", "max_batch_delay", "job_queue_size"]; // what a latency target is in place of

export function overviewTab(name) {
  const tiles = stateTiles();
  const rate = chart("Requests per second", number, { stacked: true, least: 4 });
  const latency = chart("Latency", duration, { least: 0.004 });
  const stages = chart("Time by stage", duration, { stacked: true, least: 0.004 });
  const errors = chart("Errors", shareText, { least: 0.04 });
  const queue = chart("Requests in the queue", number, { whole: true, least: 4 });
  const fill = chart("Batch fill", shareText);
  const charts = h("div", { class: "charts" }, [rate, latency, stages, errors, queue].map((each) => each.node));
  const generation = generationCharts();
  const versions = h("div", { class: "versions" });
  const left = h("p", { class: "quiet", hidden: true });
  let wanted = null;
  let newest = null;
  const spans = h("fieldset", { class: "segments" }, h("legend", {}, "Time shown"), SPANS.map(([label, seconds]) =>
    h("label", {}, h("input", { type: "radio", name: `span-${name}`, checked: seconds === wanted, onchange: () => { wanted = seconds; if (newest) draw(newest); } }), h("span", {}, label))));
  const draw = (model) => {
    const drawn = drawnOf(model);
    const many = model.versions.length > 1;
    const all = pointsOfModel(model);
    const span = wanted ?? spanOf(drawn.map(({ version }) => pointsOf(model.name, version)));
    const lines = (value) => drawn.map(({ version }, color) => ({ name: version, color, points: pointsOf(model.name, version), value }));
    const quantiles = (which, color) => ({ name: which, color, points: all, value: (point) => point[which] });
    tiles.update(all, model.versions);
    rate.update(lines((point) => point.rate), live.newest, span);
    latency.update(many ? lines((point) => point.p99).map((line) => ({ ...line, name: `${line.name} p99` })) : [quantiles("p99", 1), quantiles("p50", 0)], live.newest, span);
    const taken = STAGES.map((name, color) => ({ name, color, points: all, value: (point) => point.stages?.[color] ?? null }));
    stages.update(taken.filter(({ value }) => all.some(value)), live.newest, span); // a handler has not all of them
    errors.update(lines(errorShare), live.newest, span);
    queue.update(lines((point) => point.waiting), live.newest, span);
    fill.update(lines(batchFill), live.newest, span);
    generation.update(model.name, drawn, span);
    const batches = model.versions.some((each) => each.limits.batch_size > 1);
    if (batches && fill.node.parentNode !== charts) charts.append(fill.node);
    else if (!batches) fill.node.remove();
    show(left, drawn.length < model.versions.length);
    say(left, `The charts show ${drawn.length} of ${model.versions.length} versions: those with the most recent requests.`);
  };
  return {
    node: h("div", {}, tiles.node, h("div", { class: "row spread" }, h("h2", {}, "Trends"), spans),
      charts, left, generation.node, h("h2", {}, "Versions"), versions),
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

const FACTS = { workers: "Workers", device: "Device", memory: "Memory", batch: "Batch size", waiting: "Waiting", requests: "Requests", failed: "Failed", restarts: "Restarts" };
const WORKER = ["Worker", "State", "Process", "Device", "Memory", "Since", "Restarts"];

function versionCard(name, { version }) {
  const state = chip(), failing = errorsLink();
  const isDefault = h("span", { class: "chip off", hidden: true }, "default");
  const facts = Object.fromEntries(Object.keys(FACTS).map((key) => [key, h("dd")]));
  const list = liveTable(`Workers of version ${version}`, WORKER);
  const where = (...more) => path("models", name, version, ...more);
  let latest = null;
  const settings = h("button", { onclick: () => settingsDrawer(name, latest, where()) }, "Scaling and limits");
  const makeDefault = h("button", { onclick: () => defaultDialog(name, version, where("set-default")) }, "Make default");
  const remove = h("button", { class: "danger", onclick: async () => {
    if (await ask(`Unregister version ${version} of ${name}? Accepted requests are answered first; the archive is kept.`, "Unregister")) act(remove, "DELETE", where());
  } }, "Unregister");
  const none = h("p", { class: "quiet" });
  const scaling = h("p", { class: "quiet small", hidden: true });
  const about = h("p", { class: "quiet small" });
  const measured = h("p", { class: "quiet small", hidden: true });
  const slo = h("p", { class: "small", hidden: true });
  const cache = h("p", { class: "small", hidden: true });
  const passedOver = h("p", { class: "quiet small", hidden: true });
  const why = h("p", { hidden: true }, "Not all of its workers are ready. ", h("a", { href: `#/model/${encodeURIComponent(name)}/errors` }, "Errors and log"), " shows why.");
  const workers = h("details", {}, h("summary", {}, "Workers"), list.node);
  const node = h("section", { class: "card", "aria-label": `Version ${version}` },
    h("div", { class: "row" }, h("h3", {}, `Version ${version}`), state.node, failing.node, isDefault, h("span", { class: "grow" }), settings, makeDefault, remove),
    about, slo, cache, measured, passedOver, scaling, why,
    h("dl", { class: "facts" }, Object.entries(FACTS).map(([key, label]) => h("div", {}, h("dt", {}, label), facts[key]))),
    none, workers);
  return {
    node,
    update(now) {
      latest = now;
      const share = errorsLately(pointsOf(name, version));
      state.update(now.state, share);
      failing.update(name, share, [now]);
      say(about, [now.url, now.handler && `handler ${now.handler}`, now.form && `form ${now.form}`].filter(Boolean).join(" · "));
      show(measured, now.measured);
      show(passedOver, now.formsPassedOver.length);
      say(passedOver, `Forms that are not used: ${now.formsPassedOver.join("; ")}`);
      show(why, now.errors && ["failed", "degraded"].includes(now.state));
      say(measured, now.measured ?? "");
      show(slo, now.slo);
      say(slo, now.slo ? sloText(now.slo) : "");
      show(cache, now.cache);
      say(cache, now.cache ? cacheText(now.cache) : "");
      const devices = [...new Set(now.workers.map(({ device }) => device).filter(Boolean))];
      const texts = { workers: workersText([now]), device: devices.join(", ") || "–", memory: memoryText([now]), batch: number(now.limits.batch_size), waiting: number(now.waiting), requests: number(now.requests), failed: number(now.failed), restarts: number(now.restarts) };
      for (const [key, text] of Object.entries(texts)) say(facts[key], text);
      const refuses = !now.workers.length && now.state !== "asleep";
      makeDefault.disabled = refuses;
      makeDefault.title = refuses ? "It has no workers, so requests without a version would fail: add some in Scaling and limits first" : "";
      show(none, !now.workers.length);
      say(none, now.state === "asleep" ? "Unloaded: the next request loads the model and waits for it." : "No workers: requests are refused until some are added in Scaling and limits.");
      show(scaling, now.lastScaling);
      say(scaling, `Last scaled ${now.lastScaling}`);
      show(workers, now.workers.length);
      keyed(list.body, now.workers, ({ id }) => id, workerRow);
    },
    refine(model, server) {
      show(isDefault, model.default === version);
      show(makeDefault, model.default !== version);
      const only = model.versions.length === 1;
      show(remove, server.modelApi && !model.workflow && (only || model.default !== version));
    },
  };
}

function sloText({ target, attainment, budgetLeft, refused, batchSize }) {
  const kept = attainment === null ? "no request in the last 5 minutes" : `kept for ${percent(attainment, 2)} of the requests of the last 5 minutes`;
  const left = budgetLeft < 0 ? `is used up: ${number(1 - budgetLeft)} times as many misses as it allows` : `has ${percent(budgetLeft, 0)} left`;
  return `Target ${target}: ${kept}; the error budget of the last hour ${left}; ${number(refused)} refused on arrival; batches of up to ${number(batchSize)}`;
}

function cacheText({ entries, size, maxSize, hits, misses, hitRatio }) {
  const share = hitRatio === null ? "no request yet" : `answered ${percent(hitRatio)} of the requests (${number(hits)} hits, ${number(misses)} misses)`;
  return `Reply cache: ${share}; it holds ${number(entries)}, ${bytes(size)} of ${bytes(maxSize)}`;
}

function workerRow() {
  const state = chip();
  const cell = Object.fromEntries(WORKER.map((label) => [label, h("td")]));
  cell.State.append(state.node);
  return {
    node: h("tr", {}, cells(WORKER, Object.values(cell))),
    update(worker) {
      state.update(worker.state);
      say(cell.Worker, worker.id);
      say(cell.Process, worker.pid ?? "–");
      say(cell.Device, worker.device ?? "–");
      say(cell.Memory, worker.memory ? bytes(worker.memory) : "–");
      say(cell.Since, since(worker.started, live.state.server.now));
      say(cell.Restarts, worker.restarts);
    },
  };
}

function defaultDialog(name, version, where) {
  return formDialog({
    title: "Make default",
    about: "The default version answers the requests that name no version, unless the model's traffic is split.",
    submit: "Make default",
    changes: () => differences({ "Default version": find(name)?.default }, { "Default version": version }),
    work: async () => (await call("PUT", where)).status,
  });
}

/** One call for all that is changed; what is not changed is not sent. */
function settingsDrawer(name, now, where) {
  const input = (value, min, max) => h("input", { type: "number", min, max, required: true, value: String(value) });
  const workers = input(now.minWorkers, 0, 1024), most = input(now.maxWorkers, 0, 1024);
  const limits = LIMITS.filter(([key]) => !now.slo || !BY_SLO.includes(key)).map(([key, label, hint, min]) => ({ key, label, hint, input: input(now.limits[key], min) }));
  const texts = (value, top, of) => Object.fromEntries([["Workers", value], ["Most workers", top], ...limits.map(({ label, key, input }) => [label, of(key, input)])]);
  return formDialog({
    title: `Version ${now.version}: scaling and limits`,
    about: `Applies to ${name} at once; no request is lost. The archive is not changed.`,
    drawer: true,
    submit: "Apply",
    body: [field("Workers", workers, `${workersText([now])} ready now; each holds one copy of the model`), field("Most workers", most, "the number of workers follows the load up to this number; it is fixed if both are equal"), ...limits.map(({ label, input, hint }) => field(label, input, hint))],
    changes: () => differences(texts(String(now.minWorkers), String(now.maxWorkers), (key) => String(now.limits[key])), texts(workers.value, most.value, (_, { value }) => value)),
    work: async () => {
      const changed = limits.filter(({ key, input }) => input.value !== String(now.limits[key]));
      const query = Object.fromEntries(changed.map(({ key, input }) => [key, input.value]));
      if (workers.value !== String(now.minWorkers) || most.value !== String(now.maxWorkers)) {
        const top = most.value === String(now.maxWorkers) && now.maxWorkers === now.minWorkers ? workers.value : Math.max(workers.value, most.value);
        Object.assign(query, { min_worker: workers.value, max_worker: top, synchronous: "true" });
      }
      return (await call("PUT", where, { query })).status;
    },
  });
}
