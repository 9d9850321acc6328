// The rollout of a model: its progress, decisions and numbers, and the forms that start and end one.

import { call, path, put, Refused } from "./api.js";
import { field, h, say, show, table } from "./dom.js";
import { chip } from "./figures.js";
import { clock, duration, number, percent, span } from "./format.js";
import { act, ask, firstLines, note } from "./talk.js";

const NONE = "RolloutNotFoundException"; // of a model that has none; what a server without rollouts says is another error
const STATES = { running: "loading", finished: "ready", "went back": "failed", stopped: "idle" };

export function rolloutPanel(name, changed) {
  const where = path("models", name, "rollout");
  const state = chip();
  const status = h("span", { class: "quiet" });
  const reason = h("p");
  const meter = h("span", { class: "fill" });
  const share = h("span", { class: "number" });
  const counts = h("div"), log = h("div");
  const end = (button, back, question, yes) => async () => (await ask(question, yes)) && (await act(button, "DELETE", where, { back }, "Done.")) && changed();
  const back = h("button", { type: "button", class: "danger" }, "Roll back");
  const stop = h("button", { type: "button" }, "Stop here");
  back.addEventListener("click", end(back, "true", "Send all requests to the old version again, as before the rollout?", "Roll back"));
  stop.addEventListener("click", end(stop, "false", "End the rollout and keep the current shares?", "Stop here"));
  const buttons = h("div", { class: "row" }, back, stop);
  const shown = h("div", { hidden: true },
    h("div", { class: "row" }, state.node, status),
    h("div", { class: "meter wide" }, h("span", { class: "track", "aria-hidden": "true" }, meter), share),
    reason, counts, buttons, h("details", { class: "raw" }, h("summary", {}, "Decisions"), log));
  const start = startForm(where, changed);
  const node = h("section", { class: "card", "aria-label": "Rollout", hidden: true }, h("h2", {}, "Rollout"), shown, start.node);
  let known = "";

  function draw(rollout) {
    const { plan, new_counts: fresh, old_counts: old } = rollout;
    const running = rollout.status === "running";
    state.update(STATES[rollout.status] ?? "idle");
    say(state.node, rollout.status);
    say(status, `version ${rollout.old} to ${plan.version}, step ${rollout.step} of ${plan.steps.length}${running ? `, ${span(rollout.seconds)} of ${span(plan.bake)}` : ""}`);
    meter.style.width = `${rollout.share}%`;
    say(share, percent(rollout.share / 100, 0));
    say(reason, rollout.reason);
    show(buttons, running);
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
    async load(versions, preset) {
      let rollout = null;
      try {
        rollout = await call("GET", where);
      } catch (error) {
        if (!(error instanceof Refused)) return;
        show(node, error.type === NONE && versions.length > 1);
      }
      if (rollout) {
        show(node, true);
        draw(rollout);
      }
      show(shown, rollout);
      show(start.node, rollout?.status !== "running" && versions.length > 1);
      start.update(versions, preset);
    },
  };
}

const millis = (value) => (value === null || value === undefined ? "–" : duration(value / 1000));

function logTable(log) {
  const columns = [...new Set(log.flatMap((line) => Object.keys(line)))].filter((column) => log.some((line) => typeof line[column] !== "object"));
  const rows = log.slice(-100).reverse().map((line) => columns.map((column) => {
    const value = line[column];
    if (typeof value === "number") return value > 1e9 ? clock(value) : number(value);
    return value === undefined || value === null ? "" : String(value);
  }));
  return table("Decisions, the newest first", columns.map((column) => column.replaceAll("_", " ")), rows);
}

function startForm(where, changed) {
  const version = h("select");
  const steps = h("input", { value: "1, 5, 25, 100", autocomplete: "off", required: true, pattern: "[0-9., ]+" });
  const bake = h("input", { type: "number", min: "0.01", step: "any", value: "10", required: true });
  const errors = h("input", { type: "number", min: "0", max: "99", step: "any" });
  const slower = h("input", { type: "number", min: "1", step: "any" });
  const slowest = h("input", { type: "number", min: "0.001", step: "any" });
  const least = h("input", { type: "number", min: "1", value: "100", required: true });
  const submit = h("button", { type: "submit" }, "Start rollout");
  const send = async (event) => {
    event.preventDefault();
    const plan = { version: version.value, steps: steps.value.split(",").map(Number), bake: 60 * Number(bake.value), min_requests: Number(least.value) };
    if (errors.value !== "") plan.max_error_rate = Number(errors.value) / 100;
    if (slower.value !== "") plan.max_p99_ratio = Number(slower.value);
    if (slowest.value !== "") plan.max_p99_ms = Number(slowest.value);
    submit.disabled = true;
    try {
      await put("POST", where, plan);
      note(`The rollout of version ${plan.version} has started.`);
    } catch (error) {
      note(firstLines(error.message), true);
    } finally {
      submit.disabled = false;
      changed();
    }
  };
  let known = "";
  return {
    node: h("form", { class: "fields", onsubmit: send, hidden: true },
      field("To version", version), field("Steps, percent", steps), field("Minutes per step", bake),
      field("Maximum error rate, percent", errors, "empty: the error rate of the old version"), field("Maximum p99, times the old version's", slower, "empty: no limit"), field("Maximum p99, milliseconds", slowest, "empty: no limit"),
      field("Minimum requests per step", least), h("div", { class: "row" }, submit)),
    update(versions, preset) {
      const current = JSON.stringify([versions, preset]);
      if (current === known) return;
      known = current;
      const before = version.value;
      const others = versions.filter((each) => each !== preset);
      version.replaceChildren(...others.map((value) => h("option", { value }, value)));
      if (others.includes(before)) version.value = before;
    },
  };
}
