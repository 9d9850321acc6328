// The traffic tab: weights, stickiness, rules, labels and undo; and the state of a rollout, a shadow and a recording.

import { call, path, put, Refused } from "./api.js";
import { field, h, keyed, say, show } from "./dom.js";
import { number, percent } from "./format.js";
import { recordPanel } from "./record.js";
import { rolloutPanel } from "./rollout.js";
import { rulesForm } from "./rules.js";
import { shadowPanel } from "./shadow.js";
import { act, firstLines, note } from "./talk.js";
import { watched } from "./watched.js";

export function trafficTab(name) {
  const where = path("models", name, "traffic");
  let latest = null; // the newest answer
  let edited = false; // there is something in the form that the server does not know
  let drawn = null; // the rules that the form was filled with
  const body = h("tbody");
  const sticky = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "header:X-User", oninput: () => touch() });
  const apply = h("button", { class: "primary", type: "submit" }, "Apply");
  const back = h("button", { type: "button", onclick: () => change(back, "POST", path("models", name, "rollback"), "The last change was undone.") }, "Undo the last change");
  const clear = h("button", { type: "button", onclick: () => change(clear, "DELETE", where, "All requests go to the default version.") }, "Send all to default");
  const rules = rulesForm(() => touch());
  const form = h("form", { onsubmit: (event) => submit(event) },
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Versions and their shares" },
      h("table", {}, h("thead", {}, h("tr", {}, ["Version", "State", "Labels", "Weight", "Share now", "Requests", "Errors"].map((text) => h("th", { scope: "col" }, text)))), body)),
    field("Keep a client on one version by", sticky, "header:NAME, cookie:NAME or field:NAME of a JSON body; empty: each request is assigned at random"),
    rules.node, h("div", { class: "row" }, apply, back, clear));
  const labels = labelForm(name, () => poll.now());
  const none = h("p", { class: "quiet", hidden: true });
  const rollout = rolloutPanel(name, () => poll.now());
  const shadow = shadowPanel(name, () => poll.now());
  const record = recordPanel(name, () => poll.now());
  const poll = watched(async () => {
    await load();
    if (!latest) return;
    const versions = latest.table.filter((row) => row.registered !== false).map((row) => row.version);
    await Promise.all([rollout.load(versions, latest.default), shadow.load(versions, latest.default), record.load()]);
  }, 2000);

  function touch() {
    edited = true;
    apply.classList.add("wanted");
  }

  /** What the server says next is shown, whatever was in the form. */
  function settled() {
    edited = false;
    drawn = null;
    apply.classList.remove("wanted");
  }

  async function load() {
    try {
      latest = await call("GET", where);
    } catch (error) {
      if (error instanceof Refused) {
        show(form, false);
        show(labels, false);
        show(none, true);
        say(none, error.status === 404 || error.status === 405 ? "This server does not split traffic." : error.message);
      }
      return;
    }
    draw();
  }

  function draw() {
    show(form, true);
    show(labels, true);
    keyed(body, latest.table, ({ version }) => version, (row) => versionRow(row, touch));
    const { weights = {}, sticky: kept = "", rules: own = [] } = latest.traffic;
    const single = latest.table.length < 2;
    if (!edited) {
      for (const [version, { weight }] of body.kept) weight.value = weight.filled = String(weights[version] ?? (!Object.keys(weights).length && version === latest.default ? 1 : 0));
      sticky.value = kept ?? "";
      const text = JSON.stringify(own);
      if (text !== drawn) rules.put(own);
      drawn = text;
    }
    show(none, single);
    say(none, "Register a second version to split requests between versions.");
  }

  async function submit(event) {
    event.preventDefault();
    const rows = [...body.kept];
    const own = rules.take();
    const change = { sticky: sticky.value.trim() || null, rules: own.length ? own : null }; // labels and a shadow stay
    if (rows.some(([, { weight }]) => weight.value !== weight.filled)) // else a rollout goes on that moves them
      change.weights = Object.fromEntries(rows.map(([version, { weight }]) => [version, Number(weight.value) || null]));
    apply.disabled = true;
    try {
      await put("PATCH", where, change);
      settled();
      note("The traffic policy was changed.");
    } catch (error) {
      note(firstLines(error.message), true);
    } finally {
      apply.disabled = false;
      poll.now();
    }
  }

  async function change(button, method, target, done) {
    if (await act(button, method, target, {}, done)) settled();
    poll.now();
  }

  return {
    node: h("div", {}, h("section", { class: "card", "aria-label": "Traffic" }, h("h2", {}, "Shares"), none, form), labels, rollout.node, shadow.node, record.node),
    wake: poll.start,
    rest: poll.stop,
  };
}

function versionRow({ version }, touch) {
  const weight = h("input", { type: "number", min: "0", step: "any", class: "short", "aria-label": `Weight of version ${version}`, oninput: touch });
  const meter = h("span", { class: "fill" });
  const share = h("span", { class: "number" });
  const cells = Object.fromEntries(["state", "labels", "requests", "errors"].map((cell) => [cell, h("td")]));
  const node = h("tr", {}, h("th", { scope: "row" }, version), cells.state, cells.labels, h("td", {}, weight),
    h("td", {}, h("span", { class: "meter" }, h("span", { class: "track", "aria-hidden": "true" }, meter), share)), cells.requests, cells.errors);
  return {
    node,
    weight,
    update(row) {
      meter.style.width = `${100 * row.share}%`;
      say(share, percent(row.share));
      say(cells.state, row.registered === false ? "not registered" : row.ready ? "ready" : "not ready");
      say(cells.labels, row.labels?.join(", ") || "–");
      say(cells.requests, number(row.requests));
      say(cells.errors, number(row.errors));
    },
  };
}

function labelForm(name, changed) {
  const label = h("input", { required: true, autocomplete: "off", spellcheck: "false", class: "short" });
  const version = h("input", { autocomplete: "off", spellcheck: "false", class: "short" });
  const submit = h("button", { type: "submit" }, "Set");
  const send = async (event) => {
    event.preventDefault();
    const where = path("models", name, "labels", label.value.trim());
    submit.disabled = true;
    try {
      const wanted = version.value.trim();
      await (wanted ? put("PUT", where, { version: wanted }) : call("DELETE", where));
      note(wanted ? `${label.value.trim()} now now means version ${wanted}.` : `The label ${label.value.trim()} was removed.`);
    } catch (error) {
      note(firstLines(error.message), true);
    } finally {
      submit.disabled = false;
      changed();
    }
  };
  return h("section", { class: "card", "aria-label": "Labels" }, h("h2", {}, "Labels"),
    h("p", { class: "quiet" }, `A label is a movable name of a version. Use it wherever a version can stand, as in /predictions/${name}/canary. Leave the version empty to remove the label.`),
    h("form", { class: "inline", onsubmit: send }, field("Label", label), field("Version", version), submit));
}
