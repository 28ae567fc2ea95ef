// One question and its answer, or its two answers where speculation is compared with plain decoding.

import "./race.js";
import { ask, events } from "./api.js";
import { button, Pane } from "./pane.js";
import { parting, Tally } from "./tally.js";
import { count, el } from "./words.js";

/** Asks the server and shows what comes. `request` is {path, body, said, chat, method}. */
class RunTurn extends HTMLElement {
  #panes = el("div", { class: "panes" });
  #verdict = el("div", { class: "verdict", role: "status", hidden: true });

  /** `at` is where in a conversation the question stands. */
  begin(request, onNews, at = 0) {
    Object.assign(this, { request, onNews, at });
    if (request.chat) this.append(this.#question(request.said));
    this.append(this.#verdict, this.#panes);
  }

  /** A turn of an earlier visit. */
  restore(said, answer, at) {
    this.at = at;
    this.append(this.#question(said.content), this.#panes);
    this.#panes.append(Pane.restored(answer, () => this.#again(said.content)).root);
  }

  /** Run once; `speculate` false is plain decoding. A run to be timed finds nothing of an earlier one in the prefix cache. */
  async run(speculate, signal, timed) {
    const { path, body, said, chat, method } = this.request;
    const tally = new Tally();
    const first = !this.#panes.children.length;
    const pane = new Pane(speculate, method, chat ? { chat, again: first ? () => this.#again(said) : null } : { prompt: said });
    this.#panes.append(pane.root);
    this.#panes.classList.toggle("two", !first);
    try {
      const sent = { ...body, ...(speculate ? {} : { speculation: { enabled: false } }), ...(timed ? { cache_salt: salt() } : {}) };
      const response = await ask(path, sent, signal);
      for await (const event of events(response, signal)) {
        pane.show(tally.take(event), tally);
        if (first) this.onNews(tally);
      }
    } catch (error) {
      tally.finish ??= signal.aborted ? "stopped" : "failed";
      if (!tally.tokens.length && !signal.aborted) pane.root.remove();
      if (!signal.aborted) throw error;
    } finally {
      pane.end(tally);
    }
    this.lastPane = pane;
    return tally;
  }

  /** The same request with speculation off, and what the two have in common. */
  async compare(fast, signal) {
    const shown = this.lastPane;
    this.#panes.classList.add("two");
    this.#tell("waiting", "…", "Now the same request with speculation off", "One after the other, so that neither disturbs the other's time.");
    const incomplete = () => this.#tell("waiting", "–", "Not compared", "The second run did not come to its end.");
    const slow = await this.run(false, signal, true).catch((error) => (incomplete(), Promise.reject(error)));
    if (signal.aborted) return incomplete();
    const at = parting(fast, slow);
    if (at !== null) {
      for (const pane of [shown, this.lastPane]) pane.tokens.markParting(at);
      return this.#tell("differ", "≠", `The texts part at token ${at + 1}`, "This breaks the promise of equal tokens; please report it with prompt, seed and settings.");
    }
    const race = el("race-replay", { class: "times" });
    this.#tell("equal", "=", "Same tokens", `All ${count(fast.tokens.length)} token ids are equal.`, race);
    race.begin([{ name: "on", tally: fast, pane: shown }, { name: "off", tally: slow, pane: this.lastPane }]);
  }

  #tell(kind, mark, title, text, ...more) {
    this.#verdict.hidden = false;
    this.#verdict.dataset.kind = kind;
    this.#verdict.replaceChildren(
      el("span", { class: "mark", "aria-hidden": "true" }, mark),
      el("div", { class: "why" }, el("strong", {}, title), el("span", {}, text)), ...more);
  }

  /** What was said, and a way to say it differently. */
  #question(said) {
    const text = el("p", { class: "said" }, said);
    const edit = button("Edit", () => row.replaceChildren(this.#editor(said, () => row.replaceChildren(text, edit))));
    const row = el("div", { class: "question" }, text, edit);
    return row;
  }

  #editor(said, onCancel) {
    const area = el("textarea", { rows: 3, "aria-label": "Edit the message" });
    area.value = said;
    const send = () => area.value.trim() && this.#again(area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") onCancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
      if (event.key === "Escape" || event.key === "Enter") event.stopPropagation();
    });
    queueMicrotask(() => area.focus());
    return el("div", { class: "editor" }, area, el("div", { class: "tools" }, button("Cancel", onCancel), button("Send", send)));
  }

  /** Go back to this question, and ask it or another in its place. */
  #again(said) {
    this.dispatchEvent(new CustomEvent("again", { bubbles: true, detail: { at: this.at, said, same: said === this.request?.said } }));
  }
}

const salt = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("");

customElements.define("run-turn", RunTurn);
