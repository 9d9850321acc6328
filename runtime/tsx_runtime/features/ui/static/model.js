// The view of one model: its title and its tabs.

import { h, say, show } from "./dom.js";
import { errorsTab } from "./errors.js";
import { chip, errorsLately, errorsLink, pointsOfModel, stateOf, workersText } from "./figures.js";
import { live, model as find } from "./live.js";
import { metricsTab } from "./metrics.js";
import { monitorTab } from "./monitor.js";
import { overviewTab } from "./overview.js";
import { playgroundTab } from "./playground.js";
import { trafficTab } from "./traffic.js";

export const TABS = {
  try: ["Playground", playgroundTab],
  overview: ["Overview", overviewTab],
  traffic: ["Traffic", trafficTab],
  monitor: ["Monitoring", monitorTab],
  errors: ["Errors and log", errorsTab],
  metrics: ["Metrics", metricsTab],
};

export function modelView(name) {
  const state = chip(), failing = errorsLink();
  const last = h("p", { class: "problem", hidden: true });
  const about = h("span", { class: "quiet" });
  const links = Object.entries(TABS).map(([tab, [label]]) =>
    [tab, h("a", { href: `#/model/${encodeURIComponent(name)}/${tab}` }, label)]);
  const tabs = h("nav", { class: "tabs", "aria-label": `Sections of ${name}` }, links.map(([, link]) => link));
  const place = h("div");
  const why = h("span", {}, "No model with this name is registered.");
  const gone = h("p", { class: "card", hidden: true }, why, " ", h("a", { href: "#/" }, "All models"));
  const node = h("div", {},
    h("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, h("a", { href: "#/" }, "Models"), " / ", name),
    h("div", { class: "row" }, h("h1", {}, name), state.node, failing.node, about),
    last,
    gone,
    tabs, place);
  const made = new Map();
  let current = null;
  return {
    node,
    /** `detail` is for the tab: what it is to show first. */
    select(tab, detail) {
      if (tab !== current) {
        made.get(current)?.rest?.();
        current = tab;
        if (!made.has(tab)) made.set(tab, TABS[tab][1](name));
        for (const [own, link] of links) {
          if (own === tab) {
            link.setAttribute("aria-current", "page");
            link.scrollIntoView({ block: "nearest", inline: "nearest" });
          } else link.removeAttribute("aria-current");
        }
        place.replaceChildren(made.get(tab).node);
        made.get(tab).wake?.();
      }
      made.get(tab).open?.(detail);
    },
    update() {
      const now = find(name);
      show(gone, !now);
      show(state.node, now);
      show(about, now);
      show(tabs, now);
      show(place, now);
      if (!now) return;
      say(why, "This model is no longer registered.");
      const share = errorsLately(pointsOfModel(now)), error = now.versions.find(({ lastError }) => lastError)?.lastError;
      state.update(stateOf(now), share);
      failing.update(name, share, now.versions);
      const failed = now.versions.find((each) => each.failedReplacement)?.failedReplacement;
      show(last, failed || (share > 0 && error));
      say(last, failed || `Last error: ${error?.text}`);
      const count = now.versions.length;
      const parts = [`${count === 1 ? "version" : `${count} versions, default`} ${now.default}`, `workers ${workersText(now.versions)}`, now.workflow && `a node of workflow ${now.workflow}`];
      say(about, parts.filter(Boolean).join(" · "));
      made.get(current)?.update?.(now, live.state.server);
    },
    close() {
      for (const tab of made.values()) (tab.close ?? tab.rest)?.();
    },
  };
}
