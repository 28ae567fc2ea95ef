// Streamed tokens, marked by where they came from, and the card that tells about one of them.

import { el, percent, place, plain } from "./words.js";

let card = null; // one for the page

/** Tokens in reading order. One tab stop; arrow keys go from token to token. */
class TokenStream extends HTMLElement {
  #tokens = [];

  connectedCallback() {
    if (this.role) return;
    this.role = "group";
    this.setAttribute("aria-label", "Generated tokens; arrow keys move between them");
    this.addEventListener("mouseover", (event) => this.#tell(event.target));
    this.addEventListener("mouseleave", () => this.#tell(this.querySelector(".token:focus")));
    this.addEventListener("focusin", (event) => this.#tell(event.target));
    this.addEventListener("focusout", () => hideCard());
    this.addEventListener("keydown", (event) => this.#walk(event));
  }

  push(details) {
    this.append(...details.map((token) => this.#span(token)));
  }

  /** Mark the token at which another run parts from this one. */
  markParting(at) {
    this.children[at]?.classList.add("parts");
  }

  #span(token) {
    const guess = token.source !== "target";
    const span = el("span", { class: `token s${place(token.source)}`, "data-source": token.source });
    span.textContent = token.text; // model text is only ever text
    span.tabIndex = this.#tokens.length ? -1 : 0;
    if (guess) span.dataset.position = token.position ?? "";
    if (guess && token.opens) span.classList.add("opens");
    if (token.text.includes("\n")) span.classList.add("newline");
    if (!token.text) span.classList.add("silent");
    this.#tokens.push(token);
    return span;
  }

  #tell(target) {
    const span = target?.closest?.(".token");
    if (!span || !this.contains(span)) return hideCard();
    showCard(span, this.#tokens[[...this.children].indexOf(span)]);
  }

  #walk(event) {
    const steps = { ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10 };
    const ends = { Home: 0, End: this.children.length - 1 };
    if (!(event.key in steps) && !(event.key in ends)) return;
    const now = [...this.children].indexOf(document.activeElement);
    const next = ends[event.key] ?? Math.min(Math.max(now + steps[event.key], 0), this.children.length - 1);
    event.preventDefault();
    this.children[now]?.setAttribute("tabindex", -1);
    this.children[next].tabIndex = 0;
    this.children[next].focus();
  }
}

function showCard(span, token) {
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
  const head = el("p", { class: "card-head" }, el("code", {}, visible(token.text)), el("span", {}, `id ${token.id}`));
  const origin = el("p", { class: `card-from s${place(token.source)}` }, el("i", { class: "swatch" }), from);
  if (token.logprob === null || token.logprob === undefined) {
    return [head, origin, el("p", { class: "note" }, "Probabilities were not asked for.")];
  }
  const rows = (token.top ?? []).map((other) => row(other, other.id === token.id));
  if (!rows.length || !token.top.some((other) => other.id === token.id)) rows.unshift(row(token, true));
  return [head, origin, el("table", {}, el("caption", {}, "Probability before temperature and cut-offs"), el("tbody", {}, ...rows))];
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

const visible = (text) => (text ? text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") : "∅");

/** What the marks mean, for the sources seen. */
export function legend(sources) {
  return sources.map((source) =>
    el("span", { class: `key s${place(source)}` },
      el("i", { class: "swatch" }), source === "target" ? "target's own" : `guessed by ${plain(source)}`));
}

customElements.define("token-stream", TokenStream);
