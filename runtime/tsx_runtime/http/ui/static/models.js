// The list of models with the state of the server, and the dialog that registers one.

import { call, get } from "./api.js";
import { chart, spark } from "./chart.js";
import { formDialog } from "./dialog.js";
import { cells, field, h, keyed, liveTable, say, show } from "./dom.js";
import { emptyPage } from "./empty.js";
import { chip, errorShare, shareText, memoryText, pointsOfModel, recent, recentShare, spanOf, stateOf, stateTiles, together, workersOf, workersText } from "./figures.js";
import { bytes, duration, number } from "./format.js";
import { live } from "./live.js";

const FEW = 10; // models that are seen at a glance
const NAMED = 20; // archives of the store; the field itself offers all
const COLUMNS = ["Model", "State", "Requests/s", "Trend", "Errors", "p99", "Version", "Workers", "Device", "Memory"];
const NUMBERS = [2, 4, 5, 7, 9];

export function modelsView() {
  const tiles = stateTiles();
  const rate = chart("Requests per second", number, { least: 4 });
  const latency = chart("Latency", duration, { least: 0.004 });
  const charts = h("div", { class: "charts" }, rate.node, latency.node);
  const list = liveTable("Models", COLUMNS, NUMBERS);
  const none = h("p", { class: "quiet", hidden: true }, "No model matches the filter.");
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => update() });
  const search = field("Filter", filter, "by name");
  const add = h("button", { class: "primary", onclick: () => registerDialog() }, "Register a model");
  const about = h("span", { class: "quiet" });
  const empty = emptyPage(registerDialog);
  const models = h("section", { class: "card", "aria-label": "Served models" }, search, list.node, none);
  const node = h("div", {}, h("div", { class: "row" }, h("h1", {}, "Models"), about, h("span", { class: "grow" }), add), tiles.node, models, charts, empty.node);

  function update() {
    const { models: served, server } = live.state;
    const versions = served.flatMap((model) => model.versions);
    const all = together(served.map(pointsOfModel));
    const span = spanOf([all]);
    const { workers, ready } = workersOf(versions);
    const opening = live.state.opening.map(([archive, step, done, total]) => `${archive}: ${step} ${bytes(done)} of ${bytes(total)}`);
    say(about, [served.length && `${served.length} served`, served.length && `${ready} of ${workers.length} workers ready`, ...opening].filter(Boolean).join(" · "));
    for (const each of [tiles.node, models, charts]) show(each, served.length);
    show(add, server.modelApi);
    empty.update(!served.length);
    if (!served.length) return;
    tiles.update(all, versions);
    rate.update([
      { name: "answers", color: 0, points: all, value: (point) => point.rate },
      { name: "failures", color: 3, points: all, value: (point) => point.failures },
    ], live.newest, span);
    latency.update([
      { name: "p99", color: 1, points: all, value: (point) => point.p99 },
      { name: "p50", color: 0, points: all, value: (point) => point.p50 },
    ], live.newest, span);
    const wanted = filter.value.trim().toLowerCase();
    const found = served.filter(({ name }) => name.toLowerCase().includes(wanted));
    keyed(list.body, found, (model) => model.name, row);
    show(search, served.length > FEW || wanted);
    show(list.node, found.length);
    show(none, !found.length);
  }
  return { node, update };
}

function row(model) {
  const state = chip(), line = spark();
  const cell = Object.fromEntries(COLUMNS.slice(1).map((label, place) => [label, h("td", { class: NUMBERS.includes(place + 1) ? "number" : null })]));
  cell.State.append(state.node);
  cell.Trend.append(line.node);
  const link = h("a", { href: `#/model/${encodeURIComponent(model.name)}` }, model.name);
  return {
    node: h("tr", {}, cells(COLUMNS, [h("th", { scope: "row" }, link), ...Object.values(cell)])),
    update(now) {
      const points = pointsOfModel(now);
      const more = now.versions.length - 1;
      const texts = {
        "Requests/s": number(recent(points, "rate") ?? 0), Errors: shareText(recentShare(points, errorShare)), p99: duration(recent(points, "p99")),
        Version: more ? `${now.default} and ${more} more` : now.default, Workers: workersText(now.versions),
        Device: workersOf(now.versions).devices.join(", ") || "–", Memory: memoryText(now.versions),
      };
      for (const [label, text] of Object.entries(texts)) say(cell[label], text);
      state.update(stateOf(now));
      line.update(points, live.newest, (point) => point.rate);
    },
  };
}

/** `archive`: what is to stand in its first field. */
function registerDialog(archive = "") {
  const word = (more = {}) => h("input", { autocomplete: "off", spellcheck: "false", ...more });
  const archives = h("datalist", { id: "archives" });
  const url = word({ required: true, list: "archives", value: archive });
  const name = word(), handler = word();
  const workers = h("input", { type: "number", min: "0", max: "1024" });
  const batch = h("input", { type: "number", min: "1" });
  const replace = h("input", { type: "checkbox", id: "replace" });
  const known = h("p", { class: "quiet whole" });
  get("ui/api/store").then((found) => {
    archives.replaceChildren(...found.map((value) => h("option", { value })));
    const choose = (value) => h("button", { type: "button", class: "small", onclick: () => { url.value = value; url.focus(); } }, value);
    if (found.length) known.replaceChildren("In the model store: ", ...found.slice(0, NAMED).flatMap((value) => [choose(value), " "]), found.length > NAMED ? `and ${found.length - NAMED} more` : "");
    else say(known, live.state.server.store ? `The model store ${live.state.server.store} is empty.` : "This server has no model store; start it with --model-store DIRECTORY, or register from a URL.");
  }, (error) => say(known, error.message));
  return formDialog({
    title: "Register a model",
    submit: "Register",
    body: [
      h("div", { class: "whole" }, field("Archive", url, "a file in the model store, or a URL that the server allows"), archives), known,
      field("Name", name, "the archive's own if left empty"), field("Workers", workers, "the archive's own, or 1, if left empty; when it replaces a version, as many as that version has"),
      field("Batch size", batch, "the archive's own if left empty"), field("Handler", handler, "the archive's own if left empty"),
      h("p", { class: "whole" }, replace, h("label", { for: "replace" }, " Replace the served version once this one is loaded; no request is lost")),
    ],
    work: async () => {
      const query = { url: url.value.trim(), model_name: name.value.trim(), initial_workers: workers.value || (replace.checked ? "" : "1"), batch_size: batch.value, handler: handler.value.trim(), replace: replace.checked ? "true" : "", synchronous: "true" };
      return (await call("POST", "models", { query })).status;
    },
  });
}
