// What workers printed and the server logged about them: of one model, or of all.

import { get, path } from "./api.js";
import { field, h, keyed, say, show } from "./dom.js";
import { clock } from "./format.js";
import { live } from "./live.js";
import { watched } from "./watched.js";

export function logsView() {
  const models = h("select", { onchange: () => poll.now() });
  const problem = h("p", { class: "problem", role: "alert" });
  const log = logPanel(() => models.value, field("Model", models));
  const poll = watched(async () => {
    try {
      await log.load();
      say(problem, "");
    } catch (error) {
      say(problem, error.message);
    }
  }, 2000);
  poll.start();
  return {
    node: h("div", { class: "tall" }, h("h1", {}, "Logs"), problem, log.node),
    update() {
      const names = ["", ...live.state.models.map(({ name }) => name)];
      keyed(models, names, (name) => name, (name) => ({ node: h("option", { value: name }, name || "all models") }));
    },
    close: poll.stop,
  };
}

/** The last lines; it follows the newest one as long as one looks at the end. `model()` is a name, or empty for all. */
export function logPanel(model, choice) {
  const lines = h("div", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log" });
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => draw() });
  const none = h("p", { class: "quiet", hidden: true }, "No line matches the filter.");
  let found = [];
  const draw = () => {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30;
    const wanted = filter.value.trim().toLowerCase();
    const shown = found.filter(({ model, text, worker, request_ids: ids = [] }) => `${model} ${worker} ${text} ${ids.join(" ")}`.toLowerCase().includes(wanted));
    keyed(lines, shown, ({ model, version, number, at }) => `${model} ${version} ${number} ${at}`, (line) => logRow(line, choice));
    show(none, found.length && !shown.length);
    show(lines, shown.length || !found.length);
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  };
  return {
    node: h("section", { class: "card", "aria-label": "Log" }, !choice && h("h2", {}, "Log"),
      h("div", { class: "inline" }, choice, field("Filter", filter)),
      h("p", { class: "quiet small" }, "The last 500 lines that workers printed from Python and that the server logged about them. The filter finds text, workers and request ids."), none, lines),
    async load() {
      const name = model();
      const answer = await get(name ? `ui/api/log/${path(name)}` : "ui/api/log");
      if (name !== model()) return; // another model was chosen meanwhile
      found = answer;
      draw();
    },
  };
}

function logRow({ at, model, worker, stream, text, request_ids: ids }, named) {
  const bad = ["error", "critical", "warn", "warning"].includes(stream);
  const hint = ids?.length ? `printed while these requests ran: ${ids.join(", ")}` : null;
  const link = named && h("a", { class: "name", href: `#/model/${encodeURIComponent(model)}/errors`, title: model }, model);
  return { node: h("p", { class: bad ? "bad" : null, title: hint }, h("time", {}, clock(at)), link, h("span", { class: "quiet" }, worker), h("span", {}, text)) };
}
