// The page: the current view, its header and its theme.

import { kept, token } from "./api.js";
import { h, say, show } from "./dom.js";
import { listen, live, refresh } from "./live.js";
import { modelView } from "./model.js";
import { modelsView } from "./models.js";
import { askToken } from "./talk.js";

const chosen = kept("localStorage", "tsx-theme");
const main = document.getElementById("main");
let current = null; // {key, view}

/** `#/` is the list, `#/model/NAME[/TAB]` one model. Any other path shows the list. */
export function parse(hash) {
  const [, kind, name, tab] = hash.replace(/^#/, "").split("/");
  try {
    return kind === "model" && name ? { name: decodeURIComponent(name), tab: tab || "overview" } : { name: null };
  } catch {
    return { name: null }; // no percent-encoding
  }
}

function navigate() {
  if (!live.state) return;
  const { name, tab } = parse(location.hash);
  const key = name === null ? "models" : `model ${name}`;
  const moved = current !== null;
  if (current?.key !== key) {
    current?.view.close?.();
    current = { key, view: name === null ? modelsView() : modelView(name) };
    main.replaceChildren(current.view.node);
    document.title = name === null ? "Models · tsx" : `${name} · tsx`;
    if (moved) main.focus({ preventScroll: false });
  }
  current.view.select?.(tab);
  current.view.update();
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
addEventListener("hashchange", navigate);
for (const each of ["dragover", "drop"]) addEventListener(each, (event) => event.preventDefault()); // a file that misses its field does not replace the page
listen(update);
refresh();
