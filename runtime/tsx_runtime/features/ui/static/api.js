// Calls to the server that this page came from, and to no other. The token stays in this tab's memory.

const PATIENCE = 10000; // ms for an answer to a question; what changes something may take as long as it takes
const ROOT = new URL("../", document.baseURI); // the management address, behind whatever prefix it is reached

export class Refused extends Error {
  constructor(status, type, message) {
    super(message);
    this.status = status;
    this.type = type;
  }

  get wantsToken() {
    return this.type === "InvalidKeyException" || this.status === 401;
  }
}

/** The server could not be reached, or ended in the middle. */
export class Unreachable extends Error {}

/** A value that the browser keeps; one that lets a page keep nothing has it until the page is left. */
export function kept(where, name) {
  try {
    const place = window[where];
    return { get: () => place.getItem(name), set: (value) => place.setItem(name, value), forget: () => place.removeItem(name) };
  } catch {
    let held = null;
    return { get: () => held, set: (value) => (held = value), forget: () => (held = null) };
  }
}

export const token = kept("sessionStorage", "tsx-token");

/** A path of segments, each of which may hold anything. */
export function path(...segments) {
  return segments.map(encodeURIComponent).join("/");
}

/** The response, whatever its status. */
export async function send(method, where, { query = {}, body, headers = {}, signal } = {}) {
  const url = new URL(where, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  const secret = token.get();
  if (secret) headers = { ...headers, Authorization: `Bearer ${secret}` };
  try {
    return await fetch(url, { method, body, headers, signal, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable(`the server does not answer: ${error.message}`);
  }
}

/** What an answer says of what went wrong, or undefined: tsx's own form, FastAPI's, and those that handlers have of it. */
export function saidBy(value) {
  const problems = Array.isArray(value?.detail) && value.detail.map((each) => `${[each?.loc].flat().join(".")}: ${each?.msg}`).join("\n");
  return [value?.message, value?.error?.message, value?.error, problems].find((each) => typeof each === "string" && each);
}

/** The JSON of an answer. Throws `Refused` with the server's message. */
export async function call(method, where, options = {}) {
  const response = await send(method, where, { ...options, signal: method === "GET" ? AbortSignal.timeout(PATIENCE) : undefined });
  let text;
  try {
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable(`the connection was lost: ${error.message}`);
  }
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    value = { message: text };
  }
  if (!response.ok) throw new Refused(response.status, value?.type ?? "", saidBy(value) ?? `HTTP ${response.status}`);
  return value;
}

export const get = (where, query) => call("GET", where, { query });

/** A call with a JSON body. */
export function put(method, where, value) {
  return call(method, where, { body: JSON.stringify(value), headers: { "Content-Type": "application/json" } });
}
