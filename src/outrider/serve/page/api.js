// Talking to the server: JSON, server-sent events, and errors as people would want them told.

import { tab } from "./storage.js";

const KEY = "outrider.api_key";

/** The API key lives as long as the tab does, and nowhere else. */
export const apiKey = {
  get: () => tab.get(KEY) ?? "",
  set: (value) => (value ? tab.set(KEY, value) : tab.remove(KEY)),
};

export class ServerError extends Error {
  constructor(message, { status = 0, param = null, hint = "" } = {}) {
    super(message);
    Object.assign(this, { status, param, hint });
  }
}

/** Ask the server; paths are relative, so the page also works behind a prefix. */
export async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  // a key given here stands alone: no password the browser holds, and no dialog of its own where the key is wrong
  const options = { headers, signal, cache: "no-store", credentials: apiKey.get() ? "omit" : "same-origin" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw signal?.aborted ? error : unreachable();
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export const askJson = async (path, signal) => (await ask(path, undefined, signal)).json();

/** Every event of a stream as an object, until [DONE]. */
export async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await read(reader, signal);
      if (done) throw new ServerError("The connection closed before the answer was complete.", { hint: "What came so far is shown." });
      buffer += value;
      const blocks = buffer.split(/\r?\n\r?\n/);
      buffer = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return void (await reader.read()); // to the very end, so that the connection can serve again
        if (!data) continue; // a keep-alive comment
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message, { param: event.error.param });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    throw signal?.aborted ? error : unreachable();
  }
}

const unreachable = () =>
  new ServerError("The server does not answer.", { hint: "Is `outrider serve` still running, and is this the right address?" });

async function refusal(response) {
  const told = await response.json().then((body) => body.error ?? {}, () => ({}));
  const { status } = response;
  const message = told.message || `The server answered ${status} ${response.statusText}.`;
  const wait = response.headers.get("Retry-After");
  const hints = {
    401: apiKey.get() ? "The API key was refused; check it under Key, top right." : "This server wants an API key: enter it under Key, top right.",
    404: "The model may have been renamed; reload the page.",
    413: "Shorten the prompt.",
    429: wait ? `The server is busy. Try again in ${wait} s.` : "The server is busy. Try again shortly.",
    503: wait ? `The server is not ready. Try again in ${wait} s.` : "The server is loading or shutting down. Try again shortly.",
  };
  return new ServerError(message, { status, param: told.param ?? null, hint: hints[status] ?? "" });
}
