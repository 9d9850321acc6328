// What is known about the answers of a monitored model: quality, groups, contested and worst answers.

import { get, path, put, Refused, send } from "./api.js";
import { answerView } from "./answerview.js";
import { formDialog } from "./dialog.js";
import { field, h, keyed, refill, say, show, table } from "./dom.js";
import { clock, number, percent } from "./format.js";
import { read } from "./playground.js";
import { digits, intervalText, lineChart } from "./plot.js";
import { quoted } from "./snippets.js";
import { advice } from "./talk.js";

const SHOWN_CLASSES = 30;
const SHOWN_VERSIONS = 8; // in a chart, since there are as many colours
const DIFFERENCES = {
  demographic_parity: ["Demographic parity", "selection rate"], equal_opportunity: ["Equal opportunity", "false negatives"],
  equalized_odds: ["Equalized odds", "false positives or negatives"], error: ["Error", "error"],
};

const share = (value) => percent(value);
const percentLabel = (value) => `${digits(100 * value)} %`;
const shareText = (estimate) => (estimate ? intervalText(estimate, share) : "–");
const card = (title, ...content) => h("section", { class: "card single", "aria-label": title }, h("h2", {}, title), ...content);

/** Accuracy or mean error of all versions, with the comparison of two versions on top; classes of the chosen version. */
export function qualityCard(name) {
  const content = h("div");
  const node = card("Quality", content);
  return {
    node,
    draw({ versions, comparisons }, chosen) {
      const known = versions.filter(({ quality }) => quality?.answers);
      refill(content, [known.map(({ version, quality }) => [version, quality]), comparisons, chosen.version], () => (known.length ? [
        ...comparisons.map(({ sentence }) => h("p", { class: "verdict" }, sentence)),
        qualityTable(known), h("div", { class: "plots" }, qualityCharts(known, versions)), classesOf(chosen),
      ] : advice("The truth of no answer is known yet. Report it as soon as it is known; the file has a request_id (header x-request-id of the answer) and the truth in each row:", `tsx feedback truth.csv --model ${quoted(name)}`, "report the truth")));
    },
  };
}

function qualityTable(known) {
  const rows = known.map(({ version, quality }) => [version, number(quality.answers),
    quality.accuracy ? shareText(quality.accuracy) : "–", quality.calibration_error === null ? "–" : percent(quality.calibration_error),
    quality.mean_error ? intervalText(quality.mean_error, digits) : "–", quality.root_mean_square_error === null ? "–" : digits(quality.root_mean_square_error)]);
  const columns = ["Version", "Answers with truth", "Accuracy", "Calibration error", "Mean error", "Root mean square error"];
  const used = columns.map((_, place) => place).filter((place) => rows.some((row) => row[place] !== "–"));
  return table("Quality by version, with 95 % intervals", used.map((place) => columns[place]), rows.map((row) => used.map((place) => row[place])), used.slice(1).map((_, place) => place + 1));
}

function qualityCharts(known, versions) {
  const color = (version) => (versions.length - 1 - versions.findIndex((report) => report.version === version)) % SHOWN_VERSIONS; // stays when another version comes
  const lines = (list, points) => list.slice(0, SHOWN_VERSIONS).map(({ version, quality }) => ({ name: version, color: color(version), points: points(quality) })).filter((line) => line.points.length);
  const time = (quality) => quality.history.map(({ at, value, ...more }) => ({ x: at, y: value, ...more }));
  const calibration = (quality) => quality.calibration.map(({ confidence, accuracy }) => ({ x: confidence, y: accuracy.value, ...accuracy })).filter(({ y }) => y !== null);
  const charts = [
    ["Accuracy over time", lines(known.filter(({ quality }) => quality.accuracy), time), { format: percentLabel }],
    ["Mean error over time", lines(known.filter(({ quality }) => quality.mean_error), time), { format: digits }],
    ["Calibration", lines(known, calibration), { format: percentLabel, across: percentLabel, floor: 0, diagonal: true, note: "accuracy by confidence; dashed: perfect" }],
  ];
  return charts.filter(([, series]) => series.length).map(([title, series, options]) => lineChart(title, series, options));
}

function classesOf({ version, quality }) {
  if (!quality?.classes.length) return null;
  const all = quality.classes.length + quality.hidden_classes;
  const rows = quality.classes.slice(0, SHOWN_CLASSES).map(({ label, precision, recall }) => [label, shareText(precision), number(precision.count), shareText(recall), number(recall.count)]);
  return h("details", { class: "raw", open: quality.classes.length <= 5 }, h("summary", {}, `Precision and recall of version ${version} by class`),
    table(`Classes of version ${version}`, ["Class", "Precision", "Answers", "Recall", "Truths"], rows, [1, 2, 3, 4]),
    rows.length < all && h("p", { class: "quiet" }, `The ${rows.length} most frequent of ${all} classes.`));
}

/** The figures of each group of each attribute, and the differences that a fairness review asks for. */
export function groupsCard(name) {
  const content = h("div");
  return {
    node: card("Groups", content),
    draw({ version, groups, quality }, config) {
      const error = (estimate) => (estimate ? intervalText(estimate, quality?.mean_error ? digits : share) : "–");
      refill(content, [version, groups, config], () => (groups.length
        ? groups.flatMap((attribute) => attributeParts(attribute, error, config.minGroup))
        : advice(config.groups.length ? "No request with these attributes has been examined yet; feedback may name them as well." : "No attribute is declared. Name a field of the request, a header, or a name in the feedback, to compare groups of people (Change), or in a file with groups: [sex] and the other keys of the monitoring:", !config.groups.length && `tsx models monitor ${quoted(name)} --file monitor.yaml`, "compare groups")));
    },
  };
}

function attributeParts({ attribute, positive, groups, hidden, differences }, error, least) {
  const columns = ["Group", "Requests", "Selection rate", "Error", "False positives", "False negatives", "Confidence"];
  const rows = groups.map((group) => [group.group, number(group.count), shareText(group.selection_rate), error(group.error), shareText(group.false_positives), shareText(group.false_negatives), group.confidence === null ? "–" : percent(group.confidence)]);
  const compared = differences.map(({ name, difference, groups: [larger, smaller] }) => {
    const [label, what] = DIFFERENCES[name];
    const chance = typeof difference.low === "number" && difference.low <= 0 ? "; may be chance" : "";
    return [label, name === "error" ? error(difference) : shareText(difference), `${what} of ${larger} above ${smaller}${chance}`];
  });
  return [h("h3", {}, attribute), positive !== null && h("p", { class: "quiet" }, `Favourable class: ${positive}.`),
    table(`Groups by ${attribute}`, columns, rows, [1, 2, 3, 4, 5, 6]),
    compared.length > 0 && table(`Differences between groups by ${attribute}`, ["Difference", "Largest", "Between"], compared, [1]),
    hidden > 0 && h("p", { class: "quiet" }, `${hidden} ${hidden === 1 ? "group is" : "groups are"} not shown: fewer than ${number(least)} requests.`)].filter(Boolean);
}

/** The contested answers, and the worst answers, with their recorded requests. */
export function caseCards(name, where, changed) {
  const contests = caseList("Contested answers"), worst = caseList("Worst answers");
  return {
    node: h("div", {}, contests.node, worst.node),
    async load({ monitoring }, chosen) {
      if (!chosen) return;
      await contests.load(() => get(`${where}/contests`), ({ id }) => id, (contest) => contestRow(name, where, contest, changed),
        () => h("p", { class: "quiet" }, `No answer is contested. Your application contests one for a person with POST /feedback/${name} and {"request_id": ..., "contest": {"reason": ...}}.`));
      await worst.load(async () => (monitoring ? get(`${where}/worst`, { version: chosen.version }) : []), (answer) => `${answer.request_id}/${answer.row}`, (answer) => worstRow(name, where, answer),
        () => h("p", { class: "quiet" }, `No answer of version ${chosen.version} is known to be wrong.`));
    },
  };
}

function caseList(title) {
  const problem = h("p", { class: "problem" }), empty = h("div"), rows = h("div", { class: "errors" });
  return {
    node: card(title, problem, empty, rows),
    async load(read, key, row, hint) {
      let cases = [];
      try {
        cases = await read();
        say(problem, "");
      } catch (error) {
        if (!(error instanceof Refused)) return; // the banner says that the server does not answer
        say(problem, error.message);
      }
      keyed(rows, cases, key, row);
      empty.replaceChildren(...(cases.length || problem.textContent ? [] : [hint()]));
    },
  };
}

function contestRow(name, where, contest, changed) {
  const { request_id: request, version, at, reason } = contest;
  const state = h("span"), prediction = h("p"), response = h("p");
  const input = requestView(name, where, version, request);
  const answer = h("button", { type: "button", onclick: () => answerDialog(where, contest).then(changed) }, "Answer");
  return {
    node: h("details", {}, h("summary", {}, h("time", {}, clock(at)), state, h("span", {}, reason)),
      h("p", { class: "quiet code" }, `request ${request}, version ${version}`), prediction, response, h("div", { class: "row" }, answer, input.buttons), input.node),
    update(now) {
      state.className = `chip ${now.state === "open" ? "busy" : "off"}`;
      say(state, now.state);
      say(prediction, `The model answered ${now.prediction ?? "something that is not known any more"}.`);
      show(response, now.state !== "open");
      say(response, `${now.answered_at ? `${clock(now.answered_at)}: ` : ""}${now.response}${(now.truth ?? null) === null ? "" : ` The right answer is ${now.truth}.`}`);
      show(answer, now.state === "open");
    },
  };
}

function answerDialog(where, { id, reason, prediction }) {
  const state = h("select", {}, h("option", { value: "upheld" }, "upheld: the answer stands"), h("option", { value: "corrected" }, "corrected: the answer was wrong"));
  const response = h("textarea", { rows: "3", required: true }), truth = h("input", { autocomplete: "off" });
  const right = field("Right answer", truth, "counts as the truth of this request");
  const fit = () => { show(right, state.value === "corrected"); truth.required = state.value === "corrected"; };
  state.addEventListener("change", fit);
  fit();
  return formDialog({
    title: "Answer the contest", about: `Reason: ${reason}`, submit: "Answer",
    body: [field("Decision", state), right, h("div", { class: "whole" }, field("Response", response, "for the person who contested the answer"))],
    work: async () => {
      const value = typeof prediction === "number" ? Number(truth.value) : truth.value.trim();
      await put("POST", `${where}/contests/${path(id)}`, { state: state.value, response: response.value.trim(), ...(state.value === "corrected" && { truth: value }) });
      return "The contest is answered.";
    },
  });
}

function worstRow(name, where, { request_id: request, version, at, prediction, truth, confidence, error }) {
  const input = requestView(name, where, version, request);
  const text = `answered ${prediction}${typeof confidence === "number" ? ` (${percent(confidence)} sure)` : ""}, right is ${truth}${typeof prediction === "number" ? `, error ${digits(error)}` : ""}`;
  return { node: h("details", { ontoggle: (event) => event.target.open && input.open() }, h("summary", {}, h("time", {}, clock(at)), h("span", {}, text)),
    h("p", { class: "quiet code" }, `request ${request}, version ${version}`), h("div", { class: "row" }, input.buttons), input.node) };
}

/** Shows the recorded request and its explanation once they are asked for. */
function requestView(name, where, version, id) {
  const node = h("div", { class: "halves", "aria-live": "polite" });
  const problem = h("p", { class: "problem" }), missing = h("div");
  let recorded = null;
  const shown = async (response, title) => {
    const content = await read(response, () => {});
    return h("div", {}, h("h3", {}, title), answerView({ ...content, title, url: URL.createObjectURL(content.body) }, null));
  };
  const attempt = (work) => async () => {
    try {
      await work();
      say(problem, "");
    } catch (error) {
      say(problem, error.message);
    }
  };
  const open = attempt(async () => {
    if (recorded) return;
    const found = (await get(`${where}/requests/${path(id)}`)).recorded;
    if (!found) {
      missing.replaceChildren(...advice("This request was not recorded. To see the next ones, record a share of the requests with their answers:", `tsx models record ${quoted(name)} --share 5% --answers`, "record requests"));
      return;
    }
    recorded = contentOf(found.body, found.headers);
    const answer = found.answer && (await shown(responseOf(contentOf(found.answer, found.answer_headers)), "Answer"));
    node.replaceChildren(await shown(responseOf(recorded), "Request"), ...(answer ? [answer] : []));
    show(explain, true);
  });
  const explain = h("button", { type: "button", hidden: true, onclick: attempt(async () => {
    const response = await send("POST", `ui/api/explain/${path(name, version)}`, { body: recorded.body, headers: { "Content-Type": recorded.type } });
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).message ?? `HTTP ${response.status}`);
    node.append(await shown(response, "Explanation"));
    explain.disabled = true;
  }) }, "Explain");
  const button = h("button", { type: "button", onclick: open }, "Show the request");
  return { node: h("div", {}, problem, missing, node), buttons: [button, explain], open };
}

/** A recorded body, which is base64, with its type. */
function contentOf(body, headers) {
  const type = headers.find(([header]) => header.toLowerCase() === "content-type")?.[1] ?? "";
  return { body: Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0)), type };
}

const responseOf = ({ body, type }) => new Response(body, { headers: { "content-type": type } });
