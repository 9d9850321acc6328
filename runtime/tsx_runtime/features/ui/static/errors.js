// The errors of a model, grouped by exception, with tracebacks, and its log.

import { get, path } from "./api.js";
import { h, keyed, say, show } from "./dom.js";
import { clock, number } from "./format.js";
import { logPanel } from "./logs.js";
import { firstLines } from "./talk.js";
import { watched } from "./watched.js";

const FRAME = /File "([^"]+)", line (\d+)/g; // of Python's own form
const SHORT_FRAME = /^\s*([^\s:"]+\.py):(\d+)\b/gm;

/** What an error is grouped by: the exception and the line that raised it. */
export function exceptionOf({ message, traceback }) {
  const last = traceback.trimEnd().split("\n").findLast((line) => line && !/^\s/.test(line)) ?? "";
  const frame = [...traceback.matchAll(FRAME)].at(-1) ?? [...traceback.matchAll(SHORT_FRAME)].at(-1);
  const title = firstLines(last || message.split("\n")[0], 300);
  return { title, kind: last ? last.split(":")[0] : title, place: frame ? `${frame[1].split("/").at(-1)}:${frame[2]}` : "" };
}

/** The newest first, each with all that belongs to it. */
function grouped(errors) {
  const groups = new Map();
  for (const error of errors) {
    const { title, kind, place } = exceptionOf(error);
    const key = `${kind} ${place}`;
    const group = groups.get(key) ?? { key, title, place, kinds: new Map(), errors: [] };
    groups.set(key, group);
    group.kinds.set(`${error.version} ${error.kind}`, error);
    group.errors.push(error);
  }
  return [...groups.values()].map(({ kinds, ...group }) => {
    const each = [...kinds.values()];
    const times = each.reduce((all, error) => all + error.kind_times, 0);
    return { ...group, at: group.errors[0].at, times, first: Math.min(...each.map((error) => error.kind_first)) };
  });
}

export function errorsTab(name) {
  const list = h("div", { class: "errors" });
  const empty = h("p", { class: "quiet", hidden: true }, "No errors so far.");
  const missing = h("p", { class: "quiet", role: "status", hidden: true });
  let wanted = ""; // the id of a request whose traceback is to be shown
  const poll = watched(async () => {
    const groups = grouped(await get(`ui/api/errors/${path(name)}`));
    show(empty, !groups.length);
    keyed(list, groups, ({ key }) => key, groupRow);
    reveal(groups);
    await log.load();
  }, 2000);
  const log = logPanel(() => name);
  function reveal(groups) {
    const group = groups.find(({ errors }) => errors.some(({ request_ids: ids }) => ids.includes(wanted)));
    show(missing, wanted && !group);
    if (!wanted) return;
    say(missing, `The server has no traceback of request ${wanted}: its worker reports errors each half second, and the server keeps the newest 50 of each version.`);
    if (!group) return;
    const row = list.kept.get(group.key);
    row.open(wanted);
    wanted = "";
  }
  return {
    node: h("div", {},
      h("section", { class: "card", "aria-label": "Errors" }, h("h2", {}, "Errors"),
        h("p", { class: "quiet" }, "Handler exceptions and worker exits, grouped by exception and line; the newest first."), empty, missing, list),
      log.node),
    wake: poll.start,
    rest: poll.stop,
    open(detail) {
      wanted = detail;
      if (wanted) poll.now();
    },
  };
}

/** One exception: the traceback of its newest error, or of the one that is chosen from the others that are kept. */
function groupRow() {
  const times = h("span", { class: "count" }), title = h("span", { class: "headline" }), where = h("span", { class: "quiet code" }), when = h("span", { class: "quiet small" });
  const about = h("p", { class: "quiet small" }), others = h("select", { "aria-label": "Error of this kind", onchange: () => draw() });
  const message = h("p"), trace = h("pre", { tabindex: "0" }), asked = h("p", { class: "quiet code" });
  const node = h("details", {}, h("summary", {}, times, title, where, when), h("div", { class: "error" }, about, others, message, trace, asked));
  let errors = [];
  let marked = ""; // the request that is asked for
  const keyOf = ({ version, message: text, traceback }) => `${version} ${traceback || text}`;
  function draw() {
    const error = errors.find((each) => keyOf(each) === others.value) ?? errors[0];
    const ids = error.request_ids;
    say(message, error.message);
    show(trace, error.traceback);
    say(trace, error.traceback);
    say(asked, ids.includes(marked) ? `request ${marked}` : ids.length ? `last request ${ids.at(-1)}` : "");
  }
  return {
    node,
    update(group) {
      const isNewest = !errors.length || others.selectedIndex === 0;
      const before = others.value;
      errors = group.errors;
      say(times, `${number(group.times)} ×`);
      say(title, group.title);
      say(where, group.place);
      say(when, `last ${clock(group.at)}`);
      say(about, `${group.times === 1 ? clock(group.at) : `${number(group.times)} times from ${clock(group.first)} to ${clock(group.at)}`} · version ${[...new Set(errors.map(({ version }) => version))].join(", ")}`);
      const texts = errors.map((error) => `${clock(error.at)} · ${error.times} × ${exceptionOf(error).title}`);
      if (others.texts !== texts.join("\n") && document.activeElement !== others) {
        others.texts = texts.join("\n");
        others.replaceChildren(...errors.map((error, place) => h("option", { value: keyOf(error) }, texts[place])));
        if (!isNewest || marked) others.value = before;
        if (others.selectedIndex < 0) others.selectedIndex = 0;
      }
      show(others, errors.length > 1);
      draw();
    },
    open(request) {
      marked = request;
      others.value = keyOf(errors.find(({ request_ids: ids }) => ids.includes(request)));
      draw();
      node.open = true;
      node.scrollIntoView({ block: "nearest" });
      node.querySelector("summary").focus();
    },
  };
}
