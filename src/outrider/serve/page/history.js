// Conversations kept in this browser: the newest ones, within bounds, until they are deleted.

import { browser } from "./storage.js";

const KEY = "outrider.conversations";
const LIMIT = 40; // conversations
const CHARACTERS = 1_500_000; // of all together; browsers keep some five million for a site

/** Newest first: {id, title, changed, system, messages}. What is not well formed is left out. */
export function conversations() {
  try {
    const list = JSON.parse(browser.get(KEY) ?? "[]");
    return Array.isArray(list) ? list.filter(wellFormed) : [];
  } catch {
    return [];
  }
}

/** Keep a conversation; the oldest make room for it. Whether it is kept. */
export function save(conversation) {
  const changed = { ...conversation, title: title(conversation), changed: Date.now() };
  const list = [changed, ...conversations().filter(({ id }) => id !== conversation.id)].slice(0, LIMIT);
  while (list.length > 1 && JSON.stringify(list).length > CHARACTERS) list.pop();
  while (list.length) {
    if (browser.set(KEY, JSON.stringify(list))) return list[0] === changed;
    list.pop(); // the browser's quota is smaller than ours
  }
  return false;
}

export function remove(id) {
  const left = conversations().filter((one) => one.id !== id);
  left.length ? browser.set(KEY, JSON.stringify(left)) : browser.remove(KEY);
}

export const removeAll = () => browser.remove(KEY);

const title = ({ messages }) => (messages.find(({ role }) => role === "user")?.content ?? "").trim().replace(/\s+/g, " ").slice(0, 80) || "Untitled";

function wellFormed(one) {
  const text = (value) => typeof value === "string";
  const call = (value) => text(value?.function?.name) && text(value.function.arguments);
  const message = (value) => ["user", "assistant", "tool"].includes(value?.role) && (text(value.content) || value.content === null)
    && (value.tool_calls === undefined || (Array.isArray(value.tool_calls) && value.tool_calls.every(call)));
  return text(one?.id) && text(one.title) && Number.isFinite(one.changed) && text(one.system) && Array.isArray(one.messages) && one.messages.every(message);
}
