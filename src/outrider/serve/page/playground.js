// The playground: a form becomes a request, its runs become turns.

import "./charts.js";
import "./turn.js";
import { askJson } from "./api.js";
import { hideCard } from "./card.js";
import { Conversation } from "./conversation.js";
import { about, exampleCards } from "./examples.js";
import { connectHistory } from "./past.js";
import { chat, completion } from "./request.js";
import { tab } from "./storage.js";
import { legend } from "./tokens.js";
import { count, decimal, duration, el, percent, plain, speed } from "./words.js";

const $ = (id) => document.getElementById(id);
const form = $("ask");
const field = (name) => form.elements[name];
const chatting = () => field("mode").value === "chat";
const comparing = { prompt: true, chat: false }; // what the switch says in each mode
let running = null; // AbortController of the request in flight
let conversation = new Conversation();
let server = { model: "", method: "", bundled: false };

function request(said, earlier) {
  const built = chatting() ? chat(form, server.model, earlier, said) : completion(form, server.model);
  return { ...built, method: built.body.speculation.method ?? server.method };
}

/** Run what the form asks for; in a conversation after the first `at` messages, and the others are forgotten. */
async function run(at = conversation.messages.length) {
  if (running) return;
  complain(null);
  if (!field("prompt").value) return void field("prompt").focus();
  if (!form.reportValidity()) return;
  const said = conversation.reply(field("prompt").value, at);
  try {
    const asked = request(said, conversation.messages.slice(0, at));
    conversation.cut(at);
    for (const turn of [...$("turns").children]) if (!asked.chat || turn.at >= at) turn.remove();
    await perform(asked, said, conversation);
  } catch (error) {
    complain(error);
  }
}

async function perform(asked, said, talk) {
  const speculate = field("speculate").checked;
  const compare = speculate && field("compare").checked;
  const turn = el("run-turn");
  $("turns").append(turn);
  turn.begin(asked, figures, talk.messages.length);
  busy(new AbortController());
  const { signal } = running;
  asked.chat ? toComposer() : $("results").scrollIntoView({ block: innerWidth < 900 ? "start" : "nearest" });
  try {
    const tally = await turn.run(speculate, signal, compare);
    if (talk !== conversation) return; // the user has gone to another conversation
    if (asked.chat) remember(said, tally);
    if (compare && !signal.aborted) await turn.compare(tally, signal);
    announce(tally);
    if (asked.chat) toComposer();
    if (asked.chat && !document.activeElement.matches("input, textarea, .token")) field("prompt").focus({ preventScroll: true });
  } catch (error) {
    if (!turn.querySelector(".pane")) turn.remove();
    throw error;
  } finally {
    busy(null);
  }
}

const toComposer = () => form.querySelector(".compose").scrollIntoView({ block: "end" }); // a conversation grows above it

function remember(said, tally) {
  conversation.add(said, tally, field("system").value.trim());
  field("prompt").value = "";
  dress();
}

/** Go back in the conversation, and ask the same or something else from there. */
function again({ at, said, same }) {
  if (running) return;
  if (same && field("seed").value) field("seed").value = Number(field("seed").value) + 1; // another answer wants another seed
  field("prompt").value = said;
  run(at);
}

function busy(controller) {
  running = controller;
  $("run").disabled = Boolean(controller);
  $("stop").disabled = !controller;
  document.body.classList.toggle("running", Boolean(controller));
  dress();
}

function figures(tally) {
  $("numbers").hidden = false;
  $("tok-s").textContent = speed(tally.speed);
  $("per-round").textContent = decimal(tally.perRound);
  $("share").textContent = percent(tally.share);
  $("first").textContent = duration(tally.firstMs);
  $("positions").values = tally.byPosition;
  const sources = [...new Set(["target", ...tally.tokens.flatMap((token) => [token.source, ...(token.drafter ? [token.drafter] : [])])])];
  if ($("legend").children.length !== sources.length + 2) $("legend").replaceChildren(...legend(sources), ...hints());
}

const hints = () => [
  el("span", { class: "key rounds" }, el("i", { class: "swatch" }), "a draft begins"),
  el("span", { class: "key rejected" }, el("del", { class: "ghost" }, "abc"), "rejected guess"),
];

const announce = (tally) => ($("said").textContent =
  `${count(tally.tokens.length)} tokens, ${speed(tally.speed)} per second, ${decimal(tally.perRound)} per round.`);

/** Say what went wrong, beside the field that caused it where there is one. */
function complain(error) {
  for (const bad of form.querySelectorAll("[aria-invalid]")) bad.removeAttribute("aria-invalid");
  $("trouble").hidden = !error;
  if (!error) return;
  $("trouble").replaceChildren(el("strong", {}, error.message), ...(error.hint ? [el("span", {}, error.hint)] : []));
  $("trouble").scrollIntoView({ block: "nearest" });
  if (error.status === 401) document.dispatchEvent(new Event("key-wanted"));
  const named = { messages: "prompt", top_logprobs: "alternatives", logprobs: "alternatives", speculation: "method", stop: "stop_strings", max_completion_tokens: "max_tokens" };
  const param = error.param?.split(".")[0];
  const at = param && field(named[param] ?? param);
  at?.closest?.("details")?.setAttribute("open", "");
  if (at instanceof HTMLElement) at.setAttribute("aria-invalid", "true");
}

/** Show a conversation from the history, or begin another. */
function converse(next) {
  running?.abort();
  conversation = next ?? new Conversation();
  $("turns").replaceChildren(...conversation.turns.map(({ at, said, answer }) => {
    const turn = el("run-turn");
    turn.restore(said, answer, at);
    return turn;
  }));
  $("numbers").hidden = true;
  $("legend").replaceChildren();
  if (next) field("system").value = next.system ?? "";
  dress();
}

function startOver() {
  Conversation.leave();
  converse(null);
  field("prompt").focus();
}

/** Prompt or chat; a chat goes on with the conversation this tab showed last, or with another one. */
function enter(mode, next = Conversation.current()) {
  field("mode").value = mode;
  tab.set("outrider.mode", mode);
  field("compare").checked = comparing[mode];
  const untouched = field("prompt").value === field("prompt").defaultValue;
  if (chatting() === untouched) field("prompt").value = untouched ? "" : field("prompt").defaultValue;
  converse(chatting() ? next : null);
  offerExamples();
}

/** Everything that depends on the mode, the conversation and whether there is a result. */
function dress() {
  const [asChat, shown] = [chatting(), Boolean($("turns").children.length)];
  $("view-playground").classList.toggle("chatting", asChat);
  for (const part of document.querySelectorAll("[data-mode]")) part.hidden = part.dataset.mode !== field("mode").value;
  $("fresh").hidden = !asChat || !shown;
  $("results").hidden = !shown;
  $("idle").hidden = shown || Boolean(running);
  const call = asChat && conversation.pending();
  $("prompt-label").textContent = call ? `Result of ${call.function.name}` : asChat ? "Your message" : "Text to continue";
  field("prompt").rows = asChat ? 4 : 9;
  $("about").textContent = about(server.bundled, asChat);
  $("unkept").hidden = conversation.kept;
}

function offerExamples() {
  $("examples").replaceChildren(...exampleCards(server.bundled, chatting(), (text) => {
    field("prompt").value = text;
    run();
  }));
}

function follow(event) {
  if (event?.target === field("compare")) comparing[field("mode").value] = field("compare").checked;
  const speculate = field("speculate").checked;
  for (const name of ["method", "draft_tokens", "compare"]) field(name).disabled = !speculate;
  for (const slider of form.querySelectorAll("output")) slider.textContent = Number(field(slider.htmlFor.value).value).toFixed(2);
}

/** Learn from the server which model it has and how it may guess. */
export async function meet() {
  const [list, stats] = await Promise.all([askJson("v1/models"), askJson("stats")]);
  server = { model: list.data[0]?.id ?? "", method: stats.method ?? "", bundled: Boolean(stats.bundled) };
  const own = server.method;
  const others = [...new Set([...(stats.methods ?? []), ...Object.keys(stats.by_method ?? {})])].filter((name) => !["none", "target", own].includes(name));
  const options = [["", own ? plain(own) : "default"], ...others.map((name) => [name, plain(name)])];
  $("method").replaceChildren(...options.map(([value, label]) => el("option", { value }, label)));
  dress();
  offerExamples();
  return server.model;
}

form.addEventListener("submit", (event) => (event.preventDefault(), run()));
form.addEventListener("input", follow);
for (const choice of field("mode")) choice.addEventListener("change", () => (enter(choice.value), field("prompt").focus()));
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", startOver);
$("show-rejected").addEventListener("change", (event) => $("turns").classList.toggle("with-rejected", event.target.checked));
$("turns").addEventListener("again", (event) => again(event.detail));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return event.preventDefault(), void run();
  if (event.key === "Escape" && !document.querySelector(":popover-open")) running ? running.abort() : hideCard();
});
if (/Mac|iP/.test(navigator.platform)) $("chord").textContent = "⌘ ⏎";
connectHistory({ onOpen: (id) => enter("chat", Conversation.open(id)), onDelete: (id) => (id === null || id === conversation.id) && startOver() });
enter(tab.get("outrider.mode") === "chat" ? "chat" : "prompt"); // a reloaded tab goes on where it was
follow();
