// The conversation of the chat: what was said, going back in it, and keeping it in the history.

import { conversations, save } from "./history.js";
import { tab } from "./storage.js";

const CURRENT = "outrider.conversation"; // which one this tab shows

export class Conversation {
  messages = [];
  kept = true; // whether the browser could store it
  #id = crypto.getRandomValues(new Uint32Array(2)).join("-");

  /** A stored conversation by its id, or null. */
  static open(id) {
    const stored = conversations().find((one) => one.id === id);
    if (!stored) return null;
    const opened = new Conversation();
    opened.#id = stored.id;
    opened.messages = stored.messages;
    opened.system = stored.system;
    opened.#show();
    return opened;
  }

  /** The one this tab showed before it was reloaded. */
  static current() {
    return Conversation.open(tab.get(CURRENT));
  }

  static leave() {
    tab.remove(CURRENT);
  }

  get id() {
    return this.#id;
  }

  /** The tool call that waits for its result after so many messages, if one does. */
  pending(at = this.messages.length) {
    return this.messages[at - 1]?.tool_calls?.[0] ?? null;
  }

  /** What the user says there, as a message: the result of a tool where one was called. */
  reply(text, at) {
    const call = this.pending(at);
    return call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text };
  }

  add(said, tally, system) {
    this.messages.push(said, answerOf(tally));
    this.system = system;
    this.kept = save({ id: this.#id, system, messages: this.messages });
    this.#show();
  }

  /** Forget a message and all that came after it. */
  cut(at) {
    this.messages.length = at;
  }

  /** Every message with its answer: {at, said, answer}. */
  get turns() {
    const out = [];
    for (let at = 0; at + 1 < this.messages.length; at += 2) out.push({ at, said: this.messages[at], answer: this.messages[at + 1] });
    return out;
  }

  #show() {
    tab.set(CURRENT, this.#id);
  }
}

function answerOf({ text, calls }) {
  if (!calls.length) return { role: "assistant", content: text };
  const tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role: "assistant", content: text || null, tool_calls };
}
