// The list of models with the state of the server, and the dialog that registers one.

import { call, get } from "./api.js";
import { chart, spark } from "./chart.js";
import { formDialog } from "./dialog.js";
import { cells, field, h, keyed, liveTable, newId, say, show } from "./dom.js";
import { emptyPage } from "./empty.js";
import { chip, errorsLately, errorsLink, shareText, memoryText, pointsOfModel, recent, spanOf, stateOf, stateTiles, together, WORST, workersOf, workersText } from "./figures.js";
import { bytes, duration, number } from "./format.js";
import { live } from "./live.js";

const FEW = 10; // models that are seen at a glance
const NAMED = 20; // archives of the store; the field itself offers all
const COLUMNS = ["Model", "State", "Requests/s", "Trend", "Errors", "p99", "Version", "Workers", "Device", "Memory"];
const NUMBERS = [2, 4, 5, 7, 9];
const WORDS = ["Model", "State", "Version", "Device"]; // are sorted from the first to the last
const SHORTENED = ["Version", "Device"]; // their whole text is the cell's title
const SORTS = { // what a column is sorted by, of a row
  Model: ({ now }) => now.name,
  State: ({ now }) => WORST.indexOf(stateOf(now)),
  "Requests/s": ({ rate }) => rate,
  Errors: ({ errors }) => errors ?? -1,
  p99: ({ p99 }) => p99 ?? -1,
  Version: ({ now }) => now.default,
  Workers: ({ now }) => workersOf(now.versions).ready,
  Device: ({ now }) => workersOf(now.versions).devices.join(),
  Memory: ({ now }) => workersOf(now.versions).memory,
};
let sorting = { column: "Requests/s", down: true }; // kept while another view is shown

export function modelsView() {
  const tiles = stateTiles();
  const rate = chart("Requests per second", number, { least: 4 });
  const latency = chart("Latency", duration, { least: 0.004 });
  const charts = h("div", { class: "charts" }, rate.node, latency.node);
  const buttons = Object.fromEntries(Object.keys(SORTS).map((column) => [column, h("button", { class: "sort", onclick: () => sortBy(column) }, column)]));
  const list = liveTable("Models", COLUMNS.map((column) => buttons[column] ?? column), NUMBERS);
  list.node.classList.add("sorts");
  const idle = h("tbody", { id: newId(), hidden: true });
  const toggle = h("button", { class: "sort unfold", "aria-expanded": "false", "aria-controls": idle.id, onclick: () => { open(idle.hidden); update(); } });
  const group = h("tbody", {}, h("tr", {}, h("th", { scope: "rowgroup", colspan: COLUMNS.length }, toggle)));
  list.body.after(group, idle);
  const none = h("p", { class: "quiet", hidden: true }, "No model matches the filter.");
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => update() });
  const search = field("Filter", filter, "by name");
  const add = h("button", { class: "primary", onclick: () => registerDialog() }, "Register a model");
  const about = h("span", { class: "quiet" });
  const empty = emptyPage();
  const models = h("section", { class: "card", "aria-label": "Served models" }, search, list.node, none);
  const node = h("div", {}, h("div", { class: "row" }, h("h1", {}, "Models"), about, h("span", { class: "grow" }), add), tiles.node, charts, models, empty.node);
  let order = new Map(); // the place of each name
  let searched = null;

  function open(wanted) {
    show(idle, wanted);
    toggle.setAttribute("aria-expanded", String(wanted));
  }

  function sortBy(column) {
    sorting = { column, down: sorting.column === column ? !sorting.down : !WORDS.includes(column) };
    order.clear();
    update();
  }

  /** Rows keep their places while one of them is pointed at or has the focus. */
  function sorted(rows) {
    if (!order.size || ![list.body, idle].some((body) => body.matches(":hover, :focus-within"))) {
      const value = SORTS[sorting.column], sign = sorting.down ? -1 : 1;
      rows.sort((one, other) => sign * compare(value(one), value(other)) || compare(one.now.name, other.now.name));
      order = new Map(rows.map(({ now }, place) => [now.name, place]));
    }
    const place = ({ now }) => order.get(now.name) ?? Infinity;
    return rows.sort((one, other) => place(one) - place(other));
  }

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
    const found = sorted(served.map(figuresOf)).filter(({ now }) => now.name.toLowerCase().includes(wanted));
    const busy = found.filter(({ now }) => workersOf(now.versions).workers.length);
    const rest = found.filter((each) => !busy.includes(each));
    if (searched !== wanted) open(Boolean(wanted) || !busy.length); // what is searched for is not hidden
    searched = wanted;
    for (const [column, button] of Object.entries(buttons)) {
      if (column === sorting.column) button.parentNode.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      else button.parentNode.removeAttribute("aria-sort");
    }
    keyed(list.body, busy, ({ now }) => now.name, row);
    keyed(idle, idle.hidden ? [] : rest, ({ now }) => now.name, row);
    show(group, rest.length);
    say(toggle, `${rest.length} without workers`);
    show(search, served.length > FEW || wanted);
    show(list.node, found.length);
    show(none, !found.length);
  }
  return { node, update };
}

function compare(one, other) {
  return typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
}

/** A model with the numbers of its row. */
function figuresOf(now) {
  const points = pointsOfModel(now);
  return { now, points, rate: recent(points, "rate") ?? 0, errors: errorsLately(points), p99: recent(points, "p99") };
}

function row({ now: model }) {
  const state = chip(), line = spark(), failing = errorsLink(), none = h("span");
  const cell = Object.fromEntries(COLUMNS.slice(1).map((label, place) => [label, h("td", { class: NUMBERS.includes(place + 1) ? "number" : SHORTENED.includes(label) ? "shortened" : null })]));
  cell.State.append(state.node);
  cell.Trend.append(line.node);
  cell.Errors.append(failing.node, none);
  const link = h("a", { href: `#/model/${encodeURIComponent(model.name)}`, title: model.name }, model.name);
  return {
    node: h("tr", {}, cells(COLUMNS, [h("th", { scope: "row", class: "name" }, link), ...Object.values(cell)])),
    update({ now, points, rate, errors, p99 }) {
      const more = now.versions.length - 1;
      const texts = {
        "Requests/s": number(rate), p99: duration(p99),
        Version: more ? `${now.default} and ${more} more` : now.default, Workers: workersText(now.versions),
        Device: workersOf(now.versions).devices.join(", ") || "–", Memory: memoryText(now.versions),
      };
      for (const [label, text] of Object.entries(texts)) say(cell[label], text);
      for (const label of SHORTENED) cell[label].title = texts[label];
      state.update(stateOf(now), errors);
      failing.update(now.name, errors, now.versions);
      say(none, errors ? "" : shareText(errors));
      line.update(points, live.newest, (point) => point.rate);
    },
  };
}

function registerDialog() {
  const word = (more = {}) => h("input", { autocomplete: "off", spellcheck: "false", ...more });
  const archives = h("datalist", { id: "archives" });
  const url = word({ required: true, list: "archives" });
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
