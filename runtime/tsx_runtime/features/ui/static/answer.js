// Detects the kind of an answer from its shape, which decides how it is shown. answerview.js draws it.

const MOST_LABELS = 1000;
const MOST_ROWS = 500;
const MOST_COLUMNS = 50;
const LONGEST_CELL = 200; // characters
const DEEPEST = 20; // levels that are indented

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isBox = (value) => Array.isArray(value) && value.length === 4 && value.every(isNumber);

/** The value of a JSON text. Whole numbers that JavaScript would round stay as they are written, as texts. */
export function parsed(text) {
  if (!/(?<![.\d])\d{16}/.test(text)) return JSON.parse(text);
  const exact = (value, source) => (Number.isInteger(value) && !Number.isSafeInteger(value) && source !== undefined ? source : value);
  return JSON.parse(text, (_, value, context) => exact(value, context?.source));
}

/** A JSON text, or the beginning of one, as people read it; every value stays as it is written. */
export function indented(text) {
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  return text.replace(/"(?:[^"\\]|\\.)*"|\s+|([{[])\s*([}\]])|[{[\]},:]/g, (found, open, close) => {
    if (close) return open + close;
    if (found === "{" || found === "[") return (depth += 1), found + line();
    if (found === "}" || found === "]") return (depth -= 1), line() + found;
    return found === "," ? found + line() : found === ":" ? ": " : found.trim();
  });
}

/** The name of the file that an answer is saved in. */
export function fileOf({ type, value, text }) {
  const picture = /^image\/([a-z0-9]+)/i.exec(type)?.[1];
  return `answer.${picture ?? (value !== undefined ? "json" : text !== null ? "txt" : "bin")}`;
}

/** `{kind, ...}`: labels, boxes, mask, table, text, value. */
export function classify(value) {
  return labels(value) ?? boxes(value) ?? mask(value) ?? table(value) ?? (typeof value === "string" ? { kind: "text", text: value } : { kind: "value" });
}

/** `{label: probability}`, as classifiers answer. */
function labels(value) {
  if (!isObject(value)) return null;
  const pairs = Object.entries(value);
  if (!pairs.length || pairs.length > MOST_LABELS || !pairs.every(([, share]) => isNumber(share) && share >= 0 && share <= 1)) return null;
  return { kind: "labels", labels: pairs.map(([label, share]) => ({ label, share })).sort((one, other) => other.share - one.share) };
}

/** Detected objects in an image. tsx's own detector names the box by its label: `[{"cat": [x1, y1, x2, y2], "score": 0.9}]`. */
function boxes(value) {
  if (isObject(value) && Array.isArray(value.boxes) && value.boxes.length && value.boxes.every(isBox)) {
    return { kind: "boxes", boxes: value.boxes.map((box, place) => ({ box, label: String(value.labels?.[place] ?? ""), score: value.scores?.[place] ?? null })) };
  }
  if (!Array.isArray(value) || !value.length || !value.every(isObject)) return null;
  const found = value.map(boxOf);
  return found.every(Boolean) ? { kind: "boxes", boxes: found } : null;
}

function boxOf(thing) {
  const score = [thing.score, thing.confidence, thing.probability].find(isNumber) ?? null;
  const named = thing.box ?? thing.bbox;
  if (isBox(named)) return { box: named, label: String(thing.label ?? thing.class ?? thing.name ?? ""), score };
  const [label, box] = Object.entries(thing).find(([, inner]) => isBox(inner)) ?? [];
  return label === undefined ? null : { box, label, score };
}

/** Rows of pixels: of each its class, or the class and its probability, as tsx's own segmenter answers. */
function mask(value) {
  if (!Array.isArray(value) || value.length < 8 || !Array.isArray(value[0]) || value[0].length < 8) return null;
  const width = value[0].length;
  const paired = Array.isArray(value[0][0]) && value[0][0].length === 2;
  const whole = (number) => Number.isInteger(number) && number >= 0;
  const isPixel = (pixel) => (paired ? Array.isArray(pixel) && whole(pixel[0]) && isNumber(pixel[1]) : whole(pixel));
  if (!value.every((row) => Array.isArray(row) && row.length === width && row.every(isPixel))) return null;
  const classes = value.map((row) => row.map((pixel) => (paired ? pixel[0] : pixel)));
  const counts = new Map();
  for (const number of classes.flat()) counts.set(number, (counts.get(number) ?? 0) + 1);
  if (counts.size > 300) return null;
  const shares = [...counts].map(([number, count]) => ({ number, share: count / (width * value.length) })).sort((one, other) => other.share - one.share);
  return { kind: "mask", classes, width, height: value.length, shares, paired };
}

function table(value) {
  if (!Array.isArray(value) || !value.length) return null;
  if (value.every(isObject)) {
    const found = value.slice(0, MOST_ROWS);
    const columns = [...new Set(found.flatMap((row) => Object.keys(row)))];
    const shown = columns.slice(0, MOST_COLUMNS);
    return { kind: "table", columns: shown, rows: found.map((row) => shown.map((column) => cell(row[column]))), total: value.length, left: columns.length - shown.length };
  }
  if (value.every((row) => Array.isArray(row) && row.length <= MOST_COLUMNS && row.every((each) => !Array.isArray(each) && !isObject(each)))) {
    const columns = value.reduce((most, row) => Math.max(most, row.length), 0);
    return { kind: "table", columns: Array.from({ length: columns }, (_, place) => String(place)), rows: value.slice(0, MOST_ROWS).map((row) => row.map(cell)), total: value.length, left: 0 };
  }
  return null;
}

function cell(value) {
  if (value === undefined || value === null) return "";
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return text.length > LONGEST_CELL ? `${text.slice(0, LONGEST_CELL)} …` : text;
}

/** Where in an image of that size the mask belongs. tsx's segmenter looks at the middle: 224 of 256 pixels of the shorter side. */
export function placeOfMask({ width, height, paired }, image) {
  if (!(paired && width === 224 && height === 224)) return { x: 0, y: 0, width: image.width, height: image.height };
  const side = (Math.min(image.width, image.height) * 224) / 256;
  return { x: (image.width - side) / 2, y: (image.height - side) / 2, width: side, height: side };
}

/** The stages of a `Server-Timing` header: `queue;dur=0.4, inference;dur=12`, in milliseconds. */
export function stages(header) {
  return (header ?? "").split(",").flatMap((part) => {
    const [name, ...more] = part.trim().split(";");
    const duration = more.map((each) => each.trim()).find((each) => each.startsWith("dur="));
    return name && duration && isNumber(Number(duration.slice(4))) ? [{ name, seconds: Number(duration.slice(4)) / 1000 }] : [];
  });
}
