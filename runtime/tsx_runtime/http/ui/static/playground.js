// The playground: send an input to a model, see the answer and its times, and copy the request as code.

import { path, saidBy, send, Unreachable } from "./api.js";
import { fileOf, parsed, stages } from "./answer.js";
import { answerView, raw } from "./answerview.js";
import { field, h, newId, say, show } from "./dom.js";
import { stagesList } from "./figures.js";
import { bytes, duration, span } from "./format.js";
import { inputs, isReadable, sampleButtons } from "./inputs.js";
import { live, refresh } from "./live.js";
import { fileOf as fileOfRequest, isInline, snippets } from "./snippets.js";
import { copyButton, firstLines } from "./talk.js";

const SHOWN_SOFAR = 20000; // characters: the end of a long one
const KINDS = { image: "Image", text: "Text", json: "JSON", file: "File" };

export function playgroundTab(name) {
  const versions = h("select");
  const hint = h("p", { class: "quiet" });
  const group = newId();
  let kind = null;
  let picked = false; // by the user, which overrides the handler
  let running = null;
  const pick = (wanted) => {
    picked = true;
    choose(wanted);
  };
  const ways = inputs(() => pick(kind));
  const radios = Object.fromEntries(Object.keys(KINDS).map((each) => [each, h("input", { type: "radio", name: group, value: each, onchange: () => pick(each) })]));
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
    if (wanted !== "image") ways.image.close();
    say(problem, "");
  };
  const chosen = async (file, wanted) => {
    pick(wanted);
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
      if (await isReadable(input.body)) await result.run({ ...input, model: name, version: versions.value }, running.signal);
      else say(problem, `${input.name} cannot be read: it is a folder, or has changed since it was chosen. Choose it again.`);
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
      const labels = Object.entries(model.labels).filter(([, version]) => names.includes(version));
      const key = JSON.stringify([names, labels, model.default]);
      if (key !== known) {
        known = key;
        const before = versions.value;
        versions.replaceChildren(h("option", { value: "" }, `by traffic policy (default ${model.default})`), ...names.map((each) => h("option", { value: each }, each)),
          ...labels.map(([label, version]) => h("option", { value: label }, `${label}, a label of ${version}`)));
        versions.value = before;
        if (versions.selectedIndex < 0) versions.value = "";
        sampleButtons(samples, name, model.default, chosen).catch(() => show(samples, false));
      }
      const asked = model.labels[versions.value] ?? (versions.value || model.default);
      const served = model.versions.find(({ version }) => version === asked);
      say(hint, served?.input ? `Its handler takes ${{ image: "images", text: "text", json: "JSON", file: "files" }[served.input]}.` : "Its handler does not declare its input type; choose one below.");
      const wanted = served?.input ?? kind ?? "file";
      if (!picked && wanted !== kind) choose(wanted);
    },
    rest: () => ways.image.close(),
    close() {
      ways.image.close();
      running?.abort();
      result.close();
    },
  };
}

function resultView() {
  const status = h("span"), passed = h("span", { class: "quiet", "aria-hidden": "true" });
  const id = h("p", { class: "quiet small" });
  const problem = h("pre", { class: "problem", hidden: true });
  const times = stagesList();
  const view = h("div");
  const lines = h("div", { class: "lines" });
  const empty = h("p", { class: "quiet" }, "The answer appears here.");
  const node = h("section", { class: "card answer", "aria-label": "Answer" }, h("h2", {}, "Answer"), h("div", { "aria-live": "polite" }, empty, h("p", { class: "status" }, status, passed), id, problem), times.node, view, lines);
  const urls = []; // of what is shown and can be saved
  const urlOf = (body) => urls[urls.push(URL.createObjectURL(body)) - 1];
  const close = () => urls.splice(0).forEach(URL.revokeObjectURL);
  return {
    node,
    close,
    async run(request, signal) {
      show(empty, false);
      show(problem, false);
      say(status, "Waiting for the answer …");
      say(id, "");
      view.replaceChildren();
      times.update([]);
      close();
      const saved = isInline(request) ? null : urlOf(new Blob([request.body]));
      lines.replaceChildren(...repeat(request, saved));
      const coming = h("pre", { class: "text" });
      const began = performance.now();
      let size = 0;
      const count = () => say(passed, ` ${span((performance.now() - began) / 1000)}${size ? `, ${bytes(size)}` : ""}`);
      const timer = setInterval(count, 1000);
      try {
        const response = await send("POST", `ui/api/predict/${path(...[request.model, request.version].filter(Boolean))}`, { body: request.body, headers: { "Content-Type": request.type, "x-tsx-timing": "1" }, signal });
        const answer = await read(response, (sofar, text) => {
          size = sofar;
          say(status, "Receiving the answer …");
          if (text !== null && !coming.isConnected) view.replaceChildren(coming);
          say(coming, text ?? "");
          coming.scrollTop = coming.scrollHeight;
        });
        const took = (performance.now() - began) / 1000;
        answer.url = urlOf(answer.body);
        const version = response.headers.get("x-tsx-model-version");
        say(status, [`${response.status} ${response.statusText}`.trim(), duration(took), bytes(answer.body.size), version && `version ${version}`].filter(Boolean).join(" · "));
        const number = response.headers.get("x-request-id");
        say(id, number ? `request ${number}` : "");
        times.update(stages(response.headers.get("server-timing")));
        if (!response.ok) fail(saidBy(answer.value) ?? (answer.text || `HTTP ${response.status}`));
        view.replaceChildren(response.ok ? answerView(answer, request.image ?? null) : tellsMore(answer.value) ? raw(answer, false) : "");
        if (response.ok && answer.text === null) lines.replaceChildren(...repeat({ ...request, output: fileOf(answer) }, saved));
      } catch (error) {
        say(status, signal.aborted ? "Stopped." : "No answer.");
        if (!signal.aborted) fail(error instanceof Unreachable ? error.message : `The answer was interrupted: ${error.message}`);
      } finally {
        clearInterval(timer);
        say(passed, "");
      }
    },
  };
  function fail(text) {
    problem.textContent = firstLines(text, 20000);
    show(problem, true);
  }
}

/** Whether there is more in a failure than what tsx's own have, of which the message is shown. */
function tellsMore(value) {
  return typeof value === "object" && value !== null && !Object.keys(value).every((name) => ["code", "type", "message"].includes(name));
}

/** The whole answer; `sofar(size, text)` while it comes in pieces, with null for what is no text. */
async function read(response, sofar) {
  const type = response.headers.get("content-type") ?? "";
  const pieces = [];
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let size = 0;
  let text = type.startsWith("image/") ? null : "";
  const decoded = (...part) => {
    try {
      return text + decoder.decode(...part);
    } catch {
      return null;
    }
  };
  const reader = response.body?.getReader();
  for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
    pieces.push(part.value);
    size += part.value.length;
    if (text !== null) text = decoded(part.value, { stream: true });
    if (pieces.length > 1) sofar(size, text === null ? null : text.slice(-SHOWN_SOFAR));
  }
  if (text !== null) text = decoded();
  const body = new Blob(pieces, { type });
  try {
    return { body, type, value: text === null ? undefined : parsed(text), text };
  } catch {
    return { body, type, value: undefined, text };
  }
}

function repeat(request, saved) {
  const found = snippets(request, live.state.server, location.hostname);
  const file = fileOfRequest(request);
  return [h("h3", {}, "Code for this request"),
    saved && h("p", { class: "quiet" }, `This code reads ${file} from the current directory. `, h("a", { href: saved, download: request.name || file }, "Save it")),
    ...found.map(([label, text]) =>
    h("div", { class: "snippet" }, h("div", { class: "row" }, h("span", { class: "quiet" }, label), h("span", { class: "grow" }), copyButton(() => text, `the line for ${label}`)), h("pre", { tabindex: "0", "data-for": label }, text)))].filter(Boolean);
}
