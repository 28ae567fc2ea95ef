// Counting one run as its tokens come in, and what it adds up to.

/** Tokens, rounds and guesses of a run. A round is the guesses that came true and the target's own token after them. */
export class Tally {
  tokens = [];
  text = "";
  rounds = 0;
  guessed = 0;
  reached = []; // rounds in which the guess at each position became text
  started = performance.now();
  first = 0;
  last = 0;
  open = false; // the newest token was a guess, so its round goes on
  finish = null;
  metrics = null;

  /** Take the details of one chunk; each token learns whether it opens a round. */
  add(details) {
    if (!details.length) return;
    this.last = performance.now();
    this.first ||= this.last;
    for (const token of details) {
      const guess = token.source !== "target";
      token.opens = !this.open;
      if (token.opens) this.rounds++;
      if (guess) {
        this.guessed++;
        const at = token.position ?? 0;
        while (this.reached.length <= at) this.reached.push(0);
        this.reached[at]++;
      }
      this.open = guess;
      this.tokens.push(token);
    }
  }

  get ids() {
    return this.tokens.map((token) => token.id);
  }

  get spec() {
    return this.metrics?.speculative_decoding ?? null;
  }

  /** Of decoding, from the first token on. Times are the server's where the run is over, else this page's. */
  get speed() {
    const seconds = (this.totalMs - this.firstMs) / 1000;
    return seconds > 0 ? (this.tokens.length - 1) / seconds : null;
  }

  get totalMs() {
    return this.metrics?.timings?.total_ms ?? (this.last ? this.last - this.started : null);
  }

  get firstMs() {
    return this.metrics?.timings?.first_token_ms ?? (this.first ? this.first - this.started : null);
  }

  get perRound() {
    return this.spec?.tokens_per_round || (this.rounds ? this.tokens.length / this.rounds : null);
  }

  /** Share of the text that was guessed. */
  get share() {
    return this.tokens.length ? this.guessed / this.tokens.length : null;
  }

  /** While it runs: in which share of rounds a guess at each position came true. Then the server's: of those drafted there. */
  get byPosition() {
    const told = this.spec?.acceptance_by_position;
    if (told?.length) return told;
    const rounds = Math.max(this.rounds - 1, 1); // the first round reads the prompt and has no draft
    return this.reached.map((count) => Math.min(count / rounds, 1));
  }
}

/** Where two runs part: null where their tokens are equal. */
export function parting(one, other) {
  const [a, b] = [one.ids, other.ids];
  const at = a.findIndex((id, i) => id !== b[i]);
  if (at >= 0) return at;
  return a.length === b.length ? null : a.length;
}
