// The rollout of a model: its progress, decisions and numbers, and the dialogs that start and end one.

import { call, path, put, Refused } from "./api.js";
import { formDialog } from "./dialog.js";
import { field, h, refill, say, show, table } from "./dom.js";
import { chip } from "./figures.js";
import { clock, duration, number, percent, span } from "./format.js";
import { digits, intervalText } from "./plot.js";
import { act, ask } from "./talk.js";

const STATES = { running: "loading", finished: "ready", "went back": "failed", stopped: "idle" };

export function rolloutPanel(name, changed) {
  const where = path("models", name, "rollout");
  const state = chip();
  const status = h("span", { class: "quiet" });
  const reason = h("p");
  const steps = h("ol", { class: "stepper", "aria-label": "Steps" });
  const guards = h("p", { class: "quiet" });
  const counts = h("div"), quality = h("div"), log = h("div");
  const end = (button, back, question, yes) => async () => (await ask(question, yes)) && (await act(button, "DELETE", where, { back }, "Done.")) && changed();
  const back = h("button", { type: "button", class: "danger" }, "Roll back");
  const stop = h("button", { type: "button" }, "Stop here");
  back.addEventListener("click", end(back, "true", "Send all requests to the old version again, as before the rollout?", "Roll back"));
  stop.addEventListener("click", end(stop, "false", "End the rollout and keep the current shares?", "Stop here"));
  const buttons = h("div", { class: "row" }, back, stop);
  const node = h("section", { class: "card", "aria-label": "Rollout", hidden: true },
    h("div", { class: "row" }, h("h2", {}, "Rollout"), state.node, status, h("span", { class: "grow" }), buttons),
    steps, reason, guards, counts, quality, h("details", { class: "raw" }, h("summary", {}, "Decisions"), log));
  let known = "";

  function draw(rollout) {
    const { plan, new_counts: fresh, old_counts: old } = rollout;
    const running = rollout.status === "running";
    state.update(STATES[rollout.status] ?? "idle");
    say(state.node, rollout.status);
    say(status, `version ${rollout.old} to ${plan.version}, step ${rollout.step} of ${plan.steps.length}${running ? `, ${span(rollout.seconds)} of ${span(plan.bake)}` : ""}`);
    steps.replaceChildren(...plan.steps.map((each, place) => h("li", { class: place + 1 < rollout.step || rollout.status === "finished" ? "done" : place + 1 === rollout.step ? "now" : "", "aria-current": place + 1 === rollout.step && running ? "step" : null }, `${number(each)} %`)));
    say(reason, rollout.reason);
    show(buttons, running);
    show(guards, plan.guards?.length);
    say(guards, `Guards: ${plan.guards?.join(", ")}.`);
    refill(quality, [plan.metric, rollout.metric], () => metricTable(plan, rollout));
    const current = JSON.stringify([fresh, old, rollout.log.length]);
    if (current === known) return;
    known = current;
    counts.replaceChildren(table("Both versions at this step", ["Version", "Requests", "Errors", "Error rate", "p50", "p99"],
      [[plan.version, fresh], [rollout.old, old]].map(([version, each]) =>
        [version, number(each.requests), number(each.errors), percent(each.error_rate, 2), millis(each.p50_ms), millis(each.p99_ms)]), [1, 2, 3, 4, 5]));
    log.replaceChildren(logTable(rollout.log));
  }

  return {
    node,
    async load() {
      try {
        draw(await call("GET", where));
        show(node, true);
      } catch (error) {
        if (error instanceof Refused) show(node, false); // there was none
      }
    },
  };
}

const millis = (value) => (value === null || value === undefined ? "–" : duration(value / 1000));

/** The metric of the plan in both versions, by the truth that is known since the rollout began. */
function metricTable({ metric, version }, { metric: known, old }) {
  if (!metric) return [];
  const name = metric.replace("_", " ");
  if (!known) return h("p", { class: "quiet" }, `It also decides on the ${name}, as soon as the truth of answers of both versions is reported.`);
  const format = metric === "accuracy" ? (value) => percent(value) : digits;
  const rows = [[version, known.new], [old, known.old], ["difference", known.difference]].map(([label, value]) => [label, number(value.answers), intervalText(value, format)]);
  return table(`The ${name} since the rollout began`, ["Version", "Answers with truth", `${name}, 95 % interval`], rows, [1, 2]);
}

function logTable(log) {
  const columns = [...new Set(log.flatMap((line) => Object.keys(line)))].filter((column) => log.some((line) => typeof line[column] !== "object"));
  const rows = log.slice(-100).reverse().map((line) => columns.map((column) => {
    const value = line[column];
    if (typeof value === "number") return value > 1e9 ? clock(value) : number(value);
    return value === undefined || value === null ? "" : String(value);
  }));
  return table("Decisions, the newest first", columns.map((column) => column.replaceAll("_", " ")), rows);
}

/** `traffic`: the answer about the model's traffic. */
export function rolloutDialog(name, { table: rows, default: preset }) {
  const others = rows.filter(({ version, registered }) => registered !== false && version !== preset);
  const version = h("select", {}, others.map((row) => h("option", { value: row.version }, row.version)));
  version.value = others.at(-1).version;
  const steps = h("input", { value: "1, 5, 25, 100", autocomplete: "off", required: true, pattern: "[0-9., ]+" });
  const bake = h("input", { type: "number", min: "0.01", step: "any", value: "10", required: true });
  const errors = h("input", { type: "number", min: "0", max: "99", step: "any" });
  const slower = h("input", { type: "number", min: "1", step: "any" });
  const slowest = h("input", { type: "number", min: "0.001", step: "any" });
  const least = h("input", { type: "number", min: "1", value: "100", required: true });
  const share = (wanted) => `${number(100 * (rows.find((row) => row.version === wanted)?.share ?? 0))} %`;
  const bounds = () => [
    errors.value === "" ? "errors as the old version's" : `errors ${errors.value} %`,
    slower.value && `p99 ${slower.value} times the old version's`,
    slowest.value && `p99 ${slowest.value} ms`,
  ].filter(Boolean);
  return formDialog({
    title: "Start rollout",
    about: "Moves requests to another version step by step, and back to the old one as soon as a bound is exceeded.",
    submit: "Start rollout",
    body: [field("To version", version), field("Steps, percent", steps), field("Minutes per step", bake), field("Minimum requests per step", least),
      field("Maximum error rate, percent", errors, "empty: the error rate of the old version"), field("Maximum p99, times the old version's", slower, "empty: no limit"), field("Maximum p99, milliseconds", slowest, "empty: no limit")],
    changes: () => {
      const wanted = steps.value.split(",").map((each) => each.trim()).filter(Boolean);
      return [
        { name: `Version ${version.value}`, before: share(version.value), after: wanted.map((each) => `${each} %`).join(", then ") },
        { name: `Version ${preset}`, before: share(preset), after: wanted.map((each) => `${number(100 - Number(each))} %`).join(", then ") },
        { name: "Each step", before: null, after: `${bake.value} min and ${least.value} requests at least` },
        { name: "Bounds", before: null, after: bounds().join(", ") },
      ];
    },
    work: async () => {
      const plan = { version: version.value, steps: steps.value.split(",").map(Number), bake: 60 * Number(bake.value), min_requests: Number(least.value) };
      if (errors.value !== "") plan.max_error_rate = Number(errors.value) / 100;
      if (slower.value !== "") plan.max_p99_ratio = Number(slower.value);
      if (slowest.value !== "") plan.max_p99_ms = Number(slowest.value);
      await put("POST", path("models", name, "rollout"), plan);
      return `The rollout of version ${plan.version} has started.`;
    },
  });
}
