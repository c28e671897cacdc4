// A form made from a JSON Schema: a field for each property that has a simple type, JSON for the rest.
//
// It checks that required fields are filled, and that numbers and JSON are valid. The server checks the rest.

import { html, useMemo, useState } from "./htm-preact.js";
import { Text, asText } from "./text.js";

const DEEPEST = 3; // levels of nested objects that get fields; the user writes deeper objects as JSON
const MOST_FIELDS = 300; // the user writes the arguments of a larger schema as JSON

/** Show the form, and call `onSubmit` with the arguments. */
export function SchemaForm({ schema, verb, isBusy, onSubmit }) {
  const root = schema ?? {};
  const fields = useMemo(() => {
    try {
      return fieldsOf(root, root);
    } catch {
      return null; // the schema is not valid, or has too many fields
    }
  }, [root]);
  const [isJsonChosen, setJson] = useState(false);
  const isJson = isJsonChosen || fields === null;
  const [texts, setTexts] = useState({}); // the path of a field → what was typed
  const [json, setText] = useState("{}");
  const [error, setError] = useState(null);

  function submit(event) {
    event.preventDefault();
    let values;
    try {
      values = isJson ? parse(json, "The arguments") : collect(fields, texts);
    } catch (failure) {
      setError(failure.message);
      return;
    }
    setError(null);
    onSubmit(values);
  }

  function toggle() {
    if (!isJson) {
      try {
        setText(JSON.stringify(collect(fields, texts), null, 2));
      } catch {
        // A field is not valid yet: keep the previous JSON.
      }
    }
    setJson(!isJsonChosen);
  }

  return html`<form class="schema" onSubmit=${submit}>
    ${isJson
      ? html`<label>Arguments as JSON<textarea rows="8" value=${json} onInput=${(event) => setText(event.target.value)} spellcheck=${false}></textarea></label>`
      : fields.length
        ? fields.map((field) => html`<${Field} field=${field} texts=${texts} onInput=${(id, text) => setTexts((old) => ({ ...old, [id]: text }))} />`)
        : html`<p class="muted">It takes no arguments.</p>`}
    ${fields === null && html`<p class="note">This schema can't be shown as a form. Write the arguments as JSON.</p>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <p class="actions">
      <button class="primary" disabled=${isBusy}>${isBusy ? "Waiting…" : verb}</button>
      <button type="button" class="quiet" aria-pressed=${isJson ? "true" : "false"} disabled=${fields === null} onClick=${toggle}>JSON</button>
    </p>
  </form>`;
}

/** Return the fields of an object: `{id, name, kind, isRequired, schema, values, fields}`. */
function fieldsOf(schema, root, path = [], budget = { fields: MOST_FIELDS }) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, given]) => {
    const property = resolve(given, root);
    budget.fields -= 1; // all levels share it
    if (budget.fields < 0) throw new RangeError("The schema has too many fields.");
    const values = property.enum ?? (property.const === undefined ? null : [property.const]);
    if (values !== null && !Array.isArray(values)) throw new TypeError("The choices must be an array.");
    const place = [...path, name];
    const field = { id: JSON.stringify(place), name, schema: property, isRequired: required.has(name), values, kind: kindOf(property, values) };
    if (field.kind === "object") {
      field.fields = path.length < DEEPEST ? fieldsOf(property, root, place, budget) : [];
      if (!field.fields.length) field.kind = "json";
    }
    return field;
  });
}

/** Resolve a reference within the schema. For `anyOf` with null and one other type, return the other type. */
function resolve(given, root) {
  let schema = given === true || given === false ? {} : given;
  for (let step = 0; step < 10; step++) {
    const options = (schema.anyOf ?? schema.oneOf)?.filter((each) => each.type !== "null");
    let next = null;
    if (typeof schema.$ref === "string") next = lookUp(schema.$ref, root);
    else if (options?.length === 1) [next] = options;
    if (!next) break;
    const { $ref, anyOf, oneOf, ...rest } = schema;
    schema = { ...next, ...rest }; // the description beside a reference belongs to this property
  }
  return schema;
}

function lookUp(reference, root) {
  if (!reference.startsWith("#/")) return null;
  const names = reference.slice(2).split("/").map((each) => each.replaceAll("~1", "/").replaceAll("~0", "~"));
  return names.reduce((value, name) => (Object.hasOwn(value ?? {}, name) ? value[name] : null), root);
}

function kindOf(schema, values) {
  if (values) return "choice";
  const types = [schema.type].flat().filter((each) => each !== "null");
  if (types.length !== 1) return "json";
  const [type] = types;
  if (type === "array") {
    const item = schema.items?.type;
    return ["string", "integer", "number"].includes(item) ? "lines" : "json";
  }
  return ["string", "integer", "number", "boolean", "object"].includes(type) ? type : "json";
}

function Field({ field, texts, onInput }) {
  const { id, name, kind, schema, isRequired } = field;
  if (kind === "object") {
    return html`<fieldset>
      <legend><${Text} value=${schema.title ?? name} /></legend>
      ${field.fields.map((each) => html`<${Field} field=${each} texts=${texts} onInput=${onInput} />`)}
    </fieldset>`;
  }
  const value = texts[id] ?? initial(field);
  const shared = { value, required: isRequired && kind !== "lines", onInput: (event) => onInput(id, event.target.value) };
  let control;
  if (kind === "choice" || kind === "boolean") {
    const values = kind === "boolean" ? [true, false] : field.values;
    control = html`<select ...${shared}>
      <option value="">${isRequired ? "Choose…" : "(not set)"}</option>
      ${values.map((each) => html`<option value=${JSON.stringify(each)}>${asText(each)}</option>`)}
    </select>`;
  } else if (kind === "integer" || kind === "number") {
    control = html`<input ...${shared} type="number" step=${kind === "integer" ? 1 : "any"} min=${schema.minimum} max=${schema.maximum} />`;
  } else if (kind === "string" && !(schema.maxLength > 500)) {
    control = html`<input ...${shared} type="text" spellcheck=${false} />`;
  } else {
    control = html`<textarea ...${shared} rows=${kind === "json" ? 3 : 2} spellcheck=${false}></textarea>`;
  }
  return html`<label>
    <span><${Text} value=${schema.title ?? name} />${isRequired && html`<span class="muted"> required</span>`}${HINTS[kind] && html`<span class="muted"> ${HINTS[kind]}</span>`}</span>
    ${control}
    ${schema.description && html`<small class="muted"><${Text} value=${schema.description} limit=${500} /></small>`}
  </label>`;
}

const HINTS = { json: "as JSON", lines: "one per line" };

/** Return the default of a field as the text of its control. */
function initial({ kind, schema }) {
  const value = schema.default;
  if (value === undefined || value === null) return "";
  if (kind === "lines") return Array.isArray(value) ? value.join("\n") : "";
  return kind === "string" ? asText(value) : JSON.stringify(value);
}

/** Return the arguments. Leave out empty fields, unless they are required. */
function collect(fields, texts) {
  const values = {};
  for (const field of fields) {
    if (field.kind === "object") {
      const value = collect(field.fields, texts);
      if (field.isRequired || Object.keys(value).length) values[field.name] = value;
      continue;
    }
    const text = texts[field.id] ?? initial(field);
    if (text === "" && !field.isRequired) continue;
    values[field.name] = convert(field, text);
  }
  return values;
}

function convert(field, text) {
  switch (field.kind) {
    case "string":
      return text;
    case "lines": {
      const lines = text.split("\n").filter((line) => line !== "");
      return field.schema.items.type === "string" ? lines : lines.map((line) => parse(line, field.name));
    }
    default:
      return parse(text, field.name);
  }
}

function parse(text, name) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${name}: this is not valid JSON.`);
  }
}
