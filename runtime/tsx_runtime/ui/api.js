// Calls to the server that this page came from, and to no other. The token stays in this tab's memory.

const TOKEN = "tsx-token";
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

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};

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

/** The JSON of an answer. Throws `Refused` with the server's own words. */
export async function call(method, where, options = {}) {
  const response = await send(method, where, options);
  let text;
  try {
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable(`the server broke off: ${error.message}`);
  }
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    value = { message: text };
  }
  if (!response.ok) throw new Refused(response.status, value?.type ?? "", value?.message ?? value?.error ?? `HTTP ${response.status}`);
  return value;
}

export const get = (where, query) => call("GET", where, { query });

/** A call with a JSON body. */
export function put(method, where, value) {
  return call(method, where, { body: JSON.stringify(value), headers: { "Content-Type": "application/json" } });
}
