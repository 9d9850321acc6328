// The monitoring of a model: what is monitored, the drift of each version, and the dialog that turns it on.

import { call, path, put, Refused } from "./api.js";
import { formDialog } from "./dialog.js";
import { cells, field, h, keyed, liveTable, refill, say, show } from "./dom.js";
import { chip, tile } from "./figures.js";
import { clock, number, percent, span } from "./format.js";
import { model as find } from "./live.js";
import { caseCards, groupsCard, qualityCard } from "./outcomes.js";
import { histograms, lineChart } from "./plot.js";
import { quoted } from "./snippets.js";
import { act, advice, ask } from "./talk.js";
import { watched } from "./watched.js";

const PERIOD = 5000; // ms between two reports
const SHOWN_COLUMNS = 20;
const DEFAULTS = { share: 5, windowSamples: 1000, window: 3600, minDrift: 0.1, minGroup: 20, groups: [] };
const VERSIONS = ["Version", "Drift", "Significant PSI", "Samples", "Windows", "Baseline", "Monitored"];
const COLUMNS = ["Field", "Drift", "PSI", "JS distance", "p", "Test", "Missing", "Since"];
const TESTS = { ks: "Kolmogorov-Smirnov", chi2: "chi-square" };
const BASELINES = { archive: "of the archive", "first window": "the first window", none: "none" };

const button = (label, work, more = {}) => h("button", { type: "button", onclick: work, ...more }, label);
const index = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
const minute = (seconds) => clock(seconds).slice(0, -3);
const probability = (value) => (value === null ? "–" : value < 0.0001 ? "< 0.0001" : value.toPrecision(2));

export function monitorTab(name) {
  const where = path("models", name, "monitor");
  const state = chip(), about = h("span", { class: "quiet" }), problem = h("p", { class: "problem", role: "alert" });
  const start = button("Turn on monitoring", () => monitorDialog(name, DEFAULTS, true).then(poll.now), { class: "primary", hidden: true });
  const change = button("Change", () => monitorDialog(name, latest.config).then(poll.now), { hidden: true });
  const stop = button("Turn off", async () => (await ask("Turn off the monitoring? Its windows end; reported truth and contests are kept.", "Turn off"))
    && (await act(stop, "DELETE", where, {}, "The monitoring is off.")) && poll.now(), { hidden: true });
  const tiles = { samples: tile("Samples"), dropped: tile("Not examined"), alarms: tile("Drift alarms"), contests: tile("Open contests") };
  const figures = h("dl", { class: "tiles small", hidden: true }, Object.values(tiles).map(({ node }) => node));
  const versions = liveTable("Monitored versions", VERSIONS, [2, 3, 4]);
  const hint = h("div");
  const picker = h("fieldset", { class: "segments", hidden: true });
  const drift = driftCard(name), quality = qualityCard(name), groups = groupsCard(name), cases = caseCards(name, where, () => poll.now());
  const details = h("div", { hidden: true }, picker, drift.node, quality.node, groups.node, cases.node);
  let latest = null, wanted = null;
  const poll = watched(async () => {
    try {
      latest = await call("GET", where);
    } catch (error) {
      if (!(error instanceof Refused)) return;
      say(problem, error.status === 404 || error.status === 405 ? "This server does not monitor models." : error.message);
      return;
    }
    draw();
    await cases.load(latest, chosen());
  }, PERIOD);

  function draw() {
    const { monitoring: on, versions: reports, dropped } = latest;
    const config = latest.config ?? DEFAULTS;
    state.update(on ? "ready" : "idle");
    say(state.node, on ? "on" : "off");
    say(about, on ? configText(config) : "");
    const problems = [latest.problem, ...reports.map(({ version, problem: text }) => text && `Version ${version}: ${text}`)];
    say(problem, problems.filter(Boolean).join("\n"));
    show(start, !on);
    for (const node of [change, stop]) show(node, on);
    for (const node of [figures, details, versions.node]) show(node, reports.length);
    const losses = Object.entries(dropped).filter(([, count]) => count);
    tiles.samples.update(number(latest.samples));
    tiles.dropped.update(losses.map(([reason, count]) => `${number(count)} ${reason}`).join(", ") || "0");
    tiles.alarms.update(number(reports.reduce((sum, { columns }) => sum + columns.filter(({ alarm }) => alarm).length, 0)));
    tiles.contests.update(number(latest.contests));
    keyed(versions.body, reports, ({ version }) => version, versionRow);
    refill(hint, [on, reports.length > 0], () => hintOf(name, on, reports.length));
    if (!reports.length) return;
    refill(picker, [reports.map(({ version }) => version), wanted], () => pickerOf(reports));
    show(picker, reports.length > 1);
    const report = chosen();
    drift.draw(report, config);
    quality.draw(latest, report);
    groups.draw(report, config);
  }

  const chosen = () => latest.versions.find(({ version }) => version === wanted) ?? latest.versions[0];

  function pickerOf(reports) {
    const shown = chosen().version;
    return [h("legend", {}, "Version shown"), ...reports.map(({ version }) => h("label", {},
      h("input", { type: "radio", name: `monitored-${name}`, checked: version === shown, onchange: () => { wanted = version; draw(); poll.now(); picker.querySelector(":checked")?.focus(); } }), h("span", {}, version)))];
  }

  return {
    node: h("div", {}, h("section", { class: "card", "aria-label": "Monitoring" },
      h("div", { class: "row" }, h("h2", {}, "Monitoring"), state.node, about, h("span", { class: "grow" }), start, change, stop), problem, hint, figures, versions.node), details),
    wake: poll.start,
    rest: poll.stop,
  };
}

function hintOf(name, on, any) {
  if (!on) return advice("Compares a share of the requests and answers with a baseline, and tells when they drift. With reported truth it also shows the quality by version. Turn it on here, or with:", `tsx models monitor ${quoted(name)} --share 5%`, "turn on monitoring");
  return any ? [] : advice("No request has been examined yet. Send some, until the share has picked the first:", `tsx predict ${quoted(name)} --sample`, "send a request");
}

function configText({ share, windowSamples: samples, window, groups }) {
  return [`${number(share)} % of the requests`, `windows of ${number(samples)} samples or ${typeof window === "number" ? span(window) : window}`, groups.length && `groups by ${groups.join(", ")}`].filter(Boolean).join(", ");
}

/** The alarm state of a version in words, with the class of its colour. */
function alarmState({ alarm, columns, windows, baseline }) {
  const count = columns.filter((column) => column.alarm).length;
  if (alarm) return ["", count === 1 ? "alarm: 1 field" : `alarm: ${count} fields`];
  if (!windows) return ["off", "no window yet"];
  return baseline === "none" ? ["off", "no baseline"] : ["good", "no drift"];
}

function versionRow({ version }) {
  const state = h("span");
  const cell = Object.fromEntries(VERSIONS.slice(1).map((label, place) => [label, h("td", { class: [1, 2, 3].includes(place) ? "number" : place > 3 && "long" })]));
  cell.Drift.append(state);
  return {
    node: h("tr", {}, cells(VERSIONS, [h("th", { scope: "row" }, version), ...Object.values(cell)])),
    update(now) {
      const [tone, text] = alarmState(now);
      state.className = `chip ${tone}`;
      say(state, text);
      say(cell["Significant PSI"], index(now.drift));
      say(cell.Samples, number(now.samples));
      say(cell.Windows, now.window_samples ? `${number(now.windows)} and ${number(now.window_samples)} samples` : number(now.windows));
      say(cell.Baseline, `${BASELINES[now.baseline]}${now.baseline_rows ? `, ${number(now.baseline_rows)} rows` : ""}`);
      say(cell.Monitored, now.first ? `${minute(now.first)} to ${minute(now.last)}` : "–");
    },
  };
}

/** The fields that moved first. A row opens the histograms and the history of its field. */
function driftCard(name) {
  const about = h("p", { class: "quiet" }), hint = h("div");
  const list = liveTable("Drift by field", COLUMNS, [2, 3, 4, 6]);
  const more = button("", () => { all = true; draw(...latest); });
  const opened = new Set();
  let all = false, latest = null;
  function draw(report, config) {
    latest = [report, config];
    const rank = ({ alarm, psi }) => (alarm ? 1000 : 0) + (psi ?? -1);
    const columns = [...report.columns].sort((one, other) => rank(other) - rank(one));
    const shown = all ? columns : columns.slice(0, SHOWN_COLUMNS);
    const toggle = (column) => { opened.delete(column) || opened.add(column); draw(...latest); };
    const key = (column, part) => `${report.version}/${column.column}/${part}`;
    const rows = shown.flatMap((column) => [{ key: key(column, "row"), column, make: () => columnRow(column, config, toggle) },
      ...(opened.has(column.column) ? [{ key: key(column, "charts"), column, make: () => columnCharts(report, config) }] : [])]);
    show(list.node, rows.length);
    keyed(list.body, rows, (row) => row.key, (row) => row.make());
    for (const [text, row] of list.body.kept) row.unfold?.(list.body.kept.has(text.replace(/row$/, "charts")));
    say(more, `Show all ${columns.length} fields`);
    show(more, shown.length < columns.length);
    say(about, report.windows ? `Inputs and answers of the last window against the baseline (${BASELINES[report.baseline]}), the fields that moved most first. A field raises an alarm by its test and from a PSI of ${number(config.minDrift)}.` : "");
    refill(hint, [report.windows > 0, report.baseline, report.window_samples, config], () => driftHint(name, report, config));
  }
  return { node: h("section", { class: "card", "aria-label": "Drift" }, h("h2", {}, "Drift"), about, hint, list.node, h("div", { class: "row end" }, more)), draw };
}

function driftHint(name, { version, baseline, windows, window_samples: samples }, config) {
  const archive = (find(name)?.versions.find((each) => each.version === version)?.url ?? "").split("/").at(-1) || `${name}.mar`;
  return [
    ...(windows ? [] : advice(`No window has ended yet: ${number(samples)} of ${number(config.windowSamples)} samples; a window also ends after ${span(config.window)} with at least 50 samples; without a baseline, the first has at least 300. Change the monitoring to a larger share or to smaller windows to see the first one sooner.`)),
    ...(baseline === "archive" ? [] : advice(`The archive has no baseline, so ${baseline === "none" ? "nothing is compared yet" : "the first window stands for it"}. Make one from the training data, and register the archive again:`, `tsx monitor baseline ${quoted(archive)} --input train.csv`, "make a baseline")),
  ];
}

function columnState({ alarm, previous_alarm: unlike, psi }, least) {
  if (alarm) return ["", "alarm"];
  if (unlike) return ["busy", "unlike the version before"];
  if (psi === null) return ["off", "not compared"];
  return psi >= least ? ["off", "not significant"] : ["good", "steady"];
}

function columnRow({ column: name }, config, toggle) {
  const unfold = h("button", { type: "button", class: "sort unfold", onclick: () => toggle(name) }, name);
  const state = h("span");
  const cell = Object.fromEntries(COLUMNS.slice(1).map((label, place) => [label, h("td", { class: [1, 2, 3, 5].includes(place) ? "number" : place && "long" })]));
  cell.Drift.append(state);
  return {
    node: h("tr", {}, cells(COLUMNS, [h("th", { scope: "row", class: "code" }, unfold), ...Object.values(cell)])),
    unfold: (open) => unfold.setAttribute("aria-expanded", String(open)),
    update({ column: now }) {
      const [tone, text] = columnState(now, config.minDrift);
      state.className = `chip ${tone}`;
      say(state, text);
      say(cell.PSI, index(now.psi));
      say(cell["JS distance"], index(now.js));
      say(cell.Test, now.test ? `${TESTS[now.test]} ${number(now.statistic)}` : "");
      say(cell.p, probability(now.p_value));
      const before = now.baseline_missing === null || percent(now.baseline_missing) === percent(now.missing) ? "" : `, baseline ${percent(now.baseline_missing)}`;
      say(cell.Missing, percent(now.missing) + before);
      say(cell.Since, now.alarm_since ? minute(now.alarm_since) : "");
    },
  };
}

function columnCharts(report, config) {
  const charts = h("div", { class: "plots" });
  return {
    node: h("tr", { class: "detail" }, h("td", { colspan: String(COLUMNS.length) }, charts)),
    update({ column: now }) {
      const { histogram, history } = now;
      refill(charts, [histogram, history], () => [
        ...(histogram ? histograms(histogram, [
          { name: "Baseline", color: 7, shares: histogram.baseline }, { name: "Last window", color: 0, shares: histogram.live },
          ...(histogram.previous ? [{ name: "Version before", color: 1, shares: histogram.previous }] : []),
        ].filter(({ shares }) => shares.length)) : []),
        history.length > 0 && lineChart("PSI by window", [{ name: `version ${report.version}`, color: 0, points: history.map(({ at, value }) => ({ x: at, y: value })) }],
          { format: (value) => number(value), floor: 0, limit: { value: config.minDrift, name: `dashed: ${number(config.minDrift)}` } }),
        !histogram && !history.length && h("p", { class: "quiet" }, "No window has ended yet."),
      ]);
    },
  };
}

function monitorDialog(name, config, off = false) {
  const input = (value, more = {}) => h("input", { value: String(value ?? ""), autocomplete: "off", spellcheck: "false", ...more });
  const share = input(config.share, { type: "number", min: "0.001", max: "100", step: "any", required: true });
  const samples = input(config.windowSamples, { type: "number", min: "50", max: "100000", required: true });
  const window = input(`${config.window}s`, { required: true });
  const least = input(config.minDrift, { type: "number", min: "0.001", max: "10", step: "any", required: true });
  const groups = input(config.groups.join(", ")), positive = input(config.positive);
  const wanted = () => ({
    ...config, share: Number(share.value), windowSamples: Number(samples.value), window: window.value.trim(), minDrift: Number(least.value),
    groups: groups.value.split(",").map((text) => text.trim()).filter(Boolean), positive: positive.value.trim() || null,
  });
  return formDialog({
    title: off ? "Turn on monitoring" : "Change the monitoring",
    about: "A process beside the server examines a share of the requests and their answers. It keeps distributions and counts, and bodies only while the model is recorded.",
    submit: off ? "Turn on" : "Apply",
    body: [field("Percent monitored", share), field("Samples of a window", samples), field("Longest window", window, "30m, 1h, 1d; with at least 50 samples"), field("Smallest PSI of an alarm", least),
      field("Groups by", groups, "sex, header:x-country: paths in the request, headers, or names in the feedback"), field("Favourable class", positive, "for the selection rate of groups")],
    changes: () => [
      { name: "Monitored", before: off ? "nothing" : configText(config), after: configText(wanted()) },
      ...(positive.value.trim() ? [{ name: "Favourable class", before: null, after: positive.value.trim() }] : []),
    ],
    work: async () => {
      await put("PUT", path("models", name, "monitor"), wanted());
      return `${share.value} % of the requests are monitored.`;
    },
  });
}
