// The playground: a form becomes a request, its runs become turns.

import "./charts.js";
import "./turn.js";
import { askJson } from "./api.js";
import { hideCard, legend } from "./tokens.js";
import { count, decimal, duration, el, percent, plain, speed } from "./words.js";

const $ = (id) => document.getElementById(id);
const form = $("ask");
let running = null; // AbortController of the request in flight
let messages = []; // the conversation, in chat mode
let model = "";

const field = (name) => form.elements[name];
const number = (name) => (field(name).value.trim() === "" ? null : Number(field(name).value));
const chatting = () => field("mode").value === "chat";

/** What the form asks for. Names are the API's, so that an error's `param` finds its field. */
function settings() {
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31);
  field("seed").placeholder = seed;
  const body = { model, stream: true, stream_options: { include_usage: true }, return_token_details: true, seed };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens"]) if (number(name) !== null) body[name] = number(name);
  body.speculation = { enabled: field("speculate").checked };
  if (field("method").value) body.speculation.method = field("method").value;
  if (number("draft_tokens") !== null) body.speculation.max_tokens = number("draft_tokens");
  return body;
}

function request() {
  const body = settings();
  const said = field("prompt").value;
  const alternatives = number("alternatives") ?? 0;
  const method = body.speculation.method ?? $("method").dataset.own;
  if (!chatting()) {
    Object.assign(body, { prompt: said }, alternatives ? { logprobs: alternatives } : {});
    return { path: "v1/completions", body, said, method, chat: false };
  }
  const system = field("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: said }];
  if (alternatives) Object.assign(body, { logprobs: true, top_logprobs: alternatives });
  return { path: "v1/chat/completions", body, said, method, chat: true };
}

async function run() {
  if (running) return;
  complain(null);
  if (!field("prompt").value) return void field("prompt").focus();
  if (!form.reportValidity()) return;
  const [asked, speculate] = [request(), field("speculate").checked];
  const compare = speculate && field("compare").checked;
  const turn = el("run-turn");
  if (!asked.chat) $("turns").replaceChildren();
  $("turns").append(turn);
  turn.begin(asked, figures);
  busy(new AbortController());
  const { signal } = running;
  asked.chat ? toComposer() : $("results").scrollIntoView({ block: innerWidth < 900 ? "start" : "nearest" });
  try {
    const tally = await turn.run(speculate, signal, compare);
    if (asked.chat) remember(asked, tally);
    if (compare && !signal.aborted) await turn.compare(tally, signal);
    announce(tally);
    if (asked.chat) toComposer();
  } catch (error) {
    if (!turn.querySelector(".pane")) turn.remove();
    complain(error);
  } finally {
    busy(null);
  }
}

const toComposer = () => form.scrollIntoView({ block: "end" }); // a conversation grows above it

function remember(asked, tally) {
  messages.push({ role: "user", content: asked.said }, { role: "assistant", content: tally.text });
  field("prompt").value = "";
  $("fresh").hidden = false;
}

function busy(controller) {
  running = controller;
  $("run").disabled = Boolean(controller);
  $("stop").disabled = !controller;
  document.body.classList.toggle("running", Boolean(controller));
  $("results").hidden = false;
}

function figures(tally) {
  $("tok-s").textContent = speed(tally.speed);
  $("per-round").textContent = decimal(tally.perRound);
  $("share").textContent = percent(tally.share);
  $("first").textContent = duration(tally.firstMs);
  $("positions").values = tally.byPosition;
  const sources = [...new Set(["target", ...tally.tokens.map((token) => token.source)])];
  if ($("legend").children.length !== sources.length + 1) $("legend").replaceChildren(...legend(sources), hint());
}

const hint = () => el("span", { class: "key rounds" }, el("i", { class: "swatch" }), "a draft begins");

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
  const named = { messages: "prompt", top_logprobs: "alternatives", logprobs: "alternatives", speculation: "method", max_completion_tokens: "max_tokens" };
  const at = error.param && field(named[error.param] ?? error.param);
  if (at instanceof HTMLElement) at.setAttribute("aria-invalid", "true");
  at?.closest?.("details")?.setAttribute("open", "");
}

function restart() {
  messages = [];
  $("turns").replaceChildren();
  $("fresh").hidden = true;
  field("prompt").focus();
}

function changeMode() {
  const chat = chatting();
  $("view-playground").classList.toggle("chatting", chat);
  $("system-row").hidden = !chat;
  $("prompt-label").textContent = chat ? "Your message" : "Text to continue";
  field("prompt").rows = chat ? 4 : 7;
  if (chat === (field("prompt").value === field("prompt").defaultValue)) field("prompt").value = chat ? "" : field("prompt").defaultValue;
  restart();
}

function follow() {
  const speculate = field("speculate").checked;
  for (const name of ["method", "draft_tokens", "compare"]) field(name).disabled = !speculate;
  for (const slider of form.querySelectorAll("output")) slider.textContent = Number(field(slider.htmlFor.value).value).toFixed(2);
}

/** Learn from the server which model it has and how it may guess. */
export async function meet() {
  const [list, stats] = await Promise.all([askJson("v1/models"), askJson("stats")]);
  model = list.data[0]?.id ?? "";
  const own = stats.method ?? "";
  const others = [...new Set([...(stats.methods ?? []), ...Object.keys(stats.by_method ?? {})])].filter((name) => !["none", "target", own].includes(name));
  $("method").dataset.own = own;
  const options = [["", own ? plain(own) : "default"], ...others.map((name) => [name, plain(name)])];
  $("method").replaceChildren(...options.map(([value, label]) => el("option", { value }, label)));
  return model;
}

form.addEventListener("submit", (event) => (event.preventDefault(), run()));
form.addEventListener("input", follow);
for (const choice of field("mode")) choice.addEventListener("change", changeMode);
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", restart);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return event.preventDefault(), void run();
  if (event.key === "Escape" && !document.querySelector(":popover-open")) running ? running.abort() : hideCard();
});
if (/Mac|iP/.test(navigator.platform)) $("chord").textContent = "⌘ ⏎";
follow();
