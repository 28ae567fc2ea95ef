// Streamed tokens, marked by where they came from.

import { hideCard, showCard, visible } from "./card.js";
import { marks } from "./palette.js";
import { el, plain } from "./words.js";

/** Tokens in reading order. One tab stop; arrow keys go from token to token. */
class TokenStream extends HTMLElement {
  #tokens = [];
  #spans = [];
  #shown = Infinity; // tokens that a replay has reached

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
    for (const token of details) {
      const span = this.#span(token);
      this.append(...ghosts(token), span);
      this.#tokens.push(token);
      this.#spans.push(span);
    }
  }

  /** The text alone, without the guesses that were rejected. */
  get text() {
    return this.#tokens.map((token) => token.text).join("");
  }

  /** Mark the token at which another run parts from this one. */
  markParting(at) {
    this.#spans[at]?.classList.add("parts");
  }

  /** Show the tokens that had come by a time in milliseconds, and no others; how many these are. */
  reveal(ms) {
    const found = this.#tokens.findIndex((token) => token.ms > ms);
    const count = found < 0 ? this.#tokens.length : found;
    const [from, to] = [Math.min(count, this.#shown), Math.max(count, Math.min(this.#shown, this.#tokens.length))];
    for (const span of this.#spans.slice(from, to)) {
      span.classList.toggle("ahead", count < this.#shown);
      if (span.previousElementSibling?.matches(".ghost")) span.previousElementSibling.classList.toggle("ahead", count < this.#shown);
    }
    this.#shown = count;
    return count;
  }

  #span(token) {
    const guess = token.source !== "target";
    const span = el("span", { class: `token ${marks(token.source)}`, "data-source": token.source });
    span.textContent = token.text; // model text is only ever text
    span.tabIndex = this.#tokens.length ? -1 : 0;
    if (guess) span.dataset.position = token.position ?? "";
    if (guess && token.opens) span.classList.add("opens");
    if (token.text.includes("\n")) span.classList.add("newline");
    if (!token.text) span.classList.add("silent");
    return span;
  }

  #tell(target) {
    const span = target?.closest?.(".token");
    if (!span || !this.contains(span)) return hideCard();
    showCard(span, this.#tokens[this.#spans.indexOf(span)]);
  }

  #walk(event) {
    const steps = { ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10 };
    const ends = { Home: 0, End: this.#spans.length - 1 };
    if (!(event.key in steps) && !(event.key in ends)) return;
    const now = this.#spans.indexOf(document.activeElement);
    const next = ends[event.key] ?? Math.min(Math.max(now + steps[event.key], 0), this.#spans.length - 1);
    event.preventDefault();
    this.#spans[now]?.setAttribute("tabindex", -1);
    this.#spans[next].tabIndex = 0;
    this.#spans[next].focus();
  }
}

/** The rejected guess that stood in a token's place, with what would have followed it; of a tree, its first branch. */
function ghosts(token) {
  const rejected = token.rejected ?? [];
  let at = rejected.findIndex((node) => node.position === token.depth);
  if (at < 0) return [];
  const others = rejected.filter((node) => node.position === token.depth).length - 1;
  let text = "";
  for (; at >= 0; at = rejected.findIndex((node) => node.parent === at)) text += rejected[at].text;
  const title = `rejected guess by ${plain(token.drafter)}${others ? `, and ${others} more in its place` : ""}`;
  return [el("del", { class: `ghost ${marks(token.drafter)}`, title, "aria-label": `${title}: ${text}` }, text.includes("\n") ? visible(text).replaceAll("␣", " ") : text)];
}

/** What the marks mean, for the sources seen. */
export function legend(sources) {
  return sources.map((source) =>
    el("span", { class: `key ${marks(source)}` },
      el("i", { class: "swatch" }), source === "target" ? "target's own" : `guessed by ${plain(source)}`));
}

customElements.define("token-stream", TokenStream);
