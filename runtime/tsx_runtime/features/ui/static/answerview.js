// Shows an answer: labelled bars, boxes and masks over the image, a table or text; and always the raw answer.

import { classify, fileOf, indented, placeOfMask } from "./answer.js";
import { h, s, table } from "./dom.js";
import { bytes, number, percent } from "./format.js";

const SHOWN_LABELS = 20;
const SHOWN_BOXES = 300;
const SHOWN_RAW = 60000; // characters
const COLORS = 8;
const PAINT = [[36, 87, 214], [214, 93, 14], [20, 140, 90], [190, 40, 90], [130, 80, 200], [0, 140, 170], [160, 120, 0], [90, 100, 110]];

/** `answer` is `{body: Blob, url, type, value, text, title}`, `image` the picture that was sent: `{url, width, height}`, or null. */
export function answerView(answer, image) {
  if (answer.type.startsWith("image/")) return h("div", {}, h("img", { class: "picture", alt: "The answer, an image", src: answer.url }), download(answer));
  if (answer.text === null) return h("p", {}, `${bytes(answer.body.size)} of binary data. `, download(answer));
  if (!answer.text) return h("p", { class: "quiet" }, "The answer is empty.");
  if (answer.value === undefined) return textView(answer);
  const found = classify(answer.value);
  return h("div", {}, VIEWS[found.kind]?.(found, image), raw(answer, found.kind === "value"));
}

function textView(answer) {
  const cut = answer.text.length > SHOWN_RAW;
  return h("div", {}, h("pre", { class: "text", tabindex: "0" }, cut ? answer.text.slice(0, SHOWN_RAW) : answer.text), cut && rest(answer));
}

function rest(answer) {
  return h("p", { class: "quiet" }, `The first ${number(SHOWN_RAW)} of ${number(answer.text.length)} characters. `, download(answer));
}

const VIEWS = {
  labels: bars,
  boxes: ({ boxes }, image) => {
    const shown = boxes.slice(0, SHOWN_BOXES);
    return h("div", {}, image && overlay(image, boxMarks(shown, image)), boxTable(shown), counted("boxes", shown.length, boxes.length));
  },
  mask: (found, image) => h("div", {}, maskFigure(found, image), legend(found)),
  table: ({ columns, rows, total, left }) => h("div", {}, table("The answer as a table", columns, rows), counted("rows", rows.length, total), counted("columns", columns.length, columns.length + left)),
  text: ({ text }) => h("pre", { class: "text", tabindex: "0" }, text.slice(0, SHOWN_RAW)),
};

function counted(what, shown, total) {
  return shown < total && h("p", { class: "quiet" }, `The first ${number(shown)} of ${number(total)} ${what}.`);
}

function bars({ labels }) {
  const items = labels.slice(0, SHOWN_LABELS).map(({ label, share }) => {
    const meter = h("div", { class: "fill" });
    meter.style.width = percent(share, 2).replace(" ", "");
    return h("li", {}, h("span", { class: "label" }, label), h("div", { class: "track", "aria-hidden": "true" }, meter), h("span", { class: "number" }, percent(share)));
  });
  return h("div", {}, h("ol", { class: "bars", "aria-label": "Labels, the most likely first" }, items), labels.length > SHOWN_LABELS && h("p", { class: "quiet" }, `${labels.length - SHOWN_LABELS} more labels are in the answer.`));
}

function overlay(image, marks) {
  // the model saw the pixels of the file as they lie in it, whatever its camera said of up and down
  const picture = h("img", { class: "picture asis", src: image.url, alt: "The image that was sent" });
  return h("div", { class: "overlay" }, picture, s("svg", { viewBox: `0 0 ${image.width} ${image.height}`, "aria-hidden": "true" }, marks));
}

function boxMarks(found, image) {
  const size = Math.max(image.width, image.height) / 26;
  return found.flatMap(({ box: [x1, y1, x2, y2], label, score }, place) => {
    const color = `c${place % COLORS}`;
    const text = score === null ? label : `${label} ${percent(score, 0)}`;
    return [
      s("rect", { class: `box ${color}`, x: x1, y: y1, width: Math.max(0, x2 - x1), height: Math.max(0, y2 - y1) }),
      s("text", { class: `mark ${color}`, x: x1 + size / 4, y: Math.max(size, y1 - size / 4), "font-size": size }, text),
    ];
  });
}

function boxTable(found) {
  const rows = found.map(({ box, label, score }) => [label, score === null ? "" : percent(score), box.map((side) => number(Math.round(side))).join(", ")]);
  return table("Detected objects", ["Label", "Score", "Left, top, right, bottom"], rows, [1]);
}

function maskFigure(found, image) {
  const canvas = h("canvas", { class: image ? "mask" : "mask alone", width: found.width, height: found.height });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(found.width, found.height);
  found.classes.flat().forEach((number, place) => {
    const [red, green, blue] = PAINT[number % COLORS];
    pixels.data.set([red, green, blue, number === 0 && image ? 0 : 200], 4 * place);
  });
  context.putImageData(pixels, 0, 0);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "The class of each pixel");
  if (!image) return canvas;
  const place = placeOfMask(found, image);
  canvas.style.left = `${(100 * place.x) / image.width}%`;
  canvas.style.top = `${(100 * place.y) / image.height}%`;
  canvas.style.width = `${(100 * place.width) / image.width}%`;
  canvas.style.height = `${(100 * place.height) / image.height}%`;
  return h("div", { class: "overlay" }, h("img", { class: "picture asis", src: image.url, alt: "The image that was sent" }), canvas);
}

function legend({ shares }) {
  return h("ul", { class: "legend" }, shares.slice(0, 20).map(({ number: name, share }) =>
    h("li", {}, h("span", { class: `swatch c${name % COLORS}` }), h("span", {}, `class ${name}`), h("b", {}, percent(share)))));
}

/** JSON as it came, but for the space between its values. */
export function raw(answer, open) {
  const cut = answer.text.length > SHOWN_RAW;
  const pretty = indented(answer.text.slice(0, SHOWN_RAW));
  return h("details", { class: "raw", open },
    h("summary", {}, `${answer.title ? `Raw ${answer.title.toLowerCase()}` : "Raw answer"},  ${bytes(answer.body.size)}`),
    h("pre", { tabindex: "0" }, cut ? `${pretty}\n…` : pretty),
    cut && rest(answer));
}

function download(answer) {
  return h("a", { href: answer.url, download: fileOf(answer) }, "Save it");
}
