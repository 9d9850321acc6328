// Dialogs with the user: notes, confirmations, the token; and actions that end with one of these.

import { call, kept, Refused, token } from "./api.js";
import { field, h, newId, show } from "./dom.js";
import { refresh } from "./live.js";

const SHORT = 6000; // ms that good news stays
const snippet = kept("localStorage", "tsx-snippet"); // the tab of code that was chosen last

/** A line at the lower edge; an error stays until it is put away. */
export function note(text, bad = false) {
  const close = h("button", { class: "plain", "aria-label": "Dismiss this message", onclick: () => node.remove() }, "×");
  const node = h("div", { class: bad ? "note bad" : "note" }, h("span", {}, text), close);
  document.getElementById("notes").append(node);
  if (!bad) setTimeout(() => node.remove(), SHORT);
}

/** Do something to the server: its words are shown, `button` rests meanwhile, and what changed is seen at once. Whether it was done. */
export async function act(button, method, where, query = {}, done = null) {
  button.disabled = true;
  button.setAttribute("aria-busy", "true");
  try {
    const reply = await call(method, where, { query });
    note(done ?? reply?.status ?? "Done.");
    return true;
  } catch (error) {
    note(firstLines(error.message), true);
    return false;
  } finally {
    button.disabled = false;
    button.removeAttribute("aria-busy");
    refresh();
  }
}

export function firstLines(text, most = 600) {
  return text.length > most ? `${text.slice(0, most)} …` : text;
}

/** Whether the user agrees. Escape is a no. */
export function ask(question, yes) {
  return new Promise((answer) => {
    const title = newId();
    const dialog = h("dialog", { "aria-labelledby": title, onclose: () => (dialog.remove(), answer(dialog.returnValue === "yes")) },
      h("p", { id: title }, question),
      h("div", { class: "row end" },
        h("button", { onclick: () => dialog.close("no") }, "Cancel"),
        h("button", { class: "danger", onclick: () => dialog.close("yes") }, yes)));
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Have the user type the management token until the server takes it. */
export function askToken(why) {
  if (document.getElementById("login")) return;
  const input = h("input", { type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const problem = h("p", { class: "problem", role: "alert" }, token.get() ? why : "");
  const title = newId();
  const enter = async (event) => {
    event.preventDefault();
    const typed = input.value.trim();
    if (!/^[!-~]+$/.test(typed)) return (problem.textContent = "A token contains only ASCII letters, digits and punctuation, and no spaces.");
    token.set(typed);
    try {
      await call("GET", "ui/api/store");
      dialog.close();
      dialog.remove();
      refresh();
    } catch (error) {
      token.forget();
      problem.textContent = error instanceof Refused ? "The server rejects this token." : error.message;
      input.select();
    }
  };
  const dialog = h("dialog", { id: "login", "aria-labelledby": title, oncancel: (event) => event.preventDefault(), onclose: () => dialog.isConnected && dialog.showModal() }, // a second Escape closes it all the same
    h("form", { onsubmit: enter },
      h("h2", { id: title }, "This server requires a token"),
      h("p", { class: "quiet" }, "Enter the management token: the setting management_token, or “management” in the key file that the server named when it started. The token stays in this tab."),
      field("Management token", input), problem,
      h("div", { class: "row end" }, h("button", { class: "primary", type: "submit" }, "Open"))));
  document.body.append(dialog);
  dialog.showModal();
}

/** A command with a button that copies it. */
export function commandLine(command, label) {
  return h("div", { class: "command" }, h("pre", { tabindex: "0", "aria-label": label }, command), copyButton(() => command, `the command: ${label}`));
}

/** A paragraph about something that is missing, and the command that provides it. */
export function advice(text, command, label) {
  return [h("p", { class: "quiet" }, text), command && commandLine(command, label)];
}

/** A button that copies what `text()` gives. */
export function copyButton(text, label) {
  const button = h("button", { class: "small", "aria-label": `Copy ${label}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      note("The browser does not let this page copy; select the text instead.", true);
      return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  } }, "Copy");
  return button;
}

/** `found`: `[label, text]` of each tab, of which the one that was chosen last is open. */
export function codeTabs(found) {
  const panels = found.map(([label, text]) => h("div", { class: "snippet", role: "tabpanel", id: newId(), "aria-label": label }, copyButton(() => text, `the line for ${label}`), h("pre", { tabindex: "0", "data-for": label }, text)));
  const tabs = found.map(([label], place) => h("button", { type: "button", role: "tab", "aria-controls": panels[place].id, onclick: () => choose(place, true), onkeydown: (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) tabs[choose((place + step + tabs.length) % tabs.length, true)].focus();
  } }, label));
  const choose = (place, asked) => {
    if (asked) snippet.set(found[place][0]);
    tabs.forEach((tab, at) => {
      tab.setAttribute("aria-selected", String(at === place));
      tab.tabIndex = at === place ? 0 : -1;
      show(panels[at], at === place);
    });
    return place;
  };
  choose(Math.max(0, found.findIndex(([label]) => label === snippet.get())), false);
  return [h("div", { class: "snippets", role: "tablist", "aria-label": "Code for this request" }, tabs), ...panels];
}
