// Try a model: give it something, see what it answers, how long it took, and how to do the same elsewhere.

import { path, send, Unreachable } from "./api.js";
import { stages } from "./answer.js";
import { answerView } from "./answerview.js";
import { field, h, newId, say, show } from "./dom.js";
import { stagesList } from "./figures.js";
import { bytes, duration } from "./format.js";
import { inputs, sampleButtons } from "./inputs.js";
import { live, refresh } from "./live.js";
import { snippets } from "./snippets.js";
import { copyButton } from "./talk.js";

const KINDS = { image: "Image", text: "Text", json: "JSON", file: "File" };

export function playgroundTab(name) {
  const versions = h("select");
  const hint = h("p", { class: "quiet" });
  const group = newId();
  let kind = null;
  let running = null;
  const ways = inputs(() => say(problem, ""));
  const radios = Object.fromEntries(Object.keys(KINDS).map((each) => [each, h("input", { type: "radio", name: group, value: each, onchange: () => choose(each) })]));
  const choice = h("fieldset", { class: "segments" }, h("legend", {}, "Input"), Object.entries(KINDS).map(([each, label]) => h("label", {}, radios[each], h("span", {}, label))));
  const samples = h("div", { class: "row samples", hidden: true });
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = h("button", { class: "primary", type: "submit" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => running?.abort() }, "Stop");
  const result = resultView();
  const choose = (wanted) => {
    kind = wanted;
    for (const [each, way] of Object.entries(ways)) show(way.node, each === wanted);
    radios[wanted].checked = true;
    say(problem, "");
  };
  const chosen = async (file, wanted) => {
    choose(wanted);
    await ways[wanted].put(file);
    submit.focus();
  };
  const run = async (event) => {
    event.preventDefault();
    const input = ways[kind].take();
    say(problem, typeof input === "string" ? input : "");
    if (typeof input === "string" || running) return;
    running = new AbortController();
    submit.disabled = true;
    show(stop, true);
    try {
      await result.run({ ...input, model: name, version: versions.value }, running.signal);
    } finally {
      running = null;
      submit.disabled = false;
      show(stop, false);
      refresh();
    }
  };
  const form = h("form", { class: "card", onsubmit: run }, field("Version", versions), hint, choice, Object.values(ways).map((way) => way.node), samples, problem, h("div", { class: "row" }, submit, stop, h("span", { class: "quiet" }, "Ctrl + Enter sends as well")));
  form.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
  form.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith("image/"));
    if (file) chosen(file, "image");
  });
  let known = "";
  return {
    node: h("div", { class: "halves" }, form, result.node),
    update(model) {
      const names = model.versions.map(({ version }) => version);
      const key = JSON.stringify([names, model.default]);
      if (key !== known) {
        known = key;
        const before = versions.value;
        versions.replaceChildren(h("option", { value: "" }, `as its traffic goes (default ${model.default})`), ...names.map((each) => h("option", { value: each }, each)));
        versions.value = names.includes(before) ? before : "";
        sampleButtons(samples, name, model.default, chosen).catch(() => show(samples, false));
      }
      const told = model.versions.find(({ version }) => version === (versions.value || model.default));
      say(hint, told?.input ? `Its handler takes ${{ image: "images", text: "text", json: "JSON", file: "files" }[told.input]}.` : "Its handler does not say what it takes; choose below.");
      if (kind === null) choose(told?.input ?? "file");
    },
  };
}

function resultView() {
  const status = h("p", { class: "status" });
  const id = h("p", { class: "quiet small" });
  const problem = h("pre", { class: "problem", hidden: true });
  const times = stagesList();
  const view = h("div");
  const lines = h("div", { class: "lines" });
  const empty = h("p", { class: "quiet" }, "The answer will be here.");
  const node = h("section", { class: "card answer", "aria-label": "Answer" }, h("h2", {}, "Answer"), h("div", { "aria-live": "polite" }, empty, status, id, problem), times.node, view, lines);
  return {
    node,
    async run(request, signal) {
      show(empty, false);
      show(problem, false);
      say(status, "Waiting for the answer …");
      say(id, "");
      view.replaceChildren();
      times.update([]);
      lines.replaceChildren(...repeat(request));
      const began = performance.now();
      try {
        const response = await send("POST", `ui/api/predict/${path(...[request.model, request.version].filter(Boolean))}`, { body: request.body, headers: { "Content-Type": request.type, "x-tsx-timing": "1" }, signal });
        const answer = await read(response, (text) => view.replaceChildren(h("pre", { class: "text" }, text)));
        const took = (performance.now() - began) / 1000;
        const version = response.headers.get("x-tsx-model-version");
        say(status, [`${response.status} ${response.statusText}`.trim(), duration(took), bytes(answer.body.size), version && `version ${version}`].filter(Boolean).join(" · "));
        say(id, `request ${response.headers.get("x-request-id")}`);
        times.update(stages(response.headers.get("server-timing")));
        if (response.ok) view.replaceChildren(answerView(answer, request.image ?? null));
        else fail(answer.value?.message ?? answer.value?.error ?? answer.text ?? `HTTP ${response.status}`);
      } catch (error) {
        say(status, signal.aborted ? "Stopped." : "No answer.");
        if (!signal.aborted) fail(error instanceof Unreachable ? error.message : `The answer broke off: ${error.message}`);
      }
    },
  };
  function fail(text) {
    problem.textContent = text;
    show(problem, true);
    view.replaceChildren();
  }
}

/** The whole answer; `sofar(text)` while it comes in pieces. */
async function read(response, sofar) {
  const type = response.headers.get("content-type") ?? "";
  const pieces = [];
  const decoder = new TextDecoder();
  let text = "";
  const reader = response.body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    pieces.push(part.value);
    text += decoder.decode(part.value, { stream: true });
    if (pieces.length > 1 && text.length < 50000) sofar(text);
  }
  const body = new Blob(pieces, { type });
  if (type.startsWith("image/")) return { body, type, value: undefined, text: null };
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await body.arrayBuffer());
  } catch {
    return { body, type, value: undefined, text: null };
  }
  try {
    return { body, type, value: JSON.parse(text), text };
  } catch {
    return { body, type, value: undefined, text };
  }
}

function repeat(request) {
  const found = snippets(request, live.state.server, location.hostname);
  return [h("h3", {}, "Do it again elsewhere"), ...found.map(([label, text]) =>
    h("div", { class: "snippet" }, h("div", { class: "row" }, h("span", { class: "quiet" }, label), h("span", { class: "grow" }), copyButton(() => text, `the line for ${label}`)), h("pre", { tabindex: "0", "data-for": label }, text)))];
}
