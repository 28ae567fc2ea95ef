// Counting one run as its tokens come in, and what it adds up to.

/** Tokens, rounds and guesses of a run. A round is the accepted guesses and the target's token after them. */
export class Tally {
  tokens = [];
  text = "";
  reasoning = ""; // what the model wrote before its answer
  calls = []; // tool calls: {id, name, arguments}
  rounds = 0;
  guessed = 0;
  accepted = []; // drafts whose guess at each position was accepted
  drafted = []; // drafts that reached each position
  started = performance.now();
  first = 0;
  last = 0;
  depth = 0; // accepted guesses of the round that goes on
  finish = null;
  metrics = null;

  /** Take one event of the stream. */
  take(event) {
    const choice = event.choices?.[0];
    this.metrics = event.metrics ?? this.metrics;
    this.finish = choice?.finish_reason ?? this.finish;
    this.text += choice?.text ?? choice?.delta?.content ?? "";
    this.reasoning += choice?.delta?.reasoning_content ?? "";
    for (const call of choice?.delta?.tool_calls ?? []) this.#call(call);
    this.add(choice?.token_details ?? []);
    return choice?.token_details ?? [];
  }

  /** Each token learns when it came, whether it opens a round, and how many guesses of its round were accepted. */
  add(details) {
    if (!details.length) return;
    this.last = performance.now();
    this.first ||= this.last;
    for (const token of details) {
      const guess = token.source !== "target";
      token.ms = this.last - this.started;
      token.opens = this.depth === 0;
      if (token.opens) this.rounds++;
      if (guess) {
        this.guessed++;
        this.depth++;
        this.#count(this.accepted, token.position);
        this.#count(this.drafted, token.position);
      }
      token.depth = this.depth;
      const reach = Math.max(0, ...(token.rejected ?? []).map((node) => node.position + 1));
      for (let position = this.depth; position < reach; position++) this.#count(this.drafted, position);
      if (!guess) this.depth = 0;
      this.tokens.push(token);
    }
  }

  #count(counts, position) {
    while (counts.length <= position) counts.push(0);
    counts[position]++;
  }

  /** In a stream, id and name come once and arguments in pieces. */
  #call({ index, id, function: part }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= part?.name ?? "";
    call.arguments += part?.arguments ?? "";
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
    return this.rounds ? this.tokens.length / this.rounds : null;
  }

  /** Share of the text that was guessed. */
  get share() {
    return this.tokens.length ? this.guessed / this.tokens.length : null;
  }

  /** Of the drafts that reached a position, in which share the guess there was accepted: now as at the end. */
  get byPosition() {
    return this.drafted.map((reached, position) => ({ share: (this.accepted[position] ?? 0) / reached, of: reached }));
  }
}

/** Where two runs part: null where their tokens are equal. */
export function parting(one, other) {
  const [a, b] = [one.ids, other.ids];
  const at = a.findIndex((id, i) => id !== b[i]);
  if (at >= 0) return at;
  return a.length === b.length ? null : a.length;
}
