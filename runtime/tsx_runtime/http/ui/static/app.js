// The page: the current view, its header and its theme.

import { kept, token } from "./api.js";
import { h, say, show } from "./dom.js";
import { jobsView } from "./jobs.js";
import { listen, live, refresh } from "./live.js";
import { modelView, TABS } from "./model.js";
import { modelsView } from "./models.js";
import { askToken } from "./talk.js";

const chosen = kept("localStorage", "tsx-theme");
const main = document.getElementById("main");
let current = null; // {key, view}

/** `#/` is the list, `#/jobs` the asynchronous requests, `#/model/NAME[/TAB[/DETAIL]]` one model. Null for any other. */
export function parse(hash) {
  const [first, kind, name, tab, ...rest] = hash.replace(/^#/, "").split("/");
  if (!first && !kind) return { name: null };
  if (!first && kind === "jobs" && !name) return { name: null, jobs: true };
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
  const name = place?.name ?? null;
  const key = place === null ? `unknown ${location.hash}` : place.jobs ? "jobs" : name === null ? "models" : `model ${name}`;
  const moved = current !== null;
  if (current?.key !== key) {
    current?.view.close?.();
    current = { key, view: place === null ? unknownView() : place.jobs ? jobsView() : name === null ? modelsView() : modelView(name) };
    main.replaceChildren(current.view.node);
    document.title = `${place === null ? "Not found" : place.jobs ? "Jobs" : name ?? "Models"} · tsx`;
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
  say(document.getElementById("version"), state.server.version);
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
