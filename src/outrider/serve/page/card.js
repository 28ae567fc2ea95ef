// The card that tells about one token: who guessed it, how probable it was, what else could have stood there.

import { marks } from "./palette.js";
import { el, percent, plain } from "./words.js";

let card = null; // one for the page

export function showCard(span, token) {
  card ??= newCard();
  document.querySelector("[aria-describedby=token-card]")?.removeAttribute("aria-describedby");
  span.setAttribute("aria-describedby", "token-card");
  card.replaceChildren(...describe(token));
  card.token = span;
  card.hidden = false;
  putCard();
}

export function hideCard() {
  if (!card || card.hidden) return false;
  card.hidden = true;
  return true;
}

function newCard() {
  const made = el("div", { id: "token-card", class: "token-card", role: "tooltip", hidden: true });
  document.body.append(made);
  addEventListener("scroll", () => made.hidden || putCard(), { passive: true, capture: true });
  return made;
}

function putCard() {
  const at = card.token.getClientRects()[0] ?? card.token.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const below = at.bottom + 8;
  const top = below + height < innerHeight ? below : Math.max(at.top - height - 8, 8);
  card.style.left = `${Math.max(Math.min(at.left, innerWidth - width - 12), 12)}px`;
  card.style.top = `${top}px`;
}

function describe(token) {
  const from = token.source === "target"
    ? "the target's own choice"
    : `guessed by ${plain(token.source)}${token.position === null ? "" : `, position ${token.position + 1} of the draft`}`;
  return [
    el("p", { class: "card-head" }, el("code", {}, visible(token.text)), el("span", {}, `id ${token.id}`)),
    el("p", { class: `card-from ${marks(token.source)}` }, el("i", { class: "swatch" }), from),
    ...rejection(token),
    probabilities(token),
  ];
}

/** What was guessed in this token's place, and how much of the round's draft came to nothing. */
function rejection(token) {
  if (!token.rejected?.length) return [];
  const here = token.rejected.filter((node) => node.position === token.depth && node.id !== token.id);
  const guesses = [...new Set(here.map((node) => visible(node.text)))].slice(0, 4);
  const count = token.rejected.length;
  return [el("p", { class: `card-rejected ${marks(token.drafter)}` },
    ...(guesses.length ? [`${plain(token.drafter)} guessed here: `, ...guesses.flatMap((text) => [el("del", {}, text), " "]), el("br")] : []),
    `${count} ${count === 1 ? "guess" : "guesses"} of this round rejected`)];
}

function probabilities(token) {
  if (token.logprob === null || token.logprob === undefined) return el("p", { class: "note" }, "Probabilities were not asked for.");
  const rows = (token.top ?? []).map((other) => row(other, other.id === token.id));
  if (!rows.length || !token.top.some((other) => other.id === token.id)) rows.unshift(row(token, true));
  return el("table", {}, el("caption", {}, "Probability before temperature and cut-offs"), el("tbody", {}, ...rows));
}

function row(token, chosen) {
  const p = Math.exp(token.logprob);
  const bar = el("i", { class: "odds" });
  bar.style.setProperty("--p", p);
  return el("tr", { class: chosen ? "chosen" : "" },
    el("th", { scope: "row" }, visible(token.text)),
    el("td", {}, bar),
    el("td", { class: "number" }, p < 0.001 ? "< 0.1 %" : percent(p, 1)));
}

export const visible = (text) => (text ? text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") : "∅");
