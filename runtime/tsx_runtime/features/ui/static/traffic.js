// The traffic tab: which version gets how many requests, and the dialogs that change it.

import { call, path, put, Refused } from "./api.js";
import { differences, formDialog } from "./dialog.js";
import { cells, field, h, keyed, liveTable, say, show } from "./dom.js";
import { chip, shareText } from "./figures.js";
import { number, percent } from "./format.js";
import { recordDialog, recordPanel } from "./record.js";
import { rolloutDialog, rolloutPanel } from "./rollout.js";
import { ruleText, rulesForm } from "./rules.js";
import { mirrorDialog, mirrorText, shadowPanel } from "./shadow.js";
import { splitBar, withShare } from "./split.js";
import { firstLines, note } from "./talk.js";
import { watched } from "./watched.js";

const COLUMNS = ["Version", "State", "Share, %", "Gets now", "Requests", "Errors", "Labels"];

export function trafficTab(name) {
  const where = path("models", name, "traffic");
  let latest = null; // the newest answer
  let wanted = null; // shares that are not sent yet, by version
  const bar = splitBar((shares) => want(shares));
  const list = liveTable("Versions and their shares", COLUMNS, [3, 4, 5]);
  const button = (label, work, more = {}) => h("button", { type: "button", onclick: work, ...more }, label);
  const review = button("Review and apply", () => applyDialog(), { class: "primary" });
  const reset = button("Reset", () => { wanted = null; draw(); });
  const pending = h("div", { class: "row pending", hidden: true }, h("span", { class: "grow" }, "These shares are not applied yet."), reset, review);
  const several = [button("Start rollout", () => rolloutDialog(name, latest).then(poll.now)), button("Mirror traffic", () => mirrorDialog(name, latest).then(poll.now))];
  const record = button("Record", () => recordDialog(name).then(poll.now), { hidden: true });
  const back = button("Undo the last change", () => undo());
  const rules = h("p"), labels = h("p");
  const more = h("div", { class: "halves policy" },
    h("div", {}, h("div", { class: "row" }, h("h2", {}, "Rules and stickiness"), button("Edit rules", () => rulesDialog().then(poll.now), { class: "small" })), rules),
    h("div", {}, h("div", { class: "row" }, h("h2", {}, "Labels"), button("Set a label", () => labelDialog().then(poll.now), { class: "small" })), labels));
  const none = h("p", { class: "quiet", hidden: true });
  const split = h("div", {}, bar.node, pending, list.node);
  const actions = h("div", { class: "row actions" }, several, record, h("span", { class: "grow" }), back);
  const panels = [rolloutPanel(name, () => poll.now()), shadowPanel(name, () => poll.now()), recordPanel(name, () => poll.now(), record)];
  const poll = watched(async () => {
    await load();
    if (latest) await Promise.all(panels.map((panel) => panel.load()));
  }, 2000);

  async function load() {
    try {
      latest = await call("GET", where);
    } catch (error) {
      if (!(error instanceof Refused)) return;
      for (const each of [split, more, actions]) show(each, false);
      show(none, true);
      say(none, error.status === 404 || error.status === 405 ? "This server does not split traffic." : error.message);
      return;
    }
    draw();
  }

  function want(shares) {
    wanted = new Map(versionsOf(latest).map((version, place) => [version, shares[place]]));
    draw();
  }

  function draw() {
    for (const each of [split, more, actions]) show(each, true);
    const versions = versionsOf(latest);
    const current = sharesOf(latest);
    if (wanted && versions.some((version) => !wanted.has(version))) wanted = null; // there is another one meanwhile
    const shares = versions.map((version) => (wanted ?? current).get(version));
    bar.update(versions, shares);
    const edit = (version, share) => want(withShare(shares, versions.indexOf(version), share));
    keyed(list.body, latest.table, ({ version }) => version, (row) => versionRow(row, versions.indexOf(row.version)));
    for (const [version, row] of list.body.kept) row.put(shares[versions.indexOf(version)], (share) => edit(version, share), versions.length > 1);
    const { sticky, rules: own = [], labels: named = {} } = latest.traffic;
    show(pending, wanted && versions.some((version) => Math.abs(wanted.get(version) - current.get(version)) > 1e-9));
    fill(rules, [...(sticky ? [`Each client stays on one version by ${sticky}.`] : []), ...own.map(ruleText)], "None: the shares alone decide.");
    fill(labels, Object.entries(named).map(([label, version]) => `${label} → ${version}`), "None. A label is a name of a version that can be moved.");
    const single = versions.length < 2;
    for (const each of several) each.disabled = single;
    back.disabled = !latest.undoable;
    show(none, single);
    say(none, "Register a second version to split requests between versions, to roll it out or to mirror traffic to it.");
  }

  function applyDialog() {
    const policy = latest;
    const versions = versionsOf(policy);
    const weights = Object.fromEntries([...Object.keys(policy.traffic.weights ?? {}).map((word) => [word, null]), ...versions.map((version) => [version, wanted.get(version) || null])]);
    const text = (shares) => Object.fromEntries(versions.map((version) => [`Version ${version}`, `${number(shares.get(version))} %`]));
    return formDialog({
      title: "Split requests",
      about: "Applies to requests that name no version and that no rule sends elsewhere. A running rollout of this model ends.",
      submit: "Apply",
      changes: () => differences(text(sharesOf(policy)), text(wanted)),
      work: async () => {
        await put("PATCH", where, { weights });
        wanted = null;
        return "The traffic policy was changed.";
      },
    }).then(poll.now);
  }

  function rulesDialog() {
    const { sticky: kept = "", rules: own = [] } = latest.traffic;
    const sticky = h("input", { value: kept, autocomplete: "off", spellcheck: "false", placeholder: "header:X-User" });
    const form = rulesForm(() => form.node.closest("dialog")?.redraw());
    form.put(own);
    const text = (by, list) => ({ ...(by ? { "Keep a client on one version by": by } : {}), ...Object.fromEntries(list.map((rule, place) => [`Rule ${place + 1}`, ruleText(rule)])) });
    return formDialog({
      title: "Rules and stickiness",
      submit: "Apply",
      body: [h("div", { class: "whole" }, form.node), h("div", { class: "whole" }, field("Keep a client on one version by", sticky, "header:NAME, cookie:NAME or field:NAME of a JSON body; empty: each request is assigned at random"))],
      changes: () => differences(text(kept, own), text(sticky.value.trim(), form.take())),
      work: async () => {
        const list = form.take();
        await put("PATCH", where, { sticky: sticky.value.trim() || null, rules: list.length ? list : null }); // weights and labels stay
        return "The traffic policy was changed.";
      },
    });
  }

  function labelDialog() {
    const { labels: named = {} } = latest.traffic;
    const versions = versionsOf(latest);
    const label = h("input", { required: true, autocomplete: "off", spellcheck: "false" });
    const version = h("select", {}, h("option", { value: "" }, "none: remove the label"), versions.map((each) => h("option", { value: each }, each)));
    version.value = versions.at(-1);
    return formDialog({
      title: "Set a label",
      about: `Use a label wherever a version can stand, as in /predictions/${name}/canary.`,
      submit: "Set",
      body: [field("Label", label), field("Version", version)],
      changes: () => differences(named, label.value.trim() ? { ...named, [label.value.trim()]: version.value || null } : named),
      work: async () => {
        const place = path("models", name, "labels", label.value.trim());
        await (version.value ? put("PUT", place, { version: version.value }) : call("DELETE", place));
        return version.value ? `${label.value.trim()} now means version ${version.value}.` : `The label ${label.value.trim()} was removed.`;
      },
    });
  }

  async function undo() {
    const where = path("models", name, "rollback");
    let after;
    try {
      after = await call("POST", where, { query: { dry_run: "true" } });
    } catch (error) {
      return note(firstLines(error.message), true);
    }
    await formDialog({
      title: "Undo the last change",
      about: latest.undoable > 1 ? "The next time, the change before it is undone." : "It is the oldest change that can be undone.",
      submit: "Undo",
      changes: () => differences(textsOf(latest), textsOf(after)),
      work: async () => {
        await call("POST", where);
        wanted = null;
        return "The last change was undone.";
      },
    });
    poll.now();
  }

  return {
    node: h("div", {}, h("section", { class: "card", "aria-label": "Traffic" }, none, split, actions, more), panels.map((panel) => panel.node)),
    wake: poll.start,
    rest: poll.stop,
  };
}

function fill(node, texts, otherwise) {
  const key = JSON.stringify(texts);
  if (node.dataset.key === key) return;
  node.dataset.key = key;
  node.className = texts.length ? "words" : "quiet";
  node.replaceChildren(...(texts.length ? texts.map((text) => h("span", { class: "chip off" }, text)) : [otherwise]));
}

const versionsOf = ({ table }) => table.filter(({ registered }) => registered !== false).map(({ version }) => version);

/** What the policy gives to each version, in percent; who is ready is not asked. */
function sharesOf(answer) {
  const { weights = {}, labels = {} } = answer.traffic;
  const versions = versionsOf(answer);
  const sums = new Map(versions.map((version) => [version, 0]));
  for (const [word, weight] of Object.entries(weights)) {
    const version = sums.has(word) ? word : labels[word];
    if (sums.has(version)) sums.set(version, sums.get(version) + weight);
  }
  const total = [...sums.values()].reduce((sum, each) => sum + each, 0);
  return new Map(versions.map((version) => [version, total ? (100 * sums.get(version)) / total : version === answer.default ? 100 : 0]));
}

/** A policy as texts that can be compared. */
function textsOf(answer) {
  const { sticky, rules = [], labels = {}, shadow } = answer.traffic;
  return {
    "Default version": answer.default,
    ...Object.fromEntries([...sharesOf(answer)].map(([version, share]) => [`Version ${version}`, `${number(share)} %`])),
    ...(sticky ? { Stickiness: sticky } : {}),
    ...Object.fromEntries(rules.map((rule, place) => [`Rule ${place + 1}`, ruleText(rule)])),
    ...Object.fromEntries(Object.entries(labels).map(([label, version]) => [`Label ${label}`, version])),
    ...(shadow ? { Mirror: mirrorText(shadow) } : {}),
  };
}

function versionRow({ version }, place) {
  const state = chip();
  const share = h("input", { type: "number", min: "0", max: "100", step: "any", class: "short", "aria-label": `Share of version ${version}, percent` });
  const cell = Object.fromEntries(COLUMNS.slice(1).map((label, at) => [label, h("td", { class: at > 1 && at < 5 ? "number" : null })]));
  cell.State.append(state.node);
  cell["Share, %"].append(share);
  let edit = () => {};
  share.addEventListener("change", () => share.reportValidity() && edit(Number(share.value)));
  return {
    node: h("tr", {}, cells(COLUMNS, [h("th", { scope: "row" }, h("span", { class: `swatch c${place % 8}` }), version), ...Object.values(cell)])),
    put(value, change, several) {
      edit = change;
      share.disabled = !several || value === undefined;
      if (document.activeElement !== share || share.filled === share.value) share.value = share.filled = value === undefined ? "" : String(Math.round(1e4 * value) / 1e4);
    },
    update(row) {
      state.update(row.registered === false ? "off" : row.ready ? "ready" : "idle");
      say(state.node, row.registered === false ? "not registered" : row.ready ? "ready" : "not ready");
      say(cell["Gets now"], percent(row.share));
      say(cell.Requests, number(row.requests));
      say(cell.Errors, row.errors ? `${shareText(row.errors / Math.max(row.requests, row.errors))} (${number(row.errors)})` : "0 %");
      say(cell.Labels, row.labels?.join(", ") || "–");
    },
  };
}
