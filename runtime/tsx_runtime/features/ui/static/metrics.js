// The metrics of a model, as Prometheus reads them, and the times of its slowest requests.

import { get, path } from "./api.js";
import { stagesList } from "./figures.js";
import { field, h, keyed, say, show, table } from "./dom.js";
import { duration } from "./format.js";
import { watched } from "./watched.js";

export function metricsTab(name) {
  const list = h("div", { class: "families" });
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => draw() });
  const none = h("p", { class: "quiet", hidden: true }, "No metric matches the filter.");
  const count = h("span", { class: "quiet" });
  let found = [];
  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    const families = new Map();
    for (const metric of found) {
      if (!`${metric.name} ${labelsOf(metric)}`.toLowerCase().includes(wanted)) continue;
      families.set(metric.name, [...(families.get(metric.name) ?? []), metric]);
    }
    say(count, `${families.size}`);
    keyed(list, [...families.values()], ([{ name: each }]) => each, familyRow);
    show(none, found.length && !families.size);
  };
  const poll = watched(async () => {
    found = await get(`ui/api/metrics/${path(name)}`);
    draw();
    await slowest.load();
  }, 2000);
  const slowest = slowestPanel(name);
  return {
    node: h("div", {}, explainPanel(), slowest.node, h("section", { class: "card", "aria-label": "Metrics" }, h("div", { class: "row" }, h("h2", {}, "Metrics"), count),
      field("Filter", filter, "by name or label; GET /metrics on the metrics address returns all of them, with histogram buckets"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Metrics of this model" }, list), none)),
    wake: poll.start,
    rest: poll.stop,
  };
}

const PARTS = ["total", "queue", "batch", "preprocess", "inference", "postprocess", "other"];

/** One request by its id, as `tsx explain` shows it. */
function explainPanel() {
  const id = h("input", { required: true, autocomplete: "off", spellcheck: "false", class: "code", size: "38" });
  const problem = h("p", { class: "problem", role: "alert" });
  const about = h("p", { class: "quiet" });
  const times = stagesList();
  const send = async (event) => {
    event.preventDefault();
    try {
      const timeline = await get(`debug/requests/${path(id.value.trim())}`);
      const batch = timeline.batchSize ? `, ${timeline.batchSize === 1 ? "alone in its batch" : `in a batch of ${timeline.batchSize}`}` : "";
      say(about, `${timeline.modelName} ${timeline.modelVersion}: ${timeline.status}${timeline.error ? ` (${timeline.error})` : ""} after ${millis(timeline.milliseconds.total)}${batch}; it arrived at ${timeline.arrived}`);
      times.update(Object.entries(timeline.milliseconds).map(([part, value]) => ({ name: part, seconds: value / 1000 })));
      say(problem, "");
    } catch (error) {
      say(problem, error.message);
      say(about, "");
      times.update([]);
    }
  };
  return h("section", { class: "card", "aria-label": "Explain a request" }, h("h2", {}, "Explain a request"),
    h("p", { class: "quiet" }, "Shows where the time of a request went. The id is in the header x-request-id of the answer; the server keeps the newest 2000 requests of each version, and the slowest."),
    h("form", { class: "inline", onsubmit: send }, field("Request id", id), h("button", { type: "submit" }, "Explain")),
    problem, about, times.node);
}

function slowestPanel(name) {
  const place = h("div");
  const node = h("section", { class: "card", "aria-label": "Slowest requests", hidden: true }, h("h2", {}, "Slowest requests"),
    h("p", { class: "quiet" }, "From the last 30 to 60 minutes, with the time of each stage."), place);
  let known = "";
  return {
    node,
    async load() {
      const { requests } = await get("debug/slowest", { model: name, count: 10 });
      show(node, requests.length);
      const text = JSON.stringify(requests);
      if (text === known) return;
      known = text;
      const parts = PARTS.filter((part) => requests.some(({ milliseconds }) => part in milliseconds));
      place.replaceChildren(table("Where their time went", ["Request", "Version", "Status", ...parts], requests.map((request) =>
        [h("span", { class: "code" }, request.requestId), request.modelVersion, String(request.status), ...parts.map((part) => millis(request.milliseconds[part]))]), parts.map((_, place) => place + 3)));
    },
  };
}

const millis = (value) => (value === undefined ? "" : duration(value / 1000));

function labelsOf({ labels }) {
  return Object.entries(labels).map(([label, value]) => `${label}=${value}`).join(" ");
}

const shownValue = ({ value }) => (typeof value === "number" ? Number(value.toPrecision(8)).toLocaleString("en", { maximumFractionDigits: 6 }) : value);

/** All samples of one name: its value, or how many there are, and each with its labels once it is opened. */
function familyRow([{ name, help }]) {
  const value = h("span", { class: "number" });
  const rows = h("dl", { class: "series" });
  const node = h("details", {}, h("summary", {}, h("span", { class: "code" }, name), value), h("p", { class: "quiet" }, help), rows);
  return {
    node,
    update(samples) {
      say(value, samples.length === 1 ? shownValue(samples[0]) : `${samples.length} series`);
      keyed(rows, samples, labelsOf, (sample) => {
        const own = h("dd");
        return { node: h("div", {}, h("dt", { class: "code" }, labelsOf(sample) || "no labels"), own), update: (now) => say(own, shownValue(now)) };
      });
    },
  };
}
