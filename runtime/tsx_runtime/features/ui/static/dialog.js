// Dialogs that change something on the server: a form, what it would change, and the error where the server refuses it.

import { h, newId, say, show } from "./dom.js";
import { refresh } from "./live.js";
import { firstLines, note } from "./talk.js";

/**
 * `changes()` says what the form would change, as `{name, before, after}`, at each input; without any, nothing can be sent.
 * `work()` does it and gives the words for the note; what it throws is shown in the dialog, which stays open.
 * `drawer`: at the side of the page. Resolves to whether it was done.
 */
export function formDialog({ title, about, body = [], submit, changes, work, drawer = false }) {
  return new Promise((answer) => {
    const name = newId();
    const problem = h("p", { class: "problem", role: "alert" });
    const diff = h("ul", { class: "diff" });
    const same = h("p", { class: "quiet" }, "Nothing is changed yet.");
    const send = h("button", { class: "primary", type: "submit" }, submit);
    const form = h("form", { onsubmit: (event) => {
      event.preventDefault();
      run();
    } },
      h("div", { class: "row title" }, h("h2", { id: name }, title), h("span", { class: "grow" }), h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => dialog.close() }, "×")),
      about && h("p", { class: "quiet" }, about), h("div", { class: "fields" }, body),
      changes && h("section", { class: "changes", "aria-label": "Changes", "aria-live": "polite" }, h("h3", {}, "Changes"), same, diff),
      problem,
      h("div", { class: "row end" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), send));
    const dialog = h("dialog", { class: drawer ? "drawer" : "wide", "aria-labelledby": name, onclose: () => (dialog.remove(), answer(dialog.returnValue === "done")) }, form);
    const redraw = () => {
      if (!changes) return;
      const found = changes();
      diff.replaceChildren(...diffRows(found));
      show(same, !found.length);
      send.disabled = !found.length;
    };
    async function run() {
      send.disabled = true;
      send.setAttribute("aria-busy", "true");
      say(problem, "");
      try {
        const done = await work();
        dialog.close("done");
        note(done);
      } catch (error) {
        say(problem, firstLines(error.message, 2000));
      } finally {
        send.disabled = false;
        send.removeAttribute("aria-busy");
        refresh();
      }
    }
    form.addEventListener("input", redraw);
    form.addEventListener("change", redraw);
    dialog.redraw = redraw;
    document.body.append(dialog);
    redraw();
    dialog.showModal();
    (form.querySelector(".fields :is(input, select)") ?? send).focus();
  });
}

function diffRows(changes) {
  return changes.map(({ name, before, after }) => h("li", {}, h("span", { class: "name" }, name),
    before !== null && h("del", {}, before), before !== null && after !== null && h("span", { "aria-hidden": "true" }, "→"), after !== null && h("ins", {}, after)));
}

/** What differs between two objects of texts, as `{name, before, after}`; null where there is none. */
export function differences(before, after) {
  return [...new Set([...Object.keys(before), ...Object.keys(after)])]
    .map((name) => ({ name, before: before[name] ?? null, after: after[name] ?? null }))
    .filter((each) => each.before !== each.after);
}
