// The last errors of a model, with tracebacks, and its log.

import { get, path } from "./api.js";
import { field, h, keyed, say, show } from "./dom.js";
import { clock } from "./format.js";
import { firstLines } from "./talk.js";
import { watched } from "./watched.js";

export function errorsTab(name) {
  const list = h("div", { class: "errors" });
  const empty = h("p", { class: "quiet", hidden: true }, "No errors so far.");
  const poll = watched(async () => {
    const found = await get(`ui/api/errors/${path(name)}`);
    show(empty, !found.length);
    const keys = keysOf(found);
    keyed(list, found, (error) => keys.get(error), errorRow);
    await log.load();
  }, 2000);
  const log = logPanel(name);
  return {
    node: h("div", {},
      h("section", { class: "card", "aria-label": "Errors" }, h("h2", {}, "Last errors"),
        h("p", { class: "quiet" }, "Handler exceptions and worker exits, newest first."), empty, list),
      log.node),
    wake: poll.start,
    rest: poll.stop,
  };
}

/** What workers print and the server says of them; it follows the newest line as long as one looks at the end. */
function logPanel(name) {
  const lines = h("div", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log" });
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => draw() });
  let found = [];
  const draw = () => {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30;
    const wanted = filter.value.trim().toLowerCase();
    keyed(lines, found.filter(({ text, worker, request_ids: ids = [] }) => `${worker} ${text} ${ids.join(" ")}`.toLowerCase().includes(wanted)), ({ version, number, at }) => `${version} ${number} ${at}`, logRow);
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  };
  return {
    node: h("section", { class: "card", "aria-label": "Log" }, h("h2", {}, "Log"),
      field("Filter", filter, "by text, worker or request id. Shows the last lines that workers printed from Python, and that the server logged about them"), lines),
    async load() {
      found = await get(`ui/api/log/${path(name)}`);
      draw();
    },
  };
}

function logRow({ at, worker, stream, text, request_ids: ids }) {
  const bad = ["error", "critical", "warn", "warning"].includes(stream);
  const hint = ids?.length ? `printed while these requests ran: ${ids.join(", ")}` : null;
  return { node: h("p", { class: bad ? "bad" : null, title: hint }, h("time", {}, clock(at)), h("span", { class: "quiet" }, worker), h("span", {}, text)) };
}

function errorRow(error) {
  const at = h("time"), times = h("span", { class: "chip off" });
  const node = h("details", {},
    h("summary", {}, at, h("span", { class: "quiet" }, `version ${error.version}`), times, h("span", { class: "headline" }, headline(error))),
    h("p", {}, error.message), error.traceback && h("pre", { tabindex: "0" }, error.traceback));
  return {
    node,
    update(now) {
      say(at, clock(now.at));
      at.dateTime = new Date(1000 * now.at).toISOString();
      show(times, now.times > 1);
      say(times, `${now.times} times`);
    },
  };
}

/** An error that comes again after another is an entry of its own. Counted from the oldest: a new one leaves those that are there what they are. */
function keysOf(found) {
  const times = new Map();
  return new Map([...found].reverse().map((error) => {
    const key = `${error.version} ${error.message} ${error.traceback}`;
    const nth = (times.get(key) ?? 0) + 1;
    times.set(key, nth);
    return [error, `${key} ${nth}`];
  }));
}

/** The last line of a traceback says what happened. */
function headline({ message, traceback }) {
  const lines = traceback.trimEnd().split("\n");
  return firstLines((traceback && lines.findLast((line) => line && !line.startsWith(" "))) || message.split("\n")[0], 300);
}
