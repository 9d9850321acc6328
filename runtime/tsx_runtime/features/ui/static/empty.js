// The page of a server without models: three commands that lead to the first answer.

import { h, show } from "./dom.js";
import { live } from "./live.js";
import { commandLine } from "./talk.js";
import { quoted } from "./snippets.js";

/** `update(shown)`. */
export function emptyPage() {
  const steps = h("ol", { class: "steps" });
  const node = h("section", { class: "card empty", hidden: true }, h("h2", {}, "Serve your first model"),
    h("p", { class: "quiet" }, "No model is registered. Run these in a terminal on the server's machine:"), steps);
  let known;
  return {
    node,
    update(shown) {
      show(node, shown);
      const { store } = live.state.server;
      if (!shown || store === known) return;
      known = store;
      steps.replaceChildren(...firstSteps().map(([title, command]) => h("li", {}, h("span", {}, title), commandLine(command, title))));
    },
  };
}

function firstSteps() {
  const { store } = live.state.server;
  const archive = ["Pack a model", `tsx archive model.pt${store ? ` --output ${quoted(store)}` : ""}`];
  const serve = store ? ["Register it here", `tsx models register model.mar --workers 1${management()}`] : ["Serve it in place of this server", "tsx serve model.mar"];
  return [archive, serve, ["Send a request", `tsx predict model --sample${inference()}`]];
}

/** `tsx` asks this machine at these ports where nothing else is said. */
function option(address, port) {
  const { hostname, port: own, pathname } = new URL(address);
  return ["127.0.0.1", "localhost"].includes(hostname) && own === port && pathname === "/" ? "" : ` --url ${quoted(address.replace(/\/$/, ""))}`;
}

const management = () => option(new URL("../", document.baseURI).href, "8081");
const inference = () => (live.state.server.store ? option(live.state.server.inference, "8080") : "");
