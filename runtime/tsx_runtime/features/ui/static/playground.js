// The playground: send an input to a model, see the answer and its times, and copy the request as code.

import { get, kept, path, saidBy, send, Unreachable } from "./api.js";
import { fileOf, parsed, stages } from "./answer.js";
import { answerView, raw } from "./answerview.js";
import { chatPanel, generates } from "./chat.js";
import { field, h, newId, say, show } from "./dom.js";
import { exceptionOf } from "./errors.js";
import { stagesList } from "./figures.js";
import { bytes, clock, duration, span } from "./format.js";
import { inputs, isReadable } from "./inputs.js";
import { live, refresh } from "./live.js";
import { sampleButtons } from "./samples.js";
import { fileOf as fileOfRequest, isInline, snippets } from "./snippets.js";
import { codeTabs, firstLines } from "./talk.js";

const SHOWN_SOFAR = 20000; // characters: the end of a long one
const KINDS = { fields: "Fields", image: "Image", text: "Text", json: "JSON", file: "File" };
const REMEMBERED = 12; // requests of the history
const REPORTS = [400, 800, 1600]; // ms after which the server is asked for the traceback of a failure: workers report each half second

const histories = new Map(); // entries by model, the newest first; see `run` of the answer

/** A conversation with a model that generates text, or single requests, which are all that other models have. */
export function playgroundTab(name) {
  const request = requestPanel(name), place = h("div", {}, request.node), group = newId();
  let chat = null; // once it is known that the model generates text
  const choose = (label) => {
    radios[label].checked = true;
    place.replaceChildren((label === "Chat" ? chat : request).node);
  };
  const radios = Object.fromEntries(["Chat", "Single request"].map((label) => [label, h("input", { type: "radio", name: group, value: label, onchange: () => choose(label) })]));
  const choice = h("fieldset", { class: "segments", hidden: true }, h("legend", {}, "Playground"), Object.entries(radios).map(([label, radio]) => h("label", {}, radio, h("span", {}, label))));
  return {
    node: h("div", {}, choice, place),
    update(model) {
      if (!chat && model.versions.some(generates)) {
        chat = chatPanel(name);
        show(choice, true);
        choose("Chat");
      }
      chat?.update(model);
      request.update(model);
    },
    rest: request.rest,
    close() {
      chat?.close();
      request.close();
    },
  };
}

function requestPanel(name) {
  const remembered = kept("localStorage", `tsx-input-${name}`);
  const versions = h("select");
  const hint = h("p", { class: "quiet small" });
  const group = newId();
  let kind = null;
  let typed = false; // whether the model has a signature with fields
  let picked = false; // by the user, which overrides the handler
  let running = null;
  const pick = (wanted) => {
    if (kind === "json" && wanted === "fields") ways.fields.put(ways.json.text());
    else if (kind === "fields" && wanted === "json") ways.fields.take().then(({ text }) => text && ways.json.put(JSON.stringify(JSON.parse(text), null, 2)));
    picked = true;
    remembered.set(wanted);
    choose(wanted);
  };
  const ways = inputs(() => pick(kind));
  const radios = Object.fromEntries(Object.keys(KINDS).map((each) => [each, h("input", { type: "radio", name: group, value: each, onchange: () => pick(each) })]));
  const choice = h("fieldset", { class: "segments" }, h("legend", {}, "Input"), Object.entries(KINDS).map(([each, label]) => h("label", {}, radios[each], h("span", {}, label))));
  const samples = h("fieldset", { class: "samples", hidden: true });
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = h("button", { class: "primary", type: "submit" }, "Send");
  const later = h("input", { type: "checkbox", id: newId() });
  const stop = h("button", { type: "button", hidden: true, onclick: () => running?.abort() }, "Stop");
  const result = resultView();
  const past = historyList(name, async (entry) => {
    versions.value = entry.request.version;
    if (versions.selectedIndex < 0) versions.value = "";
    await put(entry.request.body, entry.kind, entry.request.name);
    const input = await ways[entry.kind].take(); // with a picture that the page still has
    if (typeof input === "object") result.show(Object.assign(entry, { request: { ...entry.request, ...input } }));
  });
  const choose = (wanted) => {
    kind = wanted;
    for (const [each, way] of Object.entries(ways)) show(way.node, each === wanted);
    radios[wanted].checked = true;
    if (wanted !== "image") ways.image.close();
    say(problem, "");
  };
  const put = async (body, asked, title) => {
    const wanted = asked === "json" && typed ? "fields" : asked;
    pick(wanted);
    await ways[wanted].put(["fields", "text", "json"].includes(wanted) && body instanceof Blob ? await body.text() : body, title);
    submit.focus();
  };
  const run = async (event) => {
    event.preventDefault();
    const way = ways[kind];
    const input = await way.take();
    say(problem, typeof input === "string" ? input : "");
    if (typeof input === "string" || running) return;
    running = new AbortController();
    submit.disabled = true;
    show(stop, true);
    try {
      if (await isReadable(input.body)) {
        const entry = await result.run({ ...input, model: name, version: versions.value, later: later.checked }, running.signal);
        past.add({ ...entry, kind });
        way.fail?.(entry.response?.status === 422 && entry.answer.value?.detail);
      }
      else say(problem, `${input.name} cannot be read: it is a folder, or has changed since it was chosen. Choose it again.`);
    } finally {
      running = null;
      submit.disabled = false;
      show(stop, false);
      refresh();
    }
  };
  const form = h("form", { class: "card", novalidate: true, onsubmit: run }, field("Version", versions), choice, hint, samples, Object.values(ways).map((way) => way.node), problem, h("div", { class: "row" }, submit, stop, h("span", {}, later, h("label", { for: later.id }, " Answer later")), h("span", { class: "quiet" }, "Ctrl + Enter sends as well")));
  form.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
  form.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith("image/"));
    if (file) put(file, "image", file.name);
  });
  show(radios.fields.parentNode, false);
  if (remembered.get() in KINDS && remembered.get() !== "fields") {
    picked = true;
    choose(remembered.get());
  }
  let known = "", sampled = "", described = "";
  return {
    node: h("div", { class: "halves" }, h("div", {}, form, past.node), result.node),
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
      }
      const { version, input, state } = model.versions.find((each) => each.version === model.default) ?? model.versions[0];
      if (sampled !== `${version} ${input} ${state}`) {
        sampled = `${version} ${input} ${state}`; // a worker that becomes ready may bring one
        sampleButtons(samples, name, version, (file, wanted) => put(file, wanted, file.name), (text, wanted) => ways[wanted].isEmpty() && ways[wanted].put(text))
          .then((first) => first && !input && !picked && !typed && choose(first), () => show(samples, false));
      }
      const asked = model.labels[versions.value] ?? (versions.value || model.default);
      const served = model.versions.find(({ version }) => version === asked);
      if (served && described !== `${served.version} ${served.state}`) {
        described = `${served.version} ${served.state}`; // a worker that becomes ready may report another signature
        get(path("models", name, served.version)).then(([{ signature }]) => {
          typed = ways.fields.use(signature);
          show(radios.fields.parentNode, typed);
          if (typed && !picked) choose("fields");
          else if (!typed && kind === "fields") choose("json");
        }, () => (described = ""));
      }
      say(hint, typed ? "Its handler has a signature: each field takes a value of its type." : served?.input ? `Its handler takes ${{ image: "images", text: "text", json: "JSON", file: "files", chat: "prompts as JSON" }[served.input]}.` : "Its handler does not declare its input type; choose one.");
      const wanted = typed ? "fields" : served?.input === "chat" ? "json" : served?.input ?? kind ?? "file";
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

/** The last requests of this visit; `again(entry)` is called with the one that is clicked. */
function historyList(name, again) {
  const list = h("ol", { class: "history" });
  const node = h("section", { class: "card", "aria-label": "History" }, h("h2", {}, "History"), list);
  const draw = () => {
    const entries = histories.get(name) ?? [];
    show(node, entries.length);
    list.replaceChildren(...entries.map((entry) => {
      const { request, response, took, at } = entry;
      const what = request.name ?? firstLines(request.text.trim().replace(/\s+/g, " "), 60);
      return h("li", {}, h("button", { type: "button", class: "plain", onclick: () => again(entry) },
        h("time", {}, clock(at)), h("span", { class: `chip ${response?.ok ? "good" : ""}` }, response ? String(response.status) : "none"), h("span", { class: "what" }, what), h("span", { class: "quiet" }, duration(took))));
    }));
  };
  draw();
  return {
    node,
    add(entry) {
      histories.set(name, [entry, ...(histories.get(name) ?? [])].slice(0, REMEMBERED));
      draw();
    },
  };
}

function resultView() {
  const status = h("span"), passed = h("span", { class: "quiet", "aria-hidden": "true" });
  const id = h("p", { class: "quiet small" });
  const problem = h("pre", { class: "problem", hidden: true });
  const trace = h("div");
  const times = stagesList();
  const view = h("div");
  const lines = h("div", { class: "lines" });
  const empty = h("p", { class: "quiet" }, "Choose an input and send it: the answer appears here, with its times and the code that repeats the request.");
  const node = h("section", { class: "card answer", "aria-label": "Answer" }, h("h2", {}, "Answer"), h("div", { "aria-live": "polite" }, empty, h("p", { class: "status" }, status, passed), problem, trace), view, times.node, id, lines);
  const urls = []; // of what is shown and can be saved
  const urlOf = (body) => urls[urls.push(URL.createObjectURL(body)) - 1];
  const close = () => urls.splice(0).forEach(URL.revokeObjectURL);
  let shown = null; // the newest entry: a traceback that comes late is not another's
  const clear = (request) => {
    show(empty, false);
    show(problem, false);
    say(id, "");
    trace.replaceChildren();
    view.replaceChildren();
    times.update([]);
    close();
    lines.replaceChildren(...repeat(request, isInline(request) ? null : urlOf(new Blob([request.body]))));
  };
  const fail = (text) => {
    problem.textContent = firstLines(text, 20000);
    show(problem, true);
  };

  function display(entry) {
    const { request, response, answer, took, failure } = entry;
    shown = entry;
    clear(request);
    if (!response) return say(status, failure.status), failure.text && fail(failure.text);
    answer.url = urlOf(answer.body);
    const number = response.headers.get("x-request-id");
    const version = response.headers.get("x-tsx-model-version");
    say(status, [`${response.status} ${response.statusText}`.trim(), duration(took), bytes(answer.body.size), version && `version ${version}`].filter(Boolean).join(" · "));
    say(id, number ? `request ${number}` : "");
    times.update(stages(response.headers.get("server-timing")));
    if (!response.ok) fail(saidBy(answer.value) ?? (answer.text || `HTTP ${response.status}`));
    view.replaceChildren(response.ok ? answerView(answer, request.image ?? null) : tellsMore(answer.value) ? raw(answer, false) : "");
    if (response.ok && answer.text === null) lines.replaceChildren(...repeat({ ...request, output: fileOf(answer) }, isInline(request) ? null : urlOf(new Blob([request.body]))));
    if (!response.ok && number) linkTraceback(entry, number);
    if (request.later && response.status === 202) trace.replaceChildren(h("p", { class: "traced" }, h("a", { href: "#/jobs" }, "Show the job")));
  }

  /** Once the worker has reported it; a refusal of the server has none. */
  async function linkTraceback(entry, number) {
    const { model } = entry.request;
    for (const pause of entry.traced ? [0] : REPORTS) {
      await new Promise((go) => setTimeout(go, pause));
      const errors = await get(`ui/api/errors/${path(model)}`).catch(() => []);
      const error = errors.find(({ request_ids: ids, traceback }) => traceback && ids.includes(number));
      if (shown !== entry) return;
      if (!error) continue;
      entry.traced = true;
      const href = `#/model/${path(model)}/errors/${encodeURIComponent(number)}`;
      return trace.replaceChildren(h("p", { class: "traced" }, h("a", { href }, "Show the traceback"), h("span", { class: "quiet" }, ` ${exceptionOf(error).place}`)));
    }
  }

  return {
    node,
    close,
    show: display,
    async run(request, signal) {
      clear(request);
      shown = null;
      say(status, "Waiting for the answer …");
      const coming = h("pre", { class: "text" });
      const began = performance.now();
      let size = 0;
      const count = () => say(passed, ` ${span((performance.now() - began) / 1000)}${size ? `, ${bytes(size)}` : ""}`);
      const timer = setInterval(count, 1000);
      const entry = { request, at: Date.now() / 1000, response: null, answer: null, failure: null };
      try {
        const response = await send("POST", `ui/api/predict/${path(...[request.model, request.version].filter(Boolean))}`, { body: request.body, headers: { "Content-Type": request.type, "x-tsx-timing": "1", ...(request.later && { Prefer: "respond-async" }) }, signal });
        entry.answer = await read(response, (sofar, text) => {
          size = sofar;
          say(status, "Receiving the answer …");
          if (text !== null && !coming.isConnected) view.replaceChildren(coming);
          say(coming, text ?? "");
          coming.scrollTop = coming.scrollHeight;
        });
        entry.response = response;
      } catch (error) {
        entry.failure = { status: signal.aborted ? "Stopped." : "No answer.", text: signal.aborted ? "" : error instanceof Unreachable ? error.message : `The answer was interrupted: ${error.message}` };
      } finally {
        clearInterval(timer);
        say(passed, "");
      }
      entry.took = (performance.now() - began) / 1000;
      display(entry);
      return entry;
    },
  };
}

/** Whether there is more in a failure than what tsx's own have, of which the message is shown. */
function tellsMore(value) {
  return typeof value === "object" && value !== null && !Object.keys(value).every((name) => ["code", "type", "message"].includes(name));
}

/** The whole answer; `sofar(size, text)` while it comes in pieces, with null for what is no text. */
export async function read(response, sofar) {
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

/** The request as code, in tabs. */
function repeat(request, saved) {
  const file = fileOfRequest(request);
  return [h("h3", {}, "Code for this request"),
    saved && h("p", { class: "quiet" }, `This code reads ${file} from the current directory. `, h("a", { href: saved, download: request.name || file }, "Save it")),
    ...codeTabs(snippets(request, live.state.server, location.hostname))].filter(Boolean);
}
