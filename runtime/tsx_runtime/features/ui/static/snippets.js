// Code that repeats a request outside this page: for curl, Python with and without `requests`, JavaScript, Go, and `tsx predict`.

const LONGEST = 2000; // characters of a text that stands in a line

/** What stands for any text in a shell. */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Whether the request stands in the lines themselves; else they read it from the file `fileOf(request)`. */
export function isInline({ text }) {
  return text !== null && text.length <= LONGEST;
}

/** One that begins with a dash would be taken for an option. */
export function fileOf({ name }) {
  return `${name?.startsWith("-") ? "./" : ""}${name || "input.txt"}`;
}

/**
 * `request` is `{model, version, type, name, text, output, later}`: with `text`, that is what is sent, else the file `name`.
 * `output` is the file for an answer that is not text.
 */
export function snippets(request, server, host) {
  const address = server.inference;
  const socket = address.startsWith("unix:") ? address.replace(/^unix:(\/\/)?/, "") : null;
  const url = socket ? "http://localhost" : reachable(address, host);
  const path = `/predictions/${[request.model, request.version].filter(Boolean).map(encodeURIComponent).join("/")}`;
  const parts = { ...request, inline: isInline(request), url, path, socket, token: server.inferenceToken, file: fileOf(request) };
  return [["curl", curl(parts)], ...(socket ? [] : [["requests", requests(parts)], ["urllib", urllib(parts)], ["JavaScript", javascript(parts)], ["Go", go(parts)]]), ...(request.later ? [] : [["tsx", tsx(parts, address)]])];
}

/** `body` is a request of OpenAI's API to `path`: for curl, and for Python's openai client. */
export function chatSnippets(body, path, server, host) {
  const { inference: address, inferenceToken: token } = server;
  const socket = address.startsWith("unix:") ? address.replace(/^unix:(\/\/)?/, "") : null;
  const url = socket ? "http://localhost" : reachable(address, host);
  const parts = (sent) => ({ socket, url, path, type: "application/json", token, inline: true, text: JSON.stringify(sent) });
  const whole = parts({ ...body, stream: false });
  return [["curl", curl(parts(body)).replace("curl ", "curl -N ")], ...(socket ? [] : [["openai", openai(body, path, url, token)], ["JavaScript", javascript(whole)], ["Go", go(whole)]])];
}

function openai(body, path, url, token) {
  const [method, text] = path.endsWith("chat/completions") ? ["chat.completions", "delta.content or \"\""] : ["completions", "text"];
  const values = Object.entries(body).map(([key, value]) => `    ${key}=${value === true ? "True" : JSON.stringify(value)},`);
  return [...(token ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(`${url}/v1`)}, api_key=${token ? "os.environ[\"TSX_INFERENCE_TOKEN\"]" : "\"none\""})`,
    `stream = client.${method}.create(`, ...values, ")", "for event in stream:", `    print(event.choices[0].${text}, end="", flush=True)`].join("\n");
}

/** An address that listens everywhere is reached by the name that this page was reached by. */
export function reachable(address, host) {
  return address.replace(/\/\/(0\.0\.0\.0|\[::\])(?=[:/]|$)/, `//${host}`).replace(/\/$/, "");
}

function curl({ socket, url, path, type, token, inline, text, file, output, later }) {
  const words = ["curl", ...(socket ? ["--unix-socket", quoted(socket)] : []), quoted(url + path), "-H", quoted(`Content-Type: ${type}`)];
  if (token) words.push("-H", '"Authorization: Bearer $TSX_INFERENCE_TOKEN"');
  if (later) words.push("-i", "-H", quoted("Prefer: respond-async"));
  words.push(...(inline ? ["--data-raw", quoted(text)] : ["--data-binary", quoted(`@${file}`)]));
  if (output) words.push("-o", quoted(output));
  return words.join(" ");
}

function requests({ output, ...parts }) {
  return [...preamble(parts, "requests"), `answer = requests.post(${addressOf(parts)}, data=data, headers=headers)`, "answer.raise_for_status()", ...ending("answer.content", output)].join("\n");
}

function urllib({ output, ...parts }) {
  return [...preamble(parts, "urllib.request"), `request = urllib.request.Request(${addressOf(parts)}, data, headers)`, "answer = urllib.request.urlopen(request).read()", ...ending("answer", output)].join("\n");
}

const addressOf = ({ url, path }) => JSON.stringify(url + path);
const ending = (answer, output) => [output ? `open(${JSON.stringify(output)}, "wb").write(${answer})` : `print(${answer}.decode())`];

function preamble({ type, token, inline, text, file, later }, library) {
  const data = inline ? `${JSON.stringify(text)}.encode()` : `open(${JSON.stringify(file)}, "rb").read()`;
  const headers = [`"Content-Type": ${JSON.stringify(type)}`, ...(token ? ['"Authorization": f"Bearer {os.environ[\'TSX_INFERENCE_TOKEN\']}"'] : []), ...(later ? ['"Prefer": "respond-async"'] : [])];
  return [...(token ? ["import os"] : []), `import ${library}`, "", `data = ${data}`, `headers = {${headers.join(", ")}}`];
}

/** A module, for Node and Deno; for a page as well where no file is read or written. */
function javascript({ type, token, inline, text, file, output, later, ...parts }) {
  const files = [...(inline ? [] : ["readFile"]), ...(output ? ["writeFile"] : [])];
  const headers = [`"Content-Type": ${JSON.stringify(type)}`, ...(token ? ["Authorization: `Bearer ${process.env.TSX_INFERENCE_TOKEN}`"] : []), ...(later ? ['Prefer: "respond-async"'] : [])];
  return [...(files.length ? [`import { ${files.join(", ")} } from "node:fs/promises";`, ""] : []),
    `const answer = await fetch(${addressOf(parts)}, {`, '  method: "POST",', `  headers: { ${headers.join(", ")} },`,
    `  body: ${inline ? JSON.stringify(text) : `await readFile(${JSON.stringify(file)})`},`, "});", "if (!answer.ok) throw new Error(await answer.text());",
    output ? `await writeFile(${JSON.stringify(output)}, Buffer.from(await answer.arrayBuffer()));` : "console.log(await answer.text());"].join("\n");
}

function go({ type, token, inline, text, file, output, later, ...parts }) {
  const word = (value) => JSON.stringify(value).replaceAll("\ufeff", "\\ufeff"); // no Go source may hold this one
  const headers = [["Content-Type", word(type)], ...(token ? [["Authorization", '"Bearer "+os.Getenv("TSX_INFERENCE_TOKEN")']] : []), ...(later ? [["Prefer", '"respond-async"']] : [])];
  const check = ["\tif err != nil {", "\t\tlog.Fatal(err)", "\t}"];
  return ["package main", "", "import (", ...["bytes", "io", "log", "net/http", "os"].map((name) => `\t"${name}"`), ")", "", "func main() {",
    ...(inline ? [`\tdata := []byte(${word(text)})`] : [`\tdata, err := os.ReadFile(${word(file)})`, ...check]),
    `\trequest, err := http.NewRequest("POST", ${addressOf(parts)}, bytes.NewReader(data))`, ...check,
    ...headers.map(([name, value]) => `\trequest.Header.Set("${name}", ${value})`), "\tanswer, err := http.DefaultClient.Do(request)", ...check,
    "\tdefer answer.Body.Close()", "\tbody, err := io.ReadAll(answer.Body)", ...check, "\tif answer.StatusCode >= 400 {", "\t\tlog.Fatal(string(body))", "\t}",
    output ? `\tif err := os.WriteFile(${word(output)}, body, 0o644); err != nil {\n\t\tlog.Fatal(err)\n\t}` : "\tos.Stdout.Write(body)", "}"].join("\n");
}

function tsx({ model, version, url, type, inline, text, file, socket, output }, address) {
  const words = ["tsx", "predict", quoted(model), inline ? "-" : quoted(file)];
  if (version) words.push("--version", quoted(version));
  words.push("--content-type", quoted(type), "--url", quoted(socket ? address : url));
  if (output) words.push("--output", quoted(output));
  return inline ? `printf %s ${quoted(text)} | ${words.join(" ")}` : words.join(" ");
}
