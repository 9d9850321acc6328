// The list of models, and the form that registers one.

import { get } from "./api.js";
import { chart, spark } from "./chart.js";
import { field, h, keyed, say, show } from "./dom.js";
import { chip, memoryText, pointsOfModel, recent, spanOf, stateOf, tile, together, workersOf, workersText } from "./figures.js";
import { duration, number } from "./format.js";
import { live } from "./live.js";
import { act } from "./talk.js";

const FEW = 10; // models that are seen at a glance
const NAMED = 20; // archives of the store; the field itself offers all

export function modelsView() {
  const tiles = { rate: tile("Requests per second"), failures: tile("Failures per second"), p99: tile("Slowest p99"), waiting: tile("Waiting"), workers: tile("Workers ready") };
  const rate = chart("Requests per second", number);
  const latency = chart("Latency", duration);
  const body = h("tbody");
  const empty = h("p", { class: "quiet", hidden: true });
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => update(parts) });
  const search = field("Filter", filter, "by name");
  const add = h("button", { class: "primary", "aria-expanded": "false", "aria-controls": "register", onclick: () => toggle(!register.node.hidden) }, "Register a model");
  const register = registerForm(() => toggle(true));
  const toggle = (hide) => {
    show(register.node, !hide);
    add.setAttribute("aria-expanded", String(!hide));
    if (hide) add.focus();
    else register.open();
  };
  const list = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Models" },
    h("table", { class: "models" },
      h("thead", {}, h("tr", {}, ["Model", "State", "Default version", "Device", "Workers", "Memory", "Last two minutes", "Requests/s", "p99"].map((text, place) =>
        h("th", { scope: "col", class: [4, 5, 7, 8].includes(place) && "number" }, text)))),
      body));
  const node = h("div", {},
    h("div", { class: "row" }, h("h1", {}, "Models"), h("span", { class: "grow" }), add),
    register.node,
    h("dl", { class: "tiles" }, Object.values(tiles).map((each) => each.node)),
    h("div", { class: "charts" }, rate.node, latency.node),
    h("section", { class: "card" }, search, list, empty));
  const parts = { tiles, rate, latency, body, empty, filter, search, list, add };
  return { node, update: () => update(parts) };
}

function update({ tiles, rate, latency, body, empty, filter, search, list, add }) {
  const { models, server } = live.state;
  const versions = models.flatMap((model) => model.versions);
  const all = together(models.map(pointsOfModel));
  const { workers, ready } = workersOf(versions);
  const span = spanOf([all]);
  tiles.rate.update(number(recent(all, "rate") ?? 0));
  tiles.failures.update(number(recent(all, "failures") ?? 0));
  tiles.p99.update(duration(recent(all, "p99")));
  tiles.waiting.update(number(versions.reduce((sum, { waiting }) => sum + waiting, 0)));
  tiles.workers.update(`${ready} of ${workers.length}`);
  rate.update([
    { name: "answers", color: 0, points: all, value: (point) => point.rate },
    { name: "failures", color: 3, points: all, value: (point) => point.failures },
  ], live.newest, span);
  latency.update([
    { name: "p50", color: 0, points: all, value: (point) => point.p50 },
    { name: "p99", color: 1, points: all, value: (point) => point.p99 },
  ], live.newest, span);
  const wanted = filter.value.trim().toLowerCase();
  const found = models.filter(({ name }) => name.toLowerCase().includes(wanted));
  keyed(body, found, (model) => model.name, row);
  show(search, models.length > FEW || wanted);
  show(list, found.length);
  show(empty, !found.length);
  if (models.length) say(empty, "No model matches the filter.");
  else say(empty, server.modelApi ? "No model is registered. “Register a model” adds one from the model store or from a URL." : "No model is registered.");
  show(add, server.modelApi);
}

function row(model) {
  const state = chip();
  const line = spark("Requests per second");
  const cells = Object.fromEntries(["version", "device", "workers", "memory", "rate", "p99"].map((name) =>
    [name, h("td", { class: ["version", "device"].includes(name) ? null : "number" })]));
  const link = h("a", { href: `#/model/${encodeURIComponent(model.name)}` }, model.name);
  const node = h("tr", {}, h("th", { scope: "row" }, link), h("td", {}, state.node), cells.version, cells.device, cells.workers, cells.memory, h("td", {}, line.node), cells.rate, cells.p99);
  return {
    node,
    update(now) {
      const points = pointsOfModel(now);
      const more = now.versions.length - 1;
      state.update(stateOf(now));
      say(cells.version, more ? `${now.default} and ${more} more` : now.default);
      say(cells.device, workersOf(now.versions).devices.join(", ") || "–");
      say(cells.workers, workersText(now.versions));
      say(cells.memory, memoryText(now.versions));
      say(cells.rate, number(recent(points, "rate") ?? 0));
      say(cells.p99, duration(recent(points, "p99")));
      line.update(points, live.newest, (point) => point.rate);
    },
  };
}

function registerForm(close) {
  const archives = h("datalist", { id: "archives" });
  const url = h("input", { required: true, list: "archives", autocomplete: "off", spellcheck: "false" });
  const name = h("input", { autocomplete: "off", spellcheck: "false" });
  const workers = h("input", { type: "number", min: "0", max: "1024" });
  const batch = h("input", { type: "number", min: "1" });
  const handler = h("input", { autocomplete: "off", spellcheck: "false" });
  const replace = h("input", { type: "checkbox", id: "replace" });
  const submit = h("button", { class: "primary", type: "submit" }, "Register");
  const known = h("p", { class: "quiet" });
  const send = async (event) => {
    event.preventDefault();
    const query = { url: url.value.trim(), model_name: name.value.trim(), initial_workers: workers.value || (replace.checked ? "" : "1"), batch_size: batch.value, handler: handler.value.trim(), replace: replace.checked ? "true" : "", synchronous: "true" };
    const form = event.target;
    if (!(await act(submit, "POST", "models", query))) return;
    form.reset();
    close();
  };
  const node = h("section", { class: "card", id: "register", hidden: true },
    h("h2", {}, "Register a model"),
    h("form", { class: "fields", onsubmit: send },
      field("Archive", url, "a file in the model store, or a URL that the server allows"), archives,
      field("Name", name, "the archive's own if left empty"),
      field("Workers", workers, "1 if left empty; when it replaces a version, as many as that version has"), field("Batch size", batch, "the archive's own if left empty"), field("Handler", handler, "the archive's own if left empty"),
      h("p", { class: "whole" }, replace, h("label", { for: "replace" }, " Replace the served version once this one is loaded; no request is lost")),
      h("div", { class: "row" }, submit, h("button", { type: "button", onclick: close }, "Cancel"))),
    known);
  return {
    node,
    async open() {
      url.focus();
      try {
        const found = await get("ui/api/store");
        archives.replaceChildren(...found.map((value) => h("option", { value })));
        say(known, found.length ? `In the model store: ${found.slice(0, NAMED).join(", ")}${found.length > NAMED ? `, and ${found.length - NAMED} more` : ""}.` : live.state.server.store ? "The model store is empty." : "This server has no model store; start it with --model-store DIRECTORY, or register from a URL.");
      } catch (error) {
        say(known, error.message);
      }
    },
  };
}
