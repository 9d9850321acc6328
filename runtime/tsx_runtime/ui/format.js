// Numbers, sizes and times as people read them.

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value)) return value.toLocaleString("en", { maximumFractionDigits: 2 });
  return Math.round(value).toLocaleString("en");
}

/** `seconds` in the unit that fits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (!size) return "0 ms";
  if (size < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (size < 1) return `${(seconds * 1e3).toPrecision(3).replace(/\.0+$/, "")} ms`;
  return size < 100 ? `${seconds.toPrecision(3)} s` : `${Math.round(seconds)} s`;
}

export function bytes(size) {
  if (!size) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(size) / 10));
  const value = size / 1024 ** power;
  return `${power && value < 10 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A size that somebody wrote down in powers of ten. */
export function decimal(size) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log10(size) / 3)));
  const value = size / 1000 ** power;
  return `${power && value < 10 ? value.toFixed(1) : Math.round(value)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function percent(share, digits = 1) {
  return `${(100 * share).toFixed(digits)} %`;
}

export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export function since(seconds, now) {
  const passed = Math.max(0, now - seconds);
  if (passed < 90) return `${Math.round(passed)} s`;
  if (passed < 5400) return `${Math.round(passed / 60)} min`;
  return passed < 172800 ? `${Math.round(passed / 3600)} h` : `${Math.round(passed / 86400)} days`;
}
