// The form as a request. Names are the API's, so that an error's `param` finds its field.

import { ServerError } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];

/** What both endpoints take. */
export function settings(form, model) {
  const value = (name) => form.elements[name].value.trim();
  const number = (name) => (value(name) === "" ? null : Number(value(name)));
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31);
  form.elements.seed.placeholder = seed;
  const body = { model, stream: true, stream_options: { include_usage: true }, return_token_details: true, seed };
  for (const name of NUMBERS) if (number(name) !== null) body[name] = number(name);
  const stop = stops(form.elements.stop_strings.value);
  if (stop.length) body.stop = stop;
  const schema = json(form, "response_format", "JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  body.speculation = speculation(form, number);
  return body;
}

function speculation(form, number) {
  const out = { enabled: form.elements.speculate.checked, return_rejected: true };
  if (form.elements.method.value) out.method = form.elements.method.value;
  if (number("draft_tokens") !== null) out.max_tokens = number("draft_tokens");
  return out;
}

/** A text to continue. */
export function completion(form, model) {
  const alternatives = Number(form.elements.alternatives.value);
  const body = { ...settings(form, model), prompt: form.elements.prompt.value };
  if (alternatives) body.logprobs = alternatives;
  return { path: "v1/completions", body, said: body.prompt, chat: false };
}

/** The conversation so far and what is said next. */
export function chat(form, model, messages, said) {
  const alternatives = Number(form.elements.alternatives.value);
  const system = form.elements.system.value.trim();
  const body = { ...settings(form, model), messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, said] };
  if (alternatives) Object.assign(body, { logprobs: true, top_logprobs: alternatives });
  const tools = json(form, "tools", "Tools");
  if (tools) Object.assign(body, { tools: Array.isArray(tools) ? tools : [tools], tool_choice: form.elements.tool_choice.value, parallel_tool_calls: false });
  return { path: "v1/chat/completions", body, said: said.content, chat: true };
}

/** One stop string a line; \n, \t and \\ as in most languages. */
export const stops = (text) =>
  text.split("\n").filter(Boolean).map((line) => line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]));

function json(form, name, label) {
  const text = form.elements[name].value.trim();
  if (!text) return null;
  try {
    const value = JSON.parse(text);
    if (value !== null && typeof value === "object") return value;
  } catch (error) {
    throw new ServerError(`${label}: ${error.message}`, { param: name, hint: "It must be valid JSON; empty the field to do without." });
  }
  throw new ServerError(`${label}: must be an object${name === "tools" ? " or a list of them" : ""}`, { param: name });
}
