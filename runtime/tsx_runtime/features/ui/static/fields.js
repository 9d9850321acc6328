// The fields of a model with a signature: one for each property of the JSON schema of its input.

import { h, newId, say } from "./dom.js";
import { bytes } from "./format.js";

const NAMES = { integer: "integer", number: "number", string: "text", boolean: "true or false", array: "JSON list", object: "JSON object" };

/** The definition that a schema refers to, or its only alternative to null. */
function resolved(schema, root) {
  if (schema.$ref) return resolved({ ...root.$defs?.[schema.$ref.replace("#/$defs/", "")], ...(("default" in schema) && { default: schema.default }) }, root);
  const options = (schema.anyOf ?? schema.oneOf ?? []).filter(({ type }) => type !== "null");
  return options.length === 1 ? { ...resolved(options[0], root), ...Object.fromEntries(Object.entries(schema).filter(([key]) => !["anyOf", "oneOf"].includes(key))) } : schema;
}

/** A way to give an input, as in inputs.js. `use(signature)` tells whether the model takes fields, and `fail(detail)` shows the errors of a 422 at them. */
export function fieldsInput() {
  const node = h("div", {});
  const rows = new Map();
  let known = "", others = {};
  const put = (text) => {
    try {
      others = { ...JSON.parse(text) };
    } catch {
      return; // It stays as it is until the JSON is correct.
    }
    for (const [name, row] of rows) {
      row.put(others[name]);
      delete others[name];
    }
  };
  return {
    node,
    put,
    use(signature) {
      const schema = signature ? resolved(signature.input, signature.input) : {};
      const properties = Object.entries(schema.properties ?? {});
      if (JSON.stringify(signature) !== known) {
        known = JSON.stringify(signature);
        rows.clear();
        for (const [name, property] of properties) rows.set(name, fieldRow(name, resolved(property, signature.input), (schema.required ?? []).includes(name)));
        node.replaceChildren(h("p", { class: "quiet small" }, `${signature?.description.split("\n")[0] ?? ""} Fields with * are required.`.trim()), ...[...rows.values()].map((row) => row.node));
        put(JSON.stringify({ ...Object.fromEntries(properties.map(([name, property]) => [name, property.default])), ...signature?.example }));
      }
      return properties.length > 0;
    },
    async take() {
      const value = { ...others };
      for (const [name, row] of rows) {
        try {
          const taken = await row.take();
          if (taken !== undefined) value[name] = taken;
        } catch (error) {
          row.fail(error.message);
          return `Correct ${name} first.`;
        }
      }
      const text = JSON.stringify(value);
      return { body: text, type: "application/json", name: null, text };
    },
    fail(detail) {
      const failed = new Set();
      for (const row of rows.values()) row.fail("");
      for (const problem of Array.isArray(detail) ? detail : []) {
        const [name, ...inner] = [problem?.loc ?? []].flat().filter((part, place) => place || part !== "body");
        if (!rows.has(name)) continue;
        rows.get(name).fail([...inner, problem.msg].join(": "));
        failed.add(name);
      }
      rows.get([...rows.keys()].find((name) => failed.has(name)))?.focus();
    },
  };
}

function fieldRow(name, schema, isRequired) {
  const control = controlOf(schema, isRequired);
  const label = h("label", { for: control.input.id = newId() }, name, isRequired && " *");
  const hint = h("small", { id: newId(), class: "quiet" });
  const problem = h("p", { id: newId(), class: "problem" });
  control.input.setAttribute("aria-describedby", `${hint.id} ${problem.id}`);
  if (isRequired && control.input.type !== "checkbox") control.input.setAttribute("aria-required", "true");
  return {
    node: h("div", { class: "field" }, label, control.input, hint, problem),
    take: control.take,
    put(value) {
      control.put(value);
      say(hint, [schema.description, control.isFile ? `file${value ? `, ${bytes(value.length * 3 / 4)} given` : ""}` : !schema.enum && NAMES[schema.type]].filter(Boolean).join(" · "));
    },
    focus: () => control.input.focus(),
    fail(text) {
      say(problem, text);
      control.input.setAttribute("aria-invalid", String(Boolean(text)));
    },
  };
}

/** `take()` gives the value, or undefined for one that is not sent; it throws for one that is not correct. */
function controlOf(schema, isRequired) {
  const choices = schema.enum ?? (schema.type === "boolean" && !isRequired && typeof schema.default !== "boolean" ? [true, false] : null);
  if (choices) {
    const input = h("select", {}, !isRequired && h("option", { value: "" }, "not set"), choices.map((choice) => h("option", { value: JSON.stringify(choice) }, String(choice))));
    return { input, take: () => (input.value ? JSON.parse(input.value) : undefined), put: (value) => (input.value = choices.includes(value) ? JSON.stringify(value) : isRequired ? JSON.stringify(choices[0]) : "") };
  }
  if (schema.type === "boolean") {
    const input = h("input", { type: "checkbox" });
    return { input, take: () => input.checked, put: (value) => (input.checked = value === true) };
  }
  if (schema.contentEncoding || schema.contentMediaType) return fileControl(schema);
  if (schema.type === "string") {
    const input = h("textarea", { rows: "2" });
    return { input, take: () => (input.value || isRequired ? input.value : undefined), put: (value) => (input.value = value ?? "") };
  }
  const isNumber = ["integer", "number"].includes(schema.type);
  const input = isNumber ? h("input", { type: "number", step: schema.type === "integer" ? "1" : "any" }) : h("textarea", { rows: "2", class: "code", spellcheck: "false" });
  return {
    input,
    take() {
      if (input.validity.badInput) throw new Error("Not a number.");
      return input.value ? JSON.parse(input.value) : undefined;
    },
    put: (value) => (input.value = value === undefined || value === null ? "" : JSON.stringify(value)),
  };
}

/** A file, which the JSON has as base64. */
function fileControl(schema) {
  let read; // gives the base64
  const input = h("input", { type: "file", accept: schema.contentMediaType?.startsWith("image/") && "image/*", onchange: () => {
    const [file] = input.files;
    read = file && (() => base64(file));
  } });
  return { input, isFile: true, take: () => read?.(), put(value) {
    input.value = "";
    read = value && (() => value);
  } };
}

async function base64(file) {
  const reader = new FileReader();
  await new Promise((done, fail) => {
    reader.onload = done;
    reader.onerror = () => fail(new Error(`${file.name} cannot be read: choose it again.`));
    reader.readAsDataURL(file);
  });
  return reader.result.split(",")[1];
}
