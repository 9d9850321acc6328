// The recording of a model: the dialog that starts it, the size of its files, and the command that replays them.

import { call, path, put, Refused } from "./api.js";
import { formDialog } from "./dialog.js";
import { field, h, newId, say, show } from "./dom.js";
import { chip, tile } from "./figures.js";
import { bytes, decimal, number, since } from "./format.js";
import { live } from "./live.js";
import { act, ask, commandLine } from "./talk.js";
import { quoted } from "./snippets.js";

/** `start`: the button that opens the dialog. */
export function recordPanel(name, changed, start) {
  const where = path("models", name, "record");
  const state = chip();
  const about = h("span", { class: "quiet" });
  const problem = h("p", { class: "problem" });
  const tiles = { recorded: tile("Recorded"), dropped: tile("Skipped"), size: tile("On disk"), oldest: tile("Oldest") };
  const replay = h("div");
  const remove = h("button", { type: "button", class: "danger", onclick: async () =>
    (await ask("Remove all recorded files? This cannot be undone.", "Remove")) && (await act(remove, "DELETE", where, { remove: "true" }, "The recorded files were removed.")) && changed() }, "Remove files");
  const stop = h("button", { type: "button", onclick: async () => (await act(stop, "DELETE", where, {}, "Recording has stopped. The files are kept.")) && changed() }, "Stop recording");
  const node = h("section", { class: "card", "aria-label": "Recording", hidden: true },
    h("div", { class: "row" }, h("h2", {}, "Recording"), state.node, about, h("span", { class: "grow" }), stop, remove), problem,
    h("dl", { class: "tiles small" }, Object.values(tiles).map((each) => each.node)), replay);
  let known = "";

  return {
    node,
    async load() {
      let report;
      try {
        report = await call("GET", where);
      } catch (error) {
        if (!(error instanceof Refused)) return;
        show(start, false); // a server that records nothing
        show(node, false);
        return;
      }
      show(start, !report.recording);
      show(node, report.recording || report.files);
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
    show(stop, recording);
    show(remove, report.files && !recording);
    show(replay, report.files);
    const command = `tsx replay ${quoted(report.directory ?? "")}`;
    if (command !== known) replay.replaceChildren(h("p", { class: "quiet" }, "Replay it on the server's machine:"), commandLine((known = command), "replay the recording"));
  }
}

export function recordDialog(name) {
  const share = h("input", { type: "number", min: "0.001", max: "100", step: "any", value: "1", required: true });
  const size = h("input", { value: "100MB", autocomplete: "off", spellcheck: "false", required: true });
  const age = h("input", { value: "1d", autocomplete: "off", spellcheck: "false", required: true });
  const answers = h("input", { type: "checkbox", id: newId() });
  return formDialog({
    title: "Record requests",
    about: "Writes a share of the requests that name no version to files on the server, to test a version or warm up a model with them. Bodies are stored unchanged.",
    submit: "Record",
    body: [field("Percent recorded", share), field("Maximum size", size, "100MB, 2GB: the oldest are removed first"), field("Maximum age", age, "30m, 12h, 7d"),
      h("p", { class: "whole" }, answers, h("label", { for: answers.id }, " Record the answers as well, so that a replay can compare them"))],
    changes: () => [
      { name: "Recorded", before: "0 %", after: `${share.value} % of the requests, ${answers.checked ? "with" : "without"} answers` },
      { name: "Kept", before: null, after: `up to ${size.value.trim()}, for ${age.value.trim()}` },
    ],
    work: async () => {
      await put("PUT", path("models", name, "record"), { share: Number(share.value), max_size: size.value.trim(), max_age: age.value.trim(), answers: answers.checked });
      return `${share.value} % of the requests are recorded.`;
    },
  });
}
