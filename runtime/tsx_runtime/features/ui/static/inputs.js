// The ways to give a model its input: a picture from a file, the clipboard or the camera; text; JSON; any file.

import { cameraButton } from "./camera.js";
import { field, h, say, show, takesFiles } from "./dom.js";
import { fieldsInput } from "./fields.js";
import { bytes } from "./format.js";

const JSON_TYPE = "application/json";
const TEXT_TYPE = "text/plain; charset=utf-8";
const ANY_TYPE = "application/octet-stream";

/** Each returns `node` and `take()`: `{body, type, name, text}`, or a text that says what is missing (that of `fields` is a promise of it); and `put(file, name)`, or `put(text)`. */
export function inputs(changed) {
  return { fields: fieldsInput(), image: fileInput("image", changed), text: textInput(), json: jsonInput(), file: fileInput("file", changed) };
}

function textInput() {
  const area = h("textarea", { rows: "5" });
  return {
    node: field("Text", area),
    take: () => (area.value ? { body: area.value, type: TEXT_TYPE, name: null, text: area.value } : "Type some text first."),
    put: (text) => (area.value = text),
    isEmpty: () => !area.value,
  };
}

function jsonInput() {
  const area = h("textarea", { rows: "7", class: "code", spellcheck: "false", oninput: () => check() });
  const problem = h("p", { class: "problem", "aria-live": "polite" });
  const check = () => {
    try {
      JSON.parse(area.value);
      say(problem, "");
      return true;
    } catch (error) {
      say(problem, area.value ? `Not JSON yet: ${error.message}` : "");
      return false;
    }
  };
  return {
    node: h("div", {}, field("JSON", area), problem),
    text: () => area.value,
    take: () => (check() ? { body: area.value, type: JSON_TYPE, name: null, text: area.value } : area.value ? "Correct the JSON first." : "Type some JSON first."),
    put: (text) => {
      area.value = text;
      check();
    },
    isEmpty: () => !area.value,
  };
}

/** For pictures it shows them; `changed` is called when there is another. */
function fileInput(kind, changed) {
  const isImage = kind === "image";
  let held = null; // {body, type, name, image}
  const picker = h("input", { type: "file", accept: isImage && "image/*", onchange: () => picker.files[0] && put(picker.files[0]) });
  const preview = h("img", { class: "picture preview", alt: isImage ? "The image to be sent" : "The file to be sent", hidden: true });
  const status = h("p", { class: "quiet", "aria-live": "polite" }, isImage ? "Drop an image here, paste one, or choose a file." : "Drop a file here, or choose one.");
  const camera = isImage ? cameraButton((file) => put(file)) : null;
  const zone = h("div", { class: "drop" }, field(isImage ? "Image" : "File", picker), camera?.node, status, preview);
  async function put(file, name = file.name) {
    if (held?.image) URL.revokeObjectURL(held.image.url);
    held = { body: file, type: file.type || ANY_TYPE, name, text: null, image: null };
    say(status, `${name}, ${bytes(file.size)}`);
    if (file.type.startsWith("image/")) held.image = await measured(file);
    show(preview, held.image);
    if (held.image) preview.src = held.image.url;
    changed();
  }
  return { node: takesFiles(zone, (file) => put(file)), put, take: () => held ?? (isImage ? "Choose an image first." : "Choose a file first."), close: () => camera?.close() };
}

/** Whether a file is still what it was when it was chosen, and no directory: the browser would only say that the request failed. */
export async function isReadable(body) {
  try {
    await new Blob([body]).slice(0, 1).arrayBuffer();
    return true;
  } catch {
    return false;
  }
}

/** Its size in the pixels that lie in the file, or null where the browser cannot read it. */
async function measured(file) {
  try {
    const bitmap = await createImageBitmap(file, { imageOrientation: "none" });
    const image = { url: URL.createObjectURL(file), width: bitmap.width, height: bitmap.height };
    bitmap.close();
    return image;
  } catch {
    return null;
  }
}
