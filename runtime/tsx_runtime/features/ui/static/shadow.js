// The shadow of a model: copies a share of the requests to another version, and shows the comparison.

import { call, path, put, Refused } from "./api.js";
import { differences, formDialog } from "./dialog.js";
import { field, h, keyed, say, show, table } from "./dom.js";
import { chip, tile } from "./figures.js";
import { bytes, clock, duration, number, percent } from "./format.js";
import { act, firstLines, note } from "./talk.js";

const KINDS = { numeric: "by numbers within a tolerance", exact: "exactly", "top-k": "by the most likely labels", plugin: "by a plugin" };
const STATES = { running: "ready", waiting: "loading", off: "idle" };

export function shadowPanel(name, changed) {
  const where = path("models", name, "shadow");
  const results = resultsView(where, changed);
  const stop = h("button", { type: "button", onclick: () => run() }, "Stop mirroring");
  const about = h("p");
  const node = h("section", { class: "card", "aria-label": "Mirrored traffic", hidden: true },
    h("div", { class: "row" }, h("h2", {}, "Mirrored traffic"), h("span", { class: "grow" }), stop), about, results.node);
  async function run() {
    stop.disabled = true;
    try {
      await put("PATCH", path("models", name, "traffic"), { shadow: null });
      note("Mirroring has stopped.");
    } catch (error) {
      note(firstLines(error.message), true);
    } finally {
      stop.disabled = false;
      changed();
    }
  }
  return {
    node,
    async load() {
      let report;
      try {
        report = await call("GET", where);
      } catch (error) {
        if (error instanceof Refused) show(node, false); // a server without shadows
        return;
      }
      const on = report.state !== "off";
      show(node, on || report.requests);
      show(stop, on);
      say(about, on ? `${mirrorText(report.shadow)}. Clients do not get these answers.` : "Off.");
      results.draw(report);
    },
  };
}

export function mirrorText({ to, share, compare }) {
  return `${number(share)} % of the requests also to ${to}, answers compared ${KINDS[compare.kind]}`;
}

/** `traffic`: the answer about the model's traffic. */
export function mirrorDialog(name, { table: rows, default: preset, traffic: { shadow = null } }) {
  const others = rows.filter(({ version, registered }) => registered !== false && version !== preset).map((row) => row.version);
  const version = h("select", {}, others.map((value) => h("option", { value }, value)));
  version.value = others.includes(shadow?.to) ? shadow.to : others.at(-1);
  const share = h("input", { type: "number", min: "0.01", max: "100", step: "any", value: String(shadow?.share ?? 10), required: true });
  const kind = h("select", { onchange: () => more.fit(kind.value) }, Object.entries(KINDS).map(([value, text]) => h("option", { value }, text)));
  const more = comparisonFields();
  kind.value = shadow?.compare.kind ?? "numeric";
  more.put(shadow?.compare ?? {});
  more.fit(kind.value);
  const wanted = () => ({ ...shadow, to: version.value, share: Number(share.value), compare: { kind: kind.value, ...more.take(kind.value) } });
  const texts = (mirror) => (mirror ? { Mirror: mirrorText(mirror), ...Object.fromEntries(OPTIONS.filter(([key]) => mirror.compare[key] !== undefined).map(([key, , label]) => [label, [mirror.compare[key]].flat().join(", ")])) } : {});
  return formDialog({
    title: "Mirror traffic",
    about: "Another version gets copies of requests. Clients do not get its answers; both answers are compared.",
    submit: "Mirror traffic",
    body: [field("Copy to version", version), field("Percent of the requests", share), field("Compare answers", kind), more.nodes],
    changes: () => differences(texts(shadow), texts(wanted())),
    work: async () => {
      await put("PUT", path("models", name, "shadow"), wanted());
      return `${share.value} % of the requests go to version ${version.value} as well.`;
    },
  });
}

/** What can be said of a comparison besides its kind. A field that is empty says nothing. */
const OPTIONS = [
  ["rtol", "numeric", "Relative tolerance", { type: "number", min: "0", step: "any", placeholder: "by precision" }],
  ["atol", "numeric", "Absolute tolerance", { type: "number", min: "0", step: "any", placeholder: "by precision" }],
  ["k", "top-k", "Number of labels", { type: "number", min: "1", max: "1000", placeholder: "1" }],
  ["name", "plugin", "Plugin", {}],
  ["timeout", "plugin", "Timeout, seconds", { type: "number", min: "0.001", max: "60", step: "any", placeholder: "1" }],
  ["ignore", "exact numeric top-k", "Fields to ignore", { placeholder: "id, outputs.*.took" }],
];

function comparisonFields() {
  const parts = OPTIONS.map(([key, kinds, label, more]) => {
    const input = h("input", { class: "short", autocomplete: "off", spellcheck: "false", ...more });
    return { key, kinds: kinds.split(" "), input, node: field(label, input) };
  });
  const read = { ignore: (text) => text.split(",").map((each) => each.trim()).filter(Boolean), name: (text) => text };
  return {
    nodes: parts.map(({ node }) => node),
    fit: (kind) => parts.forEach(({ kinds, node }) => show(node, kinds.includes(kind))),
    take: (kind) => Object.fromEntries(parts.filter(({ kinds, input }) => kinds.includes(kind) && input.value.trim()).map(({ key, input }) => [key, (read[key] ?? Number)(input.value.trim())])),
    put: (compare) => parts.forEach(({ key, input }) => (input.value = [compare[key] ?? ""].flat().join(", "))),
  };
}

function resultsView(where, changed) {
  const state = chip();
  const about = h("span", { class: "quiet" });
  const why = h("p", { class: "problem" });
  const tiles = { copied: tile("Copied"), agreed: tile("Agreed"), disagreed: tile("Disagreed"), rate: tile("Disagreement"), largest: tile("Largest difference"), shed: tile("Not copied") };
  const sides = h("div");
  const shed = h("p", { class: "quiet" });
  const examples = h("div", { class: "errors" });
  const reset = h("button", { type: "button", onclick: async () => (await act(reset, "DELETE", where, {}, "The counters were reset.")) && changed() }, "Reset counters");
  const more = h("h3", {}, "Answers that differ");
  const node = h("div", { hidden: true }, h("div", { class: "row" }, state.node, about, h("span", { class: "grow" }), reset), why,
    h("dl", { class: "tiles small" }, Object.values(tiles).map((each) => each.node)), shed, sides, more, examples);
  let known = "";
  return {
    node,
    draw(report) {
      show(node, report.requests);
      if (!report.requests) return;
      state.update(STATES[report.state] ?? "idle");
      say(state.node, report.state);
      say(about, `version ${report.version}`);
      say(why, report.why ?? report.last_problem ?? "");
      const left = Object.entries(report.requests.shed).filter(([, count]) => count);
      tiles.copied.update(number(report.requests.copied));
      tiles.agreed.update(number(report.agreed));
      tiles.disagreed.update(number(report.disagreed));
      tiles.rate.update(report.disagreement ? percent(report.disagreement.rate, 2) : "–");
      tiles.largest.update(report.largest_difference === undefined ? "–" : report.largest_difference.toPrecision(3));
      tiles.shed.update(number(left.reduce((sum, [, count]) => sum + count, 0)));
      const range = report.disagreement && `The true disagreement lies between ${percent(report.disagreement.low, 2)} and ${percent(report.disagreement.high, 2)} (95 % confidence). `;
      say(shed, `${range ?? ""}${left.length ? `Not copied: ${left.map(([reason, count]) => `${number(count)} ${reason}`).join(", ")}.` : ""}`);
      drawSides(report);
      show(more, report.examples?.length);
      keyed(examples, report.examples ?? [], ({ request_id: id }) => id, exampleRow);
    },
  };

  function drawSides({ latency, errors }) {
    const text = JSON.stringify([latency, errors]);
    if (text === known) return;
    known = text;
    const row = (label, side) => [label, number(errors[side]), ...["p50", "p99"].map((name) => (latency ? duration(latency[side][name] / 1000) : "–"))];
    sides.replaceChildren(table("Both versions, of the requests that were compared", ["Answers", "Errors", "p50", "p99"], [row("what clients got", "primary"), row("shadow", "shadow")], [1, 2, 3]));
  }
}

function exampleRow(example) {
  const answer = (side) => h("div", {}, h("h4", {}, `version ${side.version}: ${side.status}, ${duration(side.ms / 1000)}`), h("pre", { tabindex: "0" }, content(side.body)));
  return {
    node: h("details", {},
      h("summary", {}, h("time", {}, clock(Date.parse(example.at) / 1000)), h("span", { class: "headline" }, example.why)),
      h("p", { class: "quiet code" }, `request ${example.request_id}`), h("pre", { tabindex: "0" }, content(example.body)),
      h("div", { class: "halves" }, answer(example.primary), answer(example.shadow))),
  };
}

function content({ size, text, base64 }) {
  if (text === undefined || text === null) return `${bytes(size)}, in base64: ${base64 ?? ""}`;
  return text.length < size ? `${text}\n… of ${bytes(size)}` : text;
}
