// Facts of a part of the server that this page knows only by their names: a rollout, a shadow.

import { call } from "./api.js";
import { h, show, table } from "./dom.js";
import { number } from "./format.js";

/** Hidden while the server has nothing to tell there. */
export function factsPanel(title, where) {
  const place = h("div");
  const node = h("section", { class: "card", "aria-label": title, hidden: true }, h("h2", {}, title), place);
  let known = "";
  return {
    node,
    async load() {
      let facts = null;
      try {
        facts = await call("GET", where);
      } catch {
        facts = null; // there is none, or this server has no such thing
      }
      show(node, facts !== null);
      const text = JSON.stringify(facts);
      if (facts === null || text === known) return;
      known = text;
      place.replaceChildren(...drawn(facts, title));
    },
  };
}

function drawn(facts, title) {
  const plain = [], lists = [], inner = [];
  for (const [name, value] of Object.entries(facts)) {
    if (Array.isArray(value) && value.length && value.every((each) => typeof each === "object" && each !== null)) lists.push([name, value]);
    else if (value && typeof value === "object" && !Array.isArray(value)) inner.push([name, value]);
    else if (value !== null && value !== "" && !(Array.isArray(value) && !value.length)) plain.push([name, value]);
  }
  return [
    plain.length ? h("dl", { class: "tiles small" }, plain.map(([name, value]) => h("div", { class: "tile" }, h("dt", {}, words(name)), h("dd", {}, text(value))))) : null,
    ...inner.flatMap(([name, value]) => [h("h3", {}, words(name)), ...drawn(value, words(name))]),
    ...lists.flatMap(([name, rows]) => {
      const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
      return [h("h3", {}, words(name)), table(`${title}: ${words(name)}`, columns.map(words), rows.slice(-100).reverse().map((row) => columns.map((column) => text(row[column]))))];
    }),
  ].filter(Boolean);
}

function words(name) {
  const spaced = name.replaceAll("_", " ").replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
  return spaced.charAt(0).toUpperCase() + spaced.slice(1);
}

function text(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return Math.abs(value) > 1e9 && Math.abs(value) < 1e11 ? new Date(1000 * value).toLocaleTimeString() : number(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
