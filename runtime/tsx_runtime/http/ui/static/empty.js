// The page of a server without models: three commands that lead to the first answer, and a place to drop an archive.

import { get } from "./api.js";
import { h, newId, say, show, takesFiles } from "./dom.js";
import { live } from "./live.js";
import { commandLine } from "./talk.js";
import { quoted } from "./snippets.js";

/** `register(archive)` opens the dialog that registers one. `update(shown)`. */
export function emptyPage(register) {
  const steps = h("ol", { class: "steps" });
  const zone = dropZone(register);
  const node = h("section", { class: "card empty", hidden: true }, h("h2", {}, "Serve your first model"),
    h("p", { class: "quiet" }, "No model is registered. Run these in a terminal on the server's machine:"), steps, zone.node);
  let known = null;
  return {
    node,
    update(shown) {
      show(node, shown);
      const { store, modelApi } = live.state.server;
      const key = JSON.stringify([store, modelApi]);
      if (!shown || key === known) return;
      known = key;
      steps.replaceChildren(...firstSteps().map(([title, command]) => h("li", {}, h("span", {}, title), commandLine(command, title))));
      show(zone.node, modelApi);
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

/** Nothing is uploaded: who may use this page may register what lies in the model store, but not put code there. */
function dropZone(register) {
  const id = newId();
  const picker = h("input", { type: "file", id, accept: ".mar,.model,.tgz,.tar.gz", onchange: () => picker.files[0] && take(picker.files[0]) });
  const said = h("div", { "aria-live": "polite" });
  const node = h("div", { class: "drop" }, h("label", { for: id }, "Drop a .mar here, or choose one "), picker, said);
  const tell = (text, command) => said.replaceChildren(h("p", {}, text), commandLine(command, "this archive"));
  async function take({ name }) {
    const { store } = live.state.server;
    if (!/\.(mar|model|tgz|tar\.gz)$/i.test(name)) return tell("This is no archive. Pack it first:", `tsx archive ${quoted(name)}`);
    let found;
    try {
      found = await get("ui/api/store");
    } catch (error) {
      return say(said, error.message);
    }
    if (found.includes(name)) {
      said.replaceChildren();
      return register(name);
    }
    if (store) tell("The server loads archives from its model store only; a browser cannot put one there. This does:", `cp ${quoted(name)} ${quoted(store)}/ && tsx models register ${quoted(name)} --workers 1${management()}`);
    else tell("This server has no model store to load it from. Serve it in place of this server:", `tsx serve ${quoted(name)}`);
  }
  return { node: takesFiles(node, take) };
}
