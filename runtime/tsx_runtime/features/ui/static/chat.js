// The playground of a model that generates text: a conversation, which this page alone keeps, or the continuation of a text.

import { path, saidBy, send, Unreachable } from "./api.js";
import { field, h, newId, say, show } from "./dom.js";
import { chip } from "./figures.js";
import { duration, number } from "./format.js";
import { live, refresh } from "./live.js";
import { chatSnippets } from "./snippets.js";
import { codeTabs } from "./talk.js";

const LONGEST = 200_000; // characters of an answer that are shown
const PARAMETERS = [ // of OpenAI's API; the engine decides what is left empty
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }, "0: the most likely token"],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, "of the answer"],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }, "the share of the likely tokens to draw from"],
  ["seed", "Seed", { step: 1 }, "the same seed gives the same answer"],
];

/** Whether a version generates text; of what chats its handler says so. */
export const generates = ({ input, handler }) => input === "chat" || handler === "huggingface_generation";

const conversations = new Map(); // messages by model, until the page is left

export function chatPanel(name) {
  const messages = conversations.get(name) ?? [];
  conversations.set(name, messages);
  const list = h("ol");
  const log = h("div", { class: "conversation", role: "log", "aria-label": "Conversation", tabindex: "0" }, list);
  const draft = h("textarea", { rows: "3", oninput: () => code() });
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = h("button", { class: "primary", type: "submit" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => running?.abort() }, "Stop");
  const clear = h("button", { type: "button", onclick: () => { running?.abort(); messages.length = 0; code(); draw(); draft.focus(); } }, "New conversation");
  const versions = h("select"), adapters = h("select"), mode = h("select", {}, h("option", { value: "chat/completions" }, "Chat"), h("option", { value: "completions" }, "Continue a text"));
  const system = h("textarea", { rows: "3" });
  const stops = h("textarea", { rows: "2", spellcheck: "false", class: "code" });
  const numbers = PARAMETERS.map(([key, label, limits, hint]) => ({ key, input: h("input", { type: "number", ...limits }), label, hint }));
  const lines = h("div", { class: "lines" });
  const ofAdapters = field("Adapter", adapters), ofSystem = field("System prompt", system), title = h("h2", {});
  let running = null, known = "", served = null;
  const isChat = () => mode.value === "chat/completions";
  const arrange = () => { show(ofSystem, isChat()); say(title, mode.selectedOptions[0].textContent); };

  /** The request, with `said` as what comes next. */
  const request = (said) => {
    const body = { model: [[name, versions.value].filter(Boolean).join(":"), adapters.value].filter(Boolean).join("/") };
    if (isChat()) body.messages = [...(system.value ? [{ role: "system", content: system.value }] : []), ...messages.map(({ role, content }) => ({ role, content })), { role: "user", content: said }];
    else body.prompt = said;
    for (const { key, input } of numbers) if (input.value !== "") body[key] = Number(input.value);
    const ends = stops.value.split("\n").filter(Boolean);
    return { ...body, ...(ends.length && { stop: ends }), stream: true };
  };
  /** That of `body`, which was sent, or of what would be sent now. */
  const code = (body = request(draft.value || "Hello!")) => lines.replaceChildren(h("h3", {}, "Code for this request"), ...codeTabs(chatSnippets(body, `/v1/${mode.value}`, live.state.server, location.hostname)));
  const draw = () => {
    list.replaceChildren(...messages.map((message) => message.node));
    show(log, messages.length);
    show(clear, messages.length);
  };
  const add = (role, content) => {
    const text = h("p", { class: "said" }, content), about = h("p", { class: "quiet small" });
    const message = { role, content, text, about, node: h("li", { class: role }, h("b", {}, role === "user" ? "You" : "Model"), text, about) };
    messages.push(message);
    draw();
    return message;
  };

  const run = async (event) => {
    event.preventDefault();
    const said = draft.value;
    if (running || !said) return !said && say(problem, "Type a message first.");
    running = new AbortController();
    const { signal } = running;
    say(problem, "");
    const body = request(said);
    code(body);
    if (!isChat()) messages.length = 0; // each text is continued by itself
    const question = add("user", said), answer = add("assistant", "");
    draft.value = "";
    submit.disabled = true;
    show(stop, true);
    log.setAttribute("aria-busy", "true");
    log.scrollTop = log.scrollHeight;
    const began = performance.now();
    let first = null, tokens = 0, end = "stopped";
    try {
      const response = await send("POST", `ui/api/predict/${path(name, versions.value || served)}/v1/${mode.value}`, { body: JSON.stringify({ ...body, stream_options: { include_usage: true } }), headers: { "Content-Type": "application/json" }, signal });
      for await (const { text, usage, finished } of pieces(response)) {
        if (text) {
          first ??= performance.now();
          tokens += 1;
          answer.content += text;
          const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
          say(answer.text, answer.content.slice(0, LONGEST));
          if (atEnd) log.scrollTop = log.scrollHeight;
        }
        tokens = usage?.completion_tokens ?? tokens;
        end = finished ?? end;
      }
    } catch (error) {
      if (!signal.aborted) {
        end = "interrupted";
        say(problem, error instanceof Unreachable || answer.content === "" ? error.message : `The answer was interrupted: ${error.message}`);
      }
    }
    const seconds = (performance.now() - (first ?? began)) / 1000;
    if (answer.content) say(answer.about, [`first token after ${duration((first - began) / 1000)}`, `${number(tokens)} tokens`, tokens > 1 && `${number((tokens - 1) / seconds)} tokens/s`, end].filter(Boolean).join(" · "));
    else { // nothing to go on from: the message may be sent again
      messages.splice(0, messages.length, ...messages.filter((each) => each !== question && each !== answer));
      draft.value ||= said;
    }
    running = null;
    submit.disabled = false;
    show(stop, false);
    log.removeAttribute("aria-busy");
    draw();
    draft.focus();
    refresh();
  };

  const form = h("form", { onsubmit: run }, field("Message", draft), problem, h("div", { class: "row" }, submit, stop, clear, h("span", { class: "quiet" }, "Enter sends, Shift + Enter breaks the line")));
  draft.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return; // 229: Safari's, of the Enter that ends a composition
    event.preventDefault();
    form.requestSubmit();
  });
  const settings = h("section", { class: "card", "aria-label": "Settings", onchange: () => { arrange(); code(); } }, h("h2", {}, "Settings"),
    h("div", { class: "fields" }, field("Version", versions), ofAdapters, field("Task", mode), h("div", { class: "whole" }, ofSystem), numbers.map(({ label, input, hint }) => field(label, input, hint)), h("div", { class: "whole" }, field("Stop", stops, "the answer ends before any of these, one per line"))), lines);
  const state = chip();
  return {
    node: h("div", { class: "halves" }, h("section", { class: "card", "aria-label": "Chat" }, h("div", { class: "row" }, title, state.node), log, form), settings),
    update(model) {
      const able = model.versions.filter(generates);
      const labels = Object.entries(model.labels).filter(([, version]) => able.some((each) => each.version === version)).map(([label]) => label);
      served = model.default;
      const now = model.versions.find(({ version }) => version === (model.labels[versions.value] ?? (versions.value || served)));
      state.update(now?.state ?? "idle");
      const own = { ...now?.huggingface };
      own.adapters = [...(own.adapters ?? []), ...Object.keys(now?.added_adapters ?? {})];
      const key = JSON.stringify([able.map(({ version }) => version), labels, served, own]);
      if (key === known) return;
      mode.options[0].disabled = now?.input !== "chat" && !own.chat; // it has no chat template
      if (mode.options[0].disabled) mode.value = "completions";
      known = key;
      choose(versions, [["", `default (${served})`], ...[...able.map(({ version }) => version), ...labels].map((each) => [each, each])]);
      choose(adapters, [["", "none"], ...own.adapters.map((each) => [each, each])]);
      show(ofAdapters, own.adapters.length);
      arrange();
      draw();
      code();
    },
    close: () => running?.abort(),
  };
}

function choose(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => h("option", { value }, label)));
  select.value = before;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

/** Of an answer of OpenAI's API, streamed or whole: `{text, usage, finished}`. Throws what the server says went wrong. */
export async function* pieces(response) {
  if (!response.ok || !(response.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
    const text = await response.text();
    const value = json(text);
    if (!response.ok || !value) throw new Error(saidBy(value) ?? (text || `HTTP ${response.status}`));
    return yield piece(value);
  }
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const value = json(event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n"));
      if (value?.error) throw new Error(saidBy(value) ?? "the model failed");
      if (value) yield piece(value);
    }
  }
}

function piece({ choices: [choice] = [], usage }) {
  return { text: choice?.delta?.content ?? choice?.message?.content ?? choice?.text ?? "", usage, finished: choice?.finish_reason };
}

/** Null for what is none, as the mark of the end. */
function json(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
