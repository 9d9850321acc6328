// The shares of a model's versions as one bar, whose borders are sliders.

import { h } from "./dom.js";
import { number } from "./format.js";

const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -100, End: 100 };

/** `changed(shares)` is called with the shares in percent while a border moves. `update(versions, shares)`: both in their order. */
export function splitBar(changed) {
  const parts = h("div", { class: "parts" });
  const bar = h("div", { class: "split" }, parts);
  let versions = [], shares = [];

  function update(names, percents) {
    if (names.join("\n") !== versions.join("\n")) {
      versions = names;
      parts.replaceChildren(...names.map((name, place) => h("span", { class: `part c${place % 8}` }, h("span", {}, name), h("b", {}))));
      bar.replaceChildren(parts, ...names.slice(1).map((_, place) => border(place)));
    }
    shares = percents;
    let end = 0;
    names.forEach((name, place) => {
      const part = parts.children[place], slider = bar.children[place + 1];
      end += shares[place];
      part.style.width = `${shares[place]}%`;
      part.classList.toggle("narrow", shares[place] < 12);
      part.title = `version ${name}: ${number(shares[place])} %`;
      part.lastChild.textContent = `${number(shares[place])} %`;
      if (!slider) return;
      slider.style.left = `${end}%`;
      slider.setAttribute("aria-valuenow", String(Math.round(end)));
      slider.setAttribute("aria-valuetext", `${name}: ${number(shares[place])} %, ${names[place + 1]}: ${number(shares[place + 1])} %`);
    });
  }

  /** The border behind the version at `place`. It pushes others along. */
  function border(place) {
    const move = (to) => {
      const ends = shares.map((_, each) => shares.slice(0, each + 1).reduce((sum, share) => sum + share, 0));
      const target = Math.min(100, Math.max(0, Math.round(to)));
      const moved = ends.map((end, each) => (each === shares.length - 1 ? 100 : each === place ? target : each < place ? Math.min(end, target) : Math.max(end, target)));
      changed(moved.map((end, each) => Math.round(1e6 * (end - (moved[each - 1] ?? 0))) / 1e6));
    };
    const follow = (event) => {
      const box = bar.getBoundingClientRect();
      move((100 * (event.clientX - box.left)) / box.width);
    };
    const slider = h("span", { class: "border", role: "slider", tabindex: "0", "aria-label": `Border between ${versions[place]} and ${versions[place + 1]}`, "aria-valuemin": "0", "aria-valuemax": "100" });
    slider.addEventListener("keydown", (event) => {
      if (!(event.key in STEPS)) return;
      event.preventDefault();
      move(Number(slider.getAttribute("aria-valuenow")) + STEPS[event.key]);
    });
    slider.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      slider.focus();
      slider.setPointerCapture(event.pointerId);
      slider.addEventListener("pointermove", follow);
    });
    slider.addEventListener("lostpointercapture", () => slider.removeEventListener("pointermove", follow));
    return slider;
  }

  return { node: bar, update };
}

/** `shares` with another one at `place`, and the others in the proportion that they had: 100 together. */
export function withShare(shares, place, share) {
  const wanted = Math.min(100, Math.max(0, share));
  const others = shares.reduce((sum, each, at) => (at === place ? sum : sum + each), 0);
  const heir = shares.findIndex((_, at) => at !== place);
  return shares.map((each, at) => (at === place ? wanted : others ? (each / others) * (100 - wanted) : at === heir ? 100 - wanted : 0));
}
