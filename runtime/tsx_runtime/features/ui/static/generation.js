// Charts of text generation: times to the first and per output token, tokens, sequences, and the engine's cache.

import { chart } from "./chart.js";
import { h, show } from "./dom.js";
import { pointsOf } from "./figures.js";
import { duration, number } from "./format.js";
import { live } from "./live.js";

/** Each with its lines: of one version all of them, of several the first of each. The places are those of a point's `generation`. */
const CHARTS = [
  ["Time to first token", duration, { least: 0.004 }, [["p99", 1, 1], ["p50", 0, 0]]],
  ["Time per output token", duration, { least: 0.004 }, [["p99", 3, 1], ["p50", 2, 0]]],
  ["Tokens per second", number, { least: 4 }, [["out", 5, 0], ["in", 4, 1]]],
  ["Sequences", number, { whole: true, least: 4 }, [["running", 6, 0], ["waiting", 7, 1]]],
  ["Cache use", (share) => (share === null ? "–" : `${number(100 * share)} %`), { least: 0.04 }, [["in use", 8, 0]]],
];

/** Shown where a version reports such metrics; `update(name, versions, span)`, with the versions that have a line. */
export function generationCharts() {
  const made = CHARTS.map(([title, format, options, lines]) => ({ lines, chart: chart(title, format, options) }));
  const node = h("section", { class: "generation", hidden: true }, h("h2", {}, "Text generation"), h("div", { class: "charts" }, made.map((each) => each.chart.node)));
  return {
    node,
    update(name, versions, span) {
      const able = versions.map(({ version }, color) => ({ version, color, points: pointsOf(name, version) })).filter(({ points }) => points.at(-1)?.generation);
      show(node, able.length);
      for (const { lines, chart } of made) {
        const drawn = able.length > 1 ? able.map((each) => ({ ...each, name: `${each.version} ${lines[0][0]}`, value: of(lines[0][1]) })) : lines.map(([line, place, color]) => ({ name: line, color, points: able[0]?.points ?? [], value: of(place) }));
        if (able.length) chart.update(drawn, live.newest, span);
      }
    },
  };
}

const of = (place) => (point) => point.generation?.[place] ?? null;
