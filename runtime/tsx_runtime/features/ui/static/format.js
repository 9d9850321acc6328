// Numbers, sizes and times as people read them.

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: size < 10 ? 2 : size < 100 ? 1 : 0 });
}

/** `seconds` in the unit that fits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (!size) return "0 ms";
  if (size < 0.0009995) return `${Math.round(seconds * 1e6)} µs`;
  if (size < 0.9995) return `${short(seconds * 1e3)} ms`;
  return size < 99.95 ? `${short(seconds)} s` : `${Math.round(seconds)} s`;
}

const short = (value) => value.toPrecision(3).replace(/\.0+$/, "");

export function bytes(size) {
  if (!size) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(size) / 10));
  const value = size / 1024 ** power;
  return `${power && value < 10 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A size that was written in powers of ten. */
export function decimal(size) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log10(size) / 3)));
  const value = size / 1000 ** power;
  return `${power && value < 10 ? value.toFixed(1) : Math.round(value)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function percent(share, digits = 1) {
  return `${(100 * share).toFixed(digits)} %`;
}

/** The time of day, with its date where that is not today's. */
export function clock(seconds) {
  const at = new Date(1000 * seconds);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("sv")} ${time}`;
}

export function since(seconds, now) {
  return span(Math.max(0, now - seconds));
}

/** A time as people say it. */
export function span(passed) {
  if (passed < 90) return `${Math.round(passed)} s`;
  if (passed < 5400) return `${Math.round(passed / 60)} min`;
  return passed < 172800 ? `${Math.round(passed / 3600)} h` : `${Math.round(passed / 86400)} days`;
}
