// The race of a comparison: both times, and both runs once more as they came, at full speed or slower.

import { decimal, duration, el } from "./words.js";

const SPEEDS = [["1", "full speed"], ["0.5", "half speed"], ["0.25", "quarter speed"]];

/** `lanes` are {name, tally, pane}. */
class RaceReplay extends HTMLElement {
  #now = Infinity;
  #frame = 0;
  #before = 0;

  begin(lanes) {
    this.lanes = lanes.map((lane) => ({ ...lane, bar: el("i", { class: "span" }), label: el("span", { class: "number" }) }));
    this.end = Math.max(...lanes.map(({ tally }) => tally.last - tally.started));
    this.slowest = Math.max(...lanes.map(({ tally }) => tally.totalMs));
    const [fast, slow] = lanes.map(({ tally }) => tally.totalMs);
    this.button = el("button", { type: "button", class: "quiet replay" });
    this.slider = el("input", { type: "range", min: 0, max: Math.ceil(this.end), step: 1, "aria-label": "Time of the replay" });
    this.pace = el("select", { "aria-label": "Speed of the replay", class: "pace" }, ...SPEEDS.map(([value, label]) => el("option", { value }, label)));
    this.button.addEventListener("click", () => (this.#frame ? this.pause() : this.play()));
    this.slider.addEventListener("input", () => (this.pause(), this.#showTokens(), this.show(Number(this.slider.value))));
    this.append(
      el("strong", {}, verdict(slow / fast)),
      ...this.lanes.map(({ name, bar, label }) => el("div", { class: "time" }, el("span", {}, name), bar, label)),
      el("div", { class: "replay-row" }, this.button, this.slider, this.pace));
    this.pause();
    this.show(this.end);
  }

  play() {
    this.#showTokens();
    if (this.#now >= this.end) this.show(0);
    this.#before = performance.now();
    this.#label("❚❚ Pause");
    this.#frame = requestAnimationFrame(() => this.#step());
  }

  pause() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#label("▶ Replay");
  }

  /** Both runs as they stood after some milliseconds. */
  show(ms) {
    this.#now = ms;
    this.slider.value = ms;
    this.slider.setAttribute("aria-valuetext", duration(ms));
    for (const { tally, pane, bar, label } of this.lanes) {
      const shown = pane.tokens.reveal(ms);
      const over = shown === tally.tokens.length;
      bar.style.setProperty("--share", (over ? tally.totalMs : Math.min(ms, tally.totalMs)) / this.slowest);
      label.textContent = over ? duration(tally.totalMs) : `${shown} of ${tally.tokens.length}`;
    }
  }

  disconnectedCallback() {
    cancelAnimationFrame(this.#frame);
  }

  #step() {
    const now = performance.now();
    this.show(Math.min(this.#now + (now - this.#before) * Number(this.pace.value), this.end));
    this.#before = now;
    if (this.#now >= this.end) return this.pause();
    this.#frame = requestAnimationFrame(() => this.#step());
  }

  #showTokens() {
    for (const { pane } of this.lanes) pane.showTokens();
  }

  #label(text) {
    this.button.textContent = text;
  }
}

function verdict(ratio) {
  if (ratio >= 1.005) return `${decimal(ratio)}× faster`;
  return ratio <= 0.995 ? `${decimal(1 / ratio)}× slower` : "equally fast";
}

customElements.define("race-replay", RaceReplay);
