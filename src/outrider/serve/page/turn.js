// One question and its answer, or its two answers where speculation is compared with plain decoding.

import "./tokens.js";
import { ask, events } from "./api.js";
import { parting, Tally } from "./tally.js";
import { count, decimal, duration, el, plain, speed } from "./words.js";

/** Asks the server and shows what comes. `request` is {path, body, said, chat, method}. */
class RunTurn extends HTMLElement {
  #panes = el("div", { class: "panes" });
  #verdict = el("div", { class: "verdict", role: "status", hidden: true });

  begin(request, onNews) {
    Object.assign(this, { request, onNews });
    if (request.chat) this.append(el("p", { class: "said" }, request.said));
    this.append(this.#verdict, this.#panes);
  }

  /** Run once; `speculate` false is plain decoding. A run to be timed finds nothing of an earlier one in the prefix cache. */
  async run(speculate, signal, timed) {
    const { path, body, said, chat, method } = this.request;
    const tally = new Tally();
    const pane = new Pane(speculate, method, chat ? "" : said);
    this.#panes.append(pane.root);
    this.#panes.classList.toggle("two", this.#panes.children.length > 1);
    try {
      const asked = { ...body, ...(speculate ? {} : { speculation: { enabled: false } }), ...(timed ? { cache_salt: salt() } : {}) };
      const response = await ask(path, asked, signal);
      for await (const event of events(response, signal)) {
        const choice = event.choices?.[0];
        tally.metrics = event.metrics ?? tally.metrics;
        tally.finish = choice?.finish_reason ?? tally.finish;
        tally.text += choice?.text ?? choice?.delta?.content ?? "";
        tally.add(choice?.token_details ?? []);
        pane.show(choice?.token_details ?? [], tally);
        if (speculate || this.#panes.children.length === 1) this.onNews(tally);
      }
    } catch (error) {
      tally.finish ??= signal.aborted ? "stopped" : "failed";
      if (!tally.tokens.length && !signal.aborted) pane.root.remove();
      if (!signal.aborted) throw error;
    } finally {
      pane.end(tally);
    }
    pane.tally = tally;
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
    return this.#tell("equal", "=", "Same tokens", `All ${count(fast.tokens.length)} token ids are equal.`, times(fast, slow));
  }

  #tell(kind, mark, title, text, ...more) {
    this.#verdict.hidden = false;
    this.#verdict.dataset.kind = kind;
    this.#verdict.replaceChildren(
      el("span", { class: "mark", "aria-hidden": "true" }, mark),
      el("div", { class: "why" }, el("strong", {}, title), el("span", {}, text)), ...more);
  }
}

/** One answer. */
class Pane {
  constructor(speculate, method, prompt) {
    const title = speculate ? "Speculation on" : "Speculation off";
    this.speculate = speculate;
    this.title = el("h3", {}, speculate && method ? `${title}: ${plain(method)}` : title);
    this.tokens = el("token-stream");
    this.foot = el("p", { class: "foot" }, "waiting for the first token");
    const copy = el("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", () => this.#copy(copy));
    this.root = el("section", { class: "pane", "aria-busy": "true", "aria-label": title },
      el("header", {}, this.title, copy),
      el("div", { class: "text" }, prompt ? el("span", { class: "prompt" }, prompt) : null, this.tokens),
      this.foot);
  }

  show(details, tally) {
    this.tokens.push(details);
    const parts = [`${count(tally.tokens.length)} tokens`, `${speed(tally.speed)} tok/s`, `${decimal(tally.perRound)} per round`];
    if (tally.finish) parts.push(duration(tally.totalMs), { length: "reached max tokens", stop: "ended by itself" }[tally.finish] ?? tally.finish);
    this.foot.textContent = parts.join(" · ");
  }

  end(tally) {
    this.show([], tally);
    this.root.removeAttribute("aria-busy");
    if (!this.speculate) return;
    const { method, off_reason: reason } = tally.spec ?? {};
    if (method && method !== "none") this.title.textContent = `Speculation on: ${plain(method)}`;
    if (reason) this.foot.textContent += ` · speculation was off: ${plain(reason)}`;
  }

  async #copy(button) {
    await navigator.clipboard?.writeText(this.tokens.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1200);
  }
}

const salt = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("");

function times(fast, slow) {
  const ratio = slow.totalMs / fast.totalMs;
  const most = Math.max(fast.totalMs, slow.totalMs);
  const line = (name, ms) => {
    const bar = el("i", { class: "span" });
    bar.style.setProperty("--share", ms / most);
    return el("div", { class: "time" }, el("span", {}, name), bar, el("span", { class: "number" }, duration(ms)));
  };
  const said = ratio >= 1.005 ? `${decimal(ratio)}× faster` : ratio <= 0.995 ? `${decimal(1 / ratio)}× slower` : "equally fast";
  return el("div", { class: "times" }, el("strong", {}, said), line("on", fast.totalMs), line("off", slow.totalMs));
}

customElements.define("run-turn", RunTurn);
