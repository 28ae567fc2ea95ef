// One answer: its tokens, or in a chat the text they spell, and what it came to.

import "./tokens.js";
import { copyButton, selectText } from "./clipboard.js";
import { markdown } from "./markdown.js";
import { count, decimal, duration, el, plain, speed } from "./words.js";

const ENDS = { length: "reached max tokens", stop: "ended by itself", tool_calls: "called a tool" };

export class Pane {
  #drawn = null; // the text that is shown as Markdown
  #frame = 0;

  /** `prompt` stands before the tokens; in a chat the answer is Markdown, and the tokens are another view of it. */
  constructor(speculate, method, { prompt = "", chat = false, again = null }) {
    const title = speculate ? "Speculation on" : "Speculation off";
    this.speculate = speculate;
    this.title = el("h3", {}, speculate && method ? `${title}: ${plain(method)}` : title);
    this.tokens = el("token-stream");
    this.reasoning = el("details", { class: "reasoning", open: true, hidden: true }, el("summary", {}, "Reasoning"), el("p"));
    this.answer = el("div");
    this.prose = chat ? el("div", { class: "prose" }, this.reasoning, this.answer) : null;
    this.text = el("div", { class: "text", hidden: chat }, prompt ? el("span", { class: "prompt" }, prompt) : null, this.tokens);
    this.foot = el("p", { class: "foot" }, "waiting for the first token");
    const shown = () => (this.text.hidden ? this.prose : this.tokens);
    this.tools = el("div", { class: "tools" },
      chat ? this.#switch() : null,
      again ? button("Regenerate", again) : null,
      copyButton(() => this.#drawn ?? this.tokens.text, () => selectText(shown())));
    this.root = el("section", { class: "pane", "aria-busy": "true", "aria-label": title }, el("header", {}, this.title, this.tools), this.prose, this.text, this.foot);
  }

  /** An answer of an earlier visit: its text is known, its tokens are not. */
  static restored(answer, again) {
    const pane = new Pane(true, "", { chat: true, again });
    pane.title.textContent = "Earlier answer";
    pane.tools.querySelector(".segments").remove();
    pane.#draw(answer.content ?? "", (answer.tool_calls ?? []).map((call) => call.function));
    pane.root.removeAttribute("aria-busy");
    pane.foot.remove();
    return pane;
  }

  show(details, tally) {
    this.tokens.push(details);
    const parts = [`${count(tally.tokens.length)} tokens`, `${speed(tally.speed)} tok/s`, `${decimal(tally.perRound)} per round`];
    if (tally.finish) parts.push(duration(tally.totalMs), ENDS[tally.finish] ?? tally.finish);
    this.foot.textContent = parts.join(" · ");
    if (this.prose) this.#frame ||= requestAnimationFrame(() => ((this.#frame = 0), this.#draw(tally.text, tally.calls, tally.reasoning)));
  }

  end(tally) {
    this.show([], tally);
    if (this.prose) this.#draw(tally.text, tally.calls, tally.reasoning);
    this.root.removeAttribute("aria-busy");
    if (!this.speculate) return;
    const { method, off_reason: reason } = tally.spec ?? {};
    if (method && method !== "none") this.title.textContent = `Speculation on: ${plain(method)}`;
    if (reason) this.foot.textContent += ` · speculation was off: ${plain(reason)}`;
  }

  /** The tokens themselves, also where the text is shown. */
  showTokens() {
    this.tools.querySelector("[value=tokens]")?.click();
  }

  /** Reasoning is open until the answer begins. */
  #draw(text, calls, reasoning = "") {
    if (!this.#drawn && text) this.reasoning.open = false;
    this.reasoning.hidden = !reasoning;
    this.reasoning.lastChild.textContent = reasoning; // model text is only ever text
    this.#drawn = text;
    this.answer.replaceChildren(...markdown(text), ...calls.filter(Boolean).map(callBlock));
  }

  #switch() {
    const name = `view-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    const choice = (label, tokens) => {
      const input = el("input", { type: "radio", name, value: tokens ? "tokens" : "text", checked: !tokens });
      input.addEventListener("change", () => ((this.text.hidden = !tokens), (this.prose.hidden = tokens)));
      return el("label", {}, input, el("span", {}, label));
    };
    return el("fieldset", { class: "segments small" }, el("legend", { class: "unseen" }, "Show the answer as"), choice("Text", false), choice("Tokens", true));
  }
}

export function button(label, onClick) {
  const made = el("button", { type: "button", class: "quiet" }, label);
  made.addEventListener("click", onClick);
  return made;
}

function callBlock(call) {
  let written = call.arguments;
  try {
    written = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // cut off or still coming: shown as it is
  }
  return el("div", { class: "call" }, el("p", {}, "Calls ", el("code", {}, call.name)), el("pre", {}, el("code", {}, written)));
}
