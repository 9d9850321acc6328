// The traffic rules of a model as sentences and as a form: which header sends a request to which version, in the order in which they apply.

import { h, show } from "./dom.js";

export function ruleText({ header, equals, matches, to }) {
  return `${header || "?"} ${matches === undefined || matches === null ? `is ${equals}` : `matches ${matches}`} → ${to || "?"}`;
}

/** `touch()` is called at each change. `put(rules)` shows rules, `take()` returns those in the form; empty rows are ignored. */
export function rulesForm(touch) {
  const rows = h("div", { class: "rules" });
  const none = h("p", { class: "quiet" }, "No rules: stickiness and weights choose the version.");
  const changed = () => {
    show(none, !rows.children.length);
    touch();
  };
  const add = h("button", { type: "button", class: "small", onclick: () => {
    rows.append(row({}, changed));
    changed();
    rows.lastChild.querySelector("input").focus();
  } }, "Add rule");
  const node = h("fieldset", { class: "group" }, h("legend", {}, "Rules"),
    h("p", { class: "quiet" }, "Rules apply before stickiness and weights. The first rule that matches decides."), none, rows, add);
  return {
    node,
    put(rules) {
      rows.replaceChildren(...rules.map((rule) => row(rule, changed)));
      show(none, !rules.length);
    },
    take: () => [...rows.children].map((each) => each.rule()).filter(Boolean),
  };
}

function row(rule, changed) {
  const text = (label, value, more = {}) => h("input", { value, "aria-label": label, autocomplete: "off", spellcheck: "false", class: "short", oninput: changed, ...more });
  const header = text("Header of the rule", rule.header ?? "", { placeholder: "X-Beta" });
  const how = h("select", { "aria-label": "How its value is compared", onchange: changed }, h("option", { value: "equals" }, "is"), h("option", { value: "matches" }, "matches"));
  how.value = rule.matches === undefined || rule.matches === null ? "equals" : "matches";
  const value = text("Value of the header", rule[how.value] ?? "");
  const to = text("Version or label of the rule", rule.to ?? "", { placeholder: "2.0" });
  const remove = h("button", { type: "button", class: "plain", "aria-label": "Remove this rule", onclick: () => {
    node.remove();
    changed();
  } }, "×");
  const node = h("div", { class: "row" }, h("span", { class: "quiet" }, "header"), header, how, value, h("span", { class: "quiet" }, "→ version"), to, remove);
  node.rule = () => (header.value.trim() || value.value || to.value.trim() ? { header: header.value.trim(), [how.value]: value.value, to: to.value.trim() } : null);
  return node;
}
