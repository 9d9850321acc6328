// A shadow: a share of the requests goes to another version too, whose answers nobody gets; what came of it.

import { path, put } from "./api.js";
import { field, h, show } from "./dom.js";
import { factsPanel } from "./facts.js";
import { firstLines, note } from "./talk.js";

const NONE = "ShadowNotFoundException"; // of a model that has none
const KINDS = { exact: "exactly", numeric: "numbers within a tolerance", "top-k": "the likeliest labels" };

export function shadowPanel(name, changed) {
  const where = path("models", name, "traffic");
  const version = h("select");
  const share = h("input", { type: "number", min: "0.01", max: "100", step: "any", value: "10", required: true });
  const kind = h("select", {}, Object.entries(KINDS).map(([value, text]) => h("option", { value }, text)));
  const submit = h("button", { type: "submit" }, "Copy requests");
  const off = h("button", { type: "button", onclick: () => set(null, "No request is copied any more.") }, "Stop copying");
  const results = factsPanel("What came of the copies", path("models", name, "shadow"), NONE);
  const form = h("form", { class: "inline", onsubmit: (event) => {
    event.preventDefault();
    set({ to: version.value, share: Number(share.value), compare: { kind: kind.value } }, `${share.value} % of the requests go to version ${version.value} as well.`);
  } }, field("To version", version), field("Percent of the requests", share), field("Compare answers", kind), submit, off);
  const node = h("section", { class: "card", "aria-label": "Shadow", hidden: true }, h("h2", {}, "Shadow"),
    h("p", { class: "quiet" }, "Another version gets copies of requests. Clients see nothing of it; both answers are compared."), form);
  let known = "";

  async function set(shadow, done) {
    submit.disabled = off.disabled = true;
    try {
      await put("PATCH", where, { shadow });
      note(done);
    } catch (error) {
      note(firstLines(error.message), true);
    } finally {
      submit.disabled = off.disabled = false;
      changed();
    }
  }

  return {
    node: h("div", {}, node, results.node),
    async load(versions, preset, now) {
      await results.load();
      show(node, versions.length > 1 && results.known);
      show(off, now);
      const told = JSON.stringify([versions, preset, now ?? null]);
      if (told === known) return;
      known = told;
      const before = version.value;
      version.replaceChildren(...versions.filter((each) => each !== preset).map((value) => h("option", { value }, value)));
      version.value = now?.to ?? (before || version.options[0]?.value || "");
      if (now) {
        share.value = now.share;
        kind.value = now.compare?.kind ?? "exact";
      }
    },
  };
}
