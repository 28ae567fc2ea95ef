// The running server at a glance, from /stats once a second while someone looks.

import "./charts.js";
import { askJson } from "./api.js";
import { marks } from "./palette.js";
import { count, decimal, duration, el, percent, plain, speed, uptime } from "./words.js";

const POINTS = 120;

class ServerDashboard extends HTMLElement {
  #speeds = [];
  #timer = 0;
  #parts = {};

  connectedCallback() {
    const tile = (name, label, ...more) => el("div", { class: "tile" }, el("dt", {}, label), (this.#parts[name] = el("dd", {}, "–")), ...more);
    const listing = (name) => (this.#parts[name] = el("div", { class: "listing" }));
    const panel = (name, title) => el("section", { class: "card" }, el("h2", {}, title), listing(name));
    this.#parts.spark = el("spark-line", { points: POINTS, label: "Tokens per second over the last two minutes" });
    this.#parts.chart = el("acceptance-chart", { large: true });
    this.#parts.trouble = el("p", { class: "trouble", role: "alert", hidden: true });
    this.#parts.usage = el("i", { class: "meter" });
    this.append(
      this.#parts.trouble,
      el("dl", { class: "tiles" },
        el("div", { class: "tile wide" }, el("dt", {}, "Tokens per second"), (this.#parts.speed = el("dd", {}, "–")), this.#parts.spark),
        tile("rounds", "Tokens per round"), tile("running", "Running"), tile("waiting", "Waiting"),
        tile("kv", "KV memory", this.#parts.usage), tile("prefix", "Prefix hits"), tile("preempted", "Preemptions"),
        tile("generated", "Tokens generated"), tile("up", "Up for")),
      el("div", { class: "panels" },
        panel("latency", "Latency"), panel("methods", "By drafter"),
        el("section", { class: "card" }, el("h2", {}, "Acceptance by draft position"), this.#parts.chart,
          el("p", { class: "note" }, "Of the drafts that reached a position, the share whose guess there was accepted.")),
        el("section", { class: "card" }, el("h2", {}, "Why speculation was off"), listing("reasons"), el("h2", {}, "Finished requests"), listing("finished"))));
  }

  /** Ask now and then every second, while shown and the tab is in front. */
  watch(on) {
    clearInterval(this.#timer);
    if (!on) return;
    this.#poll();
    this.#timer = setInterval(() => document.hidden || this.#poll(), 1000);
  }

  async #poll() {
    const { trouble } = this.#parts;
    try {
      this.#show(await askJson("stats"));
      trouble.hidden = true;
    } catch (error) {
      trouble.replaceChildren(el("strong", {}, error.message), el("span", {}, error.hint ?? ""));
      trouble.hidden = false;
      if (error.status !== 401) return;
      this.watch(false); // until there is another key
      document.dispatchEvent(new Event("key-wanted"));
    }
  }

  #show(stats) {
    const parts = this.#parts;
    this.#speeds = [...this.#speeds, stats.tokens_per_s ?? 0].slice(-POINTS);
    parts.spark.values = this.#speeds;
    const words = {
      speed: speed(stats.tokens_per_s), rounds: decimal(stats.tokens_per_round || null), running: count(stats.running), waiting: count(stats.waiting),
      kv: percent(stats.kv_usage, 1), prefix: percent(stats.prefix_hit_rate), preempted: count(stats.preemptions),
      generated: count(stats.generated_tokens), up: uptime(stats.uptime_s),
    };
    for (const [name, word] of Object.entries(words)) parts[name].textContent = word;
    parts.usage.style.setProperty("--share", stats.kv_usage ?? 0);
    parts.chart.values = (stats.acceptance_by_position ?? []).map((share) => ({ share }));
    parts.latency.replaceChildren(...latency(stats.latency));
    const methods = Object.entries(stats.by_method ?? {}).map(([name, own]) => [swatch(name), count(own.drafted), count(own.accepted), percent(own.drafted ? own.accepted / own.drafted : null)]);
    parts.methods.replaceChildren(table(["Drafter", "Guessed", "Accepted", "Share"], methods, "Nothing has been guessed yet."));
    parts.reasons.replaceChildren(table(["Reason", "Count"], pairs(stats.off_reasons), "It has not been off."));
    parts.finished.replaceChildren(table(["Reason", "Requests"], pairs(stats.finished), "None yet."));
  }
}

const swatch = (name) => el("span", { class: `key ${marks(name)}` }, el("i", { class: "swatch" }), plain(name));

const LATENCIES = [["queue_ms", "In the queue"], ["first_token_ms", "To the first token"], ["inter_token_ms", "Between tokens"], ["total_ms", "Whole request"]];

/** Percentiles: half of the requests, and 19 of 20, took no longer. */
function latency(times) {
  const rows = times?.requests ? LATENCIES.map(([name, label]) => [label, duration(times[name]?.p50), duration(times[name]?.p95)]) : [];
  const note = `The last ${count(times?.requests)} requests; between tokens, all since the start.`;
  return [table(["Time", "p50", "p95"], rows, "Nothing has been generated yet."), ...(rows.length ? [el("p", { class: "note" }, note)] : [])];
}

const pairs = (record) => Object.entries(record ?? {}).filter(([, value]) => value).map(([name, value]) => [plain(name), count(value)]);

function table(head, rows, otherwise) {
  if (!rows.length) return el("p", { class: "note" }, otherwise);
  const cells = (row, name) => row.map((text, i) => el(name, i ? { class: "number" } : {}, text));
  return el("table", {}, el("thead", {}, el("tr", {}, ...cells(head, "th"))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row, "td")))));
}

customElements.define("server-dashboard", ServerDashboard);
