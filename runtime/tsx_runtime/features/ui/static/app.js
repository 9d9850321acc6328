// The page: the current view, its header and its theme.

import { kept, token } from "./api.js";
import { h, say, show } from "./dom.js";
import { jobsView } from "./jobs.js";
import { listen, live, refresh } from "./live.js";
import { logsView } from "./logs.js";
import { modelView, TABS } from "./model.js";
import { modelsView } from "./models.js";
import { serverView } from "./server.js";
import { reachable } from "./snippets.js";
import { askToken } from "./talk.js";

const chosen = kept("localStorage", "tsx-theme");
const main = document.getElementById("main");
const VIEWS = { "": ["Models", modelsView], jobs: ["Jobs", jobsView], logs: ["Logs", logsView], server: ["Server", serverView] };
let current = null; // {key, view}

/** `#/` and `#/jobs`, `#/logs`, `#/server` are views, `#/model/NAME[/TAB[/DETAIL]]` is one model. Null for any other. */
export function parse(hash) {
  const [first, kind = "", name, tab, ...rest] = hash.replace(/^#/, "").split("/");
  if (!first && !name && Object.hasOwn(VIEWS, kind)) return { view: kind };
  if (first || kind !== "model" || !name || (tab && !(tab in TABS))) return null;
  try {
    return { name: decodeURIComponent(name), tab: tab || Object.keys(TABS)[0], detail: rest.map(decodeURIComponent).join("/") };
  } catch {
    return null; // no percent-encoding
  }
}

function navigate() {
  if (!live.state) return;
  const place = parse(location.hash);
  const name = place?.name;
  const key = place === null ? `unknown ${location.hash}` : name === undefined ? `view ${place.view}` : `model ${name}`;
  const moved = current !== null;
  if (current?.key !== key) {
    current?.view.close?.();
    const [title, make] = place === null ? ["Not found", unknownView] : name === undefined ? VIEWS[place.view] : [name, () => modelView(name)];
    current = { key, view: make() };
    main.replaceChildren(current.view.node);
    document.title = `${title} · tsx`;
    const entry = place && `#/${place.view ?? ""}`; // a model belongs to Models
    for (const link of document.querySelectorAll("#views a")) {
      if (link.hash === entry) link.setAttribute("aria-current", name === undefined ? "page" : "true");
      else link.removeAttribute("aria-current");
    }
    if (moved) main.focus({ preventScroll: false });
  }
  current.view.select?.(place.tab, place.detail);
  current.view.update();
}

function unknownView() {
  const node = h("section", { class: "card lost" }, h("h1", {}, "This page does not exist"),
    h("p", { class: "quiet" }, "There is nothing at ", h("span", { class: "code" }, location.hash), ". The link may be old or mistyped."),
    h("a", { class: "button primary", href: "#/" }, "All models"));
  return { node, update() {} };
}

function update() {
  const { state, connection } = live;
  const words = { connecting: "connecting", live: "live", locked: "locked", lost: "not connected" };
  const status = document.getElementById("connection");
  status.className = `connection ${connection}`;
  say(status, state?.server.stopping && connection === "live" ? "stopping" : words[connection]);
  const banner = document.getElementById("banner");
  show(banner, connection === "lost");
  if (connection === "lost") say(banner, `The server does not answer. This page shows the last known state and keeps trying to reconnect.`);
  if (connection === "locked") askToken(live.error);
  show(document.getElementById("forget"), token.get() !== null && connection !== "locked");
  document.body.classList.toggle("stale", connection === "lost");
  if (!state) {
    if (connection === "lost") main.replaceChildren(h("p", { class: "quiet" }, "Waiting for the server."));
    return;
  }
  const { inference } = state.server;
  if (inference.startsWith("http")) document.getElementById("api").href = `${reachable(inference, location.hostname)}/docs`;
  if (current === null) navigate();
  else current.view.update();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").value = theme;
}

document.getElementById("theme").addEventListener("change", (event) => {
  chosen.set(event.target.value);
  setTheme(event.target.value);
});
document.getElementById("forget").addEventListener("click", () => {
  token.forget();
  location.reload();
});
setTheme(chosen.get() ?? "system");
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would be one of a view
  main.focus();
});
addEventListener("hashchange", navigate);
for (const each of ["dragover", "drop"]) addEventListener(each, (event) => event.preventDefault()); // a file that misses its field does not replace the page
listen(update);
refresh();
