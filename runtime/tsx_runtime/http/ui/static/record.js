// The recording of a model: its settings, the size of its files, and the command that replays them.

import { call, path, put, Refused } from "./api.js";
import { field, h, say, show } from "./dom.js";
import { chip, tile } from "./figures.js";
import { bytes, decimal, number, since } from "./format.js";
import { live } from "./live.js";
import { act, ask, copyButton, firstLines, note } from "./talk.js";
import { quoted } from "./snippets.js";

export function recordPanel(name, changed) {
  const where = path("models", name, "record");
  const state = chip();
  const about = h("span", { class: "quiet" });
  const problem = h("p", { class: "problem" });
  const tiles = { recorded: tile("Recorded"), dropped: tile("Skipped"), size: tile("On disk"), oldest: tile("Oldest") };
  const line = h("pre", { tabindex: "0", "data-for": "replay" });
  const replay = h("div", { class: "snippet" }, h("div", { class: "row" }, h("span", { class: "quiet" }, "Replay on the server's machine"), h("span", { class: "grow" }), copyButton(() => line.textContent, "the replay command")), line);
  const remove = h("button", { type: "button", class: "danger", onclick: async () =>
    (await ask("Remove all recorded files? This cannot be undone.", "Remove")) && (await act(remove, "DELETE", where, { remove: "true" }, "The recorded files were removed.")) && changed() }, "Remove files");
  const begin = beginForm(where, changed);
  const node = h("section", { class: "card", "aria-label": "Recording", hidden: true }, h("h2", {}, "Recording"),
    h("p", { class: "quiet" }, "Writes a share of the requests that name no version to files on the server, to test a version or warm up a model with them. Bodies are stored unchanged."),
    h("div", { class: "row" }, state.node, about, h("span", { class: "grow" }), remove), problem,
    h("dl", { class: "tiles small" }, Object.values(tiles).map((each) => each.node)), replay, begin.node);

  return {
    node,
    async load() {
      let report;
      try {
        report = await call("GET", where);
      } catch (error) {
        if (error instanceof Refused) show(node, false); // a server that records nothing
        return;
      }
      show(node, true);
      draw(report);
    },
  };

  function draw(report) {
    const { recording, terms } = report;
    state.update(recording ? "ready" : "idle");
    say(state.node, recording ? "running" : "off");
    say(about, recording ? `${number(terms.share)} % of the requests, ${terms.answers ? "with" : "without"} answers, up to ${decimal(terms.max_size)}, for ${number(terms.max_age / 3600)} h` : "");
    say(problem, report.problem ? `Nothing can be written to disk: ${report.problem}` : "");
    const left = Object.entries(report.dropped).filter(([, count]) => count);
    tiles.recorded.update(number(report.recorded));
    tiles.dropped.update(left.length ? left.map(([reason, count]) => `${number(count)} ${reason}`).join(", ") : "0");
    tiles.size.update(bytes(report.bytes));
    tiles.oldest.update(report.oldest ? since(report.oldest, live.state.server.now) : "–");
    for (const { node: each } of Object.values(tiles)) show(each.parentNode, recording || report.files);
    show(remove, report.files && !recording);
    show(replay, report.files);
    say(line, `tsx replay ${quoted(report.directory ?? "")}`);
    begin.update(report);
  }
}

function beginForm(where, changed) {
  const share = h("input", { type: "number", min: "0.001", max: "100", step: "any", value: "1", required: true });
  const size = h("input", { value: "100MB", class: "short", autocomplete: "off", spellcheck: "false", required: true });
  const age = h("input", { value: "1d", class: "short", autocomplete: "off", spellcheck: "false", required: true });
  const answers = h("input", { type: "checkbox", id: "record-answers" });
  const submit = h("button", { type: "submit" }, "Record");
  const stop = h("button", { type: "button", onclick: async () => (await act(stop, "DELETE", where, {}, "Recording has stopped. The files are kept.")) && changed() }, "Stop recording");
  const send = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await put("PUT", where, { share: Number(share.value), max_size: size.value.trim(), max_age: age.value.trim(), answers: answers.checked });
      note(`${share.value} % of the requests are recorded.`);
    } catch (error) {
      note(firstLines(error.message), true);
    } finally {
      submit.disabled = false;
      changed();
    }
  };
  const fields = [field("Percent recorded", share), field("Maximum size", size, "100MB, 2GB: the oldest are removed first"), field("Maximum age", age, "30m, 12h, 7d")];
  const whole = h("p", { class: "whole" }, answers, h("label", { for: answers.id }, " Record the answers as well, so that a replay can compare them"));
  return {
    node: h("form", { class: "fields", onsubmit: send }, fields, whole, h("div", { class: "row" }, submit, stop)),
    update({ recording }) {
      for (const each of [...fields, whole, submit]) show(each, !recording);
      show(stop, recording);
    },
  };
}
