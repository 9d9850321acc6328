// The samples that an archive brings along, as pictures and first words.

import { path, send } from "./api.js";
import { h, show } from "./dom.js";
import { bytes } from "./format.js";
import { note } from "./talk.js";

const SHOWN = 24; // samples
const LARGEST = 4 << 20; // bytes that are fetched to be shown
const EDITED = 100_000; // bytes of a text that is put into a field
const KINDS = [[/^image\//, "image"], [/^application\/json/, "json"], [/^text\//, "text"]];

/** Returns the kind of the first sample, if there is one. `chosen(file, kind)` is called with the sample that is clicked, `offered(text, kind)` with each that is a short text. */
export async function sampleButtons(place, model, version, chosen, offered) {
  const base = `ui/api/samples/${path(model, version)}`;
  const response = await send("GET", base);
  const found = response.ok ? await response.json() : [];
  show(place, found.length);
  place.querySelectorAll("img").forEach((image) => URL.revokeObjectURL(image.src));
  place.replaceChildren(...(found.length ? [h("legend", {}, "Samples")] : []), ...found.slice(0, SHOWN).map((sample) => button(sample, base, chosen, offered)));
  return found.length ? kindOf(found[0]) : null;
}

const kindOf = ({ type, size }) => KINDS.find(([pattern]) => pattern.test(type) && (pattern.source.includes("image") || size <= EDITED))?.[1] ?? "file";

function button({ name, type, size }, base, chosen, offered) {
  const kind = kindOf({ type, size });
  const picture = h("span", { class: "picture-of", "aria-hidden": "true" }, bytes(size));
  let file = null;
  const fetched = () => (file ??= send("GET", `${base}/${path(name)}`).then(async (answer) => {
    if (!answer.ok) throw new Error(`${name} cannot be read any more.`);
    return new File([await answer.arrayBuffer()], name, { type });
  }));
  const preview = async (found) => {
    if (kind === "image") return picture.replaceChildren(h("img", { src: URL.createObjectURL(found), alt: "" }));
    const text = await found.text();
    picture.replaceChildren(text.slice(0, 60));
    offered(text, kind);
  };
  if (kind !== "file" && size <= LARGEST) fetched().then(preview, () => {});
  return h("button", { class: "sample", type: "button", title: `${name}, ${bytes(size)}`, onclick: () => fetched().then((found) => chosen(found, kind), (error) => {
    file = null;
    note(error.message, true);
  }) }, picture, h("span", { class: "caption" }, name));
}
