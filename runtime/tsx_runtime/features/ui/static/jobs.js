// Asynchronous requests: how many wait, and each job with its state, its answer, and what can be done to it.

import { get, path, send } from "./api.js";
import { answerView } from "./answerview.js";
import { cells, field, h, keyed, liveTable, say, show } from "./dom.js";
import { chip, tile } from "./figures.js";
import { clock, duration, number, span } from "./format.js";
import { live } from "./live.js";
import { read } from "./playground.js";
import { act, note } from "./talk.js";
import { watched } from "./watched.js";

const STATES = ["queued", "running", "done", "cancelled", "expired"];
const COLUMNS = ["Job", "Model", "State", "Accepted", "Waited", "Ran", "Answer", ""];
const NUMBERS = [4, 5];
const PAGE = 50, MOST = 500; // jobs

export function jobsView() {
  const tiles = Object.fromEntries([...STATES, "oldest"].map((name) => [name, tile(name === "oldest" ? "Oldest waits" : name)]));
  const list = liveTable("Jobs", COLUMNS, NUMBERS);
  const none = h("p", { class: "quiet", hidden: true }, "No job matches. A prediction becomes a job with the header ", h("span", { class: "code" }, "Prefer: respond-async"), ".");
  const models = h("select", { onchange: () => poll.now() }, h("option", { value: "" }, "all models"));
  const states = h("select", { onchange: () => poll.now() }, h("option", { value: "" }, "all states"), [...STATES, "failed"].map((value) => h("option", { value }, value)));
  const more = h("button", { hidden: true, onclick: () => { limit = Math.min(MOST, limit + PAGE); poll.now(); } }, "Show older jobs");
  const problem = h("p", { class: "problem", role: "alert" });
  const answer = h("div", { "aria-live": "polite" });
  let limit = PAGE;
  const poll = watched(async () => {
    try {
      const found = await get("jobs", { limit, model: models.value, state: states.value });
      for (const state of STATES) tiles[state].update(number(found.counts[state] ?? 0));
      tiles.oldest.update(found.oldest === undefined ? "–" : span(found.oldest));
      keyed(list.body, found.jobs, ({ id }) => id, (job) => row(job, poll, answer));
      show(none, !found.jobs.length);
      show(more, found.next && limit < MOST);
      say(problem, "");
    } catch (error) {
      say(problem, error.message);
    }
  }, 2000);
  poll.start();
  return {
    node: h("div", {}, h("h1", {}, "Jobs"), h("dl", { class: "tiles" }, Object.values(tiles).map((each) => each.node)),
      h("section", { class: "card", "aria-label": "Jobs" }, h("div", { class: "inline" }, field("Model", models), field("State", states)), problem, list.node, none, h("div", { class: "row end" }, more)), answer),
    update() {
      const names = live.state.models.map(({ name }) => name);
      for (const value of names.filter((name) => ![...models.options].some((option) => option.value === name))) models.append(h("option", { value }, value));
    },
    close: poll.stop,
  };
}

function row(job, poll, answer) {
  const state = chip(), version = h("span", { class: "quiet" }), accepted = h("td"), waited = h("td", { class: "number" }), ran = h("td", { class: "number" }), status = h("td");
  const done = async (work) => (await work) && poll.now();
  const cancel = h("button", { class: "small", onclick: () => done(act(cancel, "DELETE", path("jobs", job.id), {}, "The job is cancelled.")) }, "Cancel");
  const retry = h("button", { class: "small", onclick: () => done(act(retry, "POST", path("jobs", job.id, "retry"), {}, "The job is queued again.")) }, "Retry");
  const open = h("button", { class: "small", onclick: () => showAnswer(job.id, answer) }, "Show answer");
  return {
    node: h("tr", {}, cells(COLUMNS, [h("th", { scope: "row", class: "code" }, job.id), h("td", { class: "shortened", title: job.model }, job.model, " ", version), h("td", {}, state.node), accepted, waited, ran, status, h("td", {}, h("div", { class: "row" }, cancel, retry, open))])),
    update(now) {
      state.update(now.status >= 400 ? "failed" : now.state);
      say(version, now.version ?? "");
      say(accepted, clock(now.created));
      say(waited, span((now.started ?? now.finished ?? live.state.server.now) - now.created));
      say(ran, now.started === undefined ? "–" : duration((now.finished ?? live.state.server.now) - now.started));
      say(status, [now.status, now.attempts > 1 && `${now.attempts} attempts`, now.callback && `callback ${now.callback}`].filter(Boolean).join(", "));
      show(cancel, ["queued", "running"].includes(now.state));
      show(retry, ["done", "cancelled"].includes(now.state));
      show(open, now.state === "done");
    },
  };
}

async function showAnswer(id, place) {
  let found;
  try {
    found = await read(await send("GET", path("jobs", id)), () => {});
  } catch (error) {
    return note(error.message, true);
  }
  place.replaceChildren(h("section", { class: "card answer", "aria-label": "Answer" }, h("h2", {}, "Answer"), h("p", { class: "status" }, `job ${id}`), answerView({ ...found, url: URL.createObjectURL(found.body) }, null)));
  place.scrollIntoView({ block: "nearest" });
}
