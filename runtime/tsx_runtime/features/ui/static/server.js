// The server itself: its version, how long it runs, its memory, and its settings.

import { get } from "./api.js";
import { cells, field, h, keyed, liveTable, say, show } from "./dom.js";
import { tile, workersOf } from "./figures.js";
import { bytes, since } from "./format.js";
import { live } from "./live.js";
import { watched } from "./watched.js";

const TILES = { version: "Version", uptime: "Uptime", process: "Memory of the server", workers: "Memory of workers", free: "Free memory" };
const COLUMNS = ["Setting", "Value", "What it is"];

export function serverView() {
  const tiles = Object.fromEntries(Object.entries(TILES).map(([name, label]) => [name, tile(label)]));
  const list = liveTable("Settings", COLUMNS);
  list.node.classList.add("settings");
  const filter = h("input", { type: "search", autocomplete: "off", spellcheck: "false", oninput: () => draw() });
  const all = h("input", { type: "checkbox", id: "defaults", onchange: () => draw() });
  const none = h("p", { class: "quiet", hidden: true });
  const problem = h("p", { class: "problem", role: "alert" });
  let settings = null;
  const draw = () => {
    if (!settings) return;
    const wanted = filter.value.trim().toLowerCase();
    const found = settings.filter(({ name, about, set }) => (set || all.checked || wanted) && `${name} ${about}`.toLowerCase().includes(wanted));
    keyed(list.body, found, ({ name }) => name, row);
    show(list.node, found.length);
    show(none, !found.length);
    say(none, wanted ? "No setting matches the filter." : "Every setting has its default.");
  };
  const poll = watched(async () => {
    try {
      const found = await get("ui/api/server");
      settings = found.settings;
      tiles.process.update(bytes(found.memory));
      tiles.free.update(`${bytes(found.free)} of ${bytes(found.total)}`);
      draw();
      say(problem, "");
    } catch (error) {
      say(problem, error.message);
    }
  }, 5000);
  poll.start();
  return {
    node: h("div", {}, h("h1", {}, "Server"), problem, h("dl", { class: "tiles" }, Object.values(tiles).map(({ node }) => node)),
      h("section", { class: "card", "aria-label": "Settings" }, h("h2", {}, "Settings"),
        h("div", { class: "inline" }, field("Filter", filter), h("p", { class: "option" }, all, h("label", { for: "defaults" }, " Show defaults too"))),
        h("p", { class: "quiet small" }, "As they were read when the server started; secrets are hidden. ", h("span", { class: "code" }, "tsx config show"), " tells where each comes from."), list.node, none)),
    update() {
      const { server, models } = live.state;
      tiles.version.update(server.version);
      tiles.uptime.update(since(server.began, server.now));
      tiles.workers.update(bytes(workersOf(models.flatMap(({ versions }) => versions)).memory));
    },
    close: poll.stop,
  };
}

function row({ name }) {
  const value = h("td", { class: "code value" }), about = h("td", { class: "quiet" });
  return {
    node: h("tr", {}, cells(COLUMNS, [h("th", { scope: "row", class: "code" }, name), value, about])),
    update(now) {
      say(value, valueText(now.value));
      say(about, now.about);
    },
  };
}

function valueText(value) {
  if (value === null) return "not set";
  if (Array.isArray(value) && value.every((item) => typeof item !== "object")) return value.join(", ") || "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
