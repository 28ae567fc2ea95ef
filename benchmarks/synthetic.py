"""`python -m benchmarks.synthetic`: speed at real sizes without real weights, on a GPU.

Synthetic weights have the real cost and earn their acceptance: every layer's output projections are zero, so the
network maps token t to perm(t) through its embedding and output matrix while reading every weight. The draft's
permutation differs on a chosen share of the tokens. Verification is real; the text means nothing, and its logit
margins would hide errors, so exactness is tested elsewhere (tests/gpu).
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from benchmarks.synthetic_forms import quantised_decoder
from outrider.bench.bandwidth import gpu_bandwidth
from outrider.config import EngineConfig, SpeculationConfig
from outrider.control import Controller, FixedLength, Policy
from outrider.core import Request
from outrider.draft import Drafter
from outrider.draft.auto import AutoDrafter, arms_of
from outrider.draft.draft_model import DraftModel
from outrider.draft.ngram import NGramDrafter
from outrider.draft.none import NoDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.calibrate import calibrate
from outrider.engine.commit import OutputProcessor
from outrider.engine.device import Device
from outrider.engine.engine import Engine
from outrider.model import Decoder, Feed, LlamaShape, ModelSpec, Rope, compile_spec
from outrider.options import numbers
from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = [
    "SHAPES", "Synthetic", "SyntheticRun", "cycles", "measure_contexts", "measure_shapes", "permutations", "synthetic_decoder",
    "timed",
]  # fmt: skip

_LLAMA: dict[str, Any] = {"architecture": "LlamaForCausalLM", "vocab": 128256, "context": 4096, "rope": Rope(500000.0)}
SHAPES: dict[str, ModelSpec] = {
    "8b": LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, dtype="bfloat16", **_LLAMA).spec(),
    "1b": LlamaShape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, dtype="bfloat16", **_LLAMA).spec(),
    "70b": LlamaShape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, dtype="bfloat16", **_LLAMA).spec(),
    "qwen3-8b": LlamaShape("Qwen3ForCausalLM", 151936, 4096, 36, 32, 8, 128, 12288, 4096, Rope(1e6), qk_norm=True,
                           dtype="bfloat16").spec(),
    "gemma-2-9b": compile_spec({
        "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256000, "hidden_size": 3584, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256, "dtype": "bfloat16",
    }),
    "qwen3-30b-a3b": compile_spec({
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 4096,
        "rope_theta": 1e6, "dtype": "bfloat16", "tie_word_embeddings": False,
    }),
    "gpt-oss-20b": compile_spec({
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 4096, "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }),
    "two layers": LlamaShape(hidden=1024, layers=2, heads=16, kv_heads=4, head_dim=64, ffn=3072, dtype="bfloat16",
                             **_LLAMA).spec(),
    "qwen3.5-4b": compile_spec({  # untied, so that a token is followed by another: the bytes of a round are the same
        "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "tie_word_embeddings": False, "dtype": "bfloat16",
    }),
}  # fmt: skip
_PAGE = 64
_CYCLE = 64  # tokens after which the text repeats, so that a lookup hits


def permutations(vocab: int, agreement: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The target's next token of every token, in cycles of 64, and the draft's, which agrees on a share of them."""
    generator = torch.Generator().manual_seed(seed)
    order = cycles(vocab, generator)
    target = torch.arange(vocab)
    target[order] = order.roll(-1, 1)
    draft = target.clone()
    odd = torch.randperm(vocab, generator=generator)[: round((1 - agreement) * vocab)]
    draft[odd] = target[odd.roll(1)]
    return target, draft


def cycles(vocab: int, generator: torch.Generator) -> Tensor:
    """Tokens in cycles of 64, one to a row; a few belong to none."""
    order = torch.randperm(vocab, generator=generator)
    return order[: vocab - vocab % _CYCLE].view(-1, _CYCLE)


@torch.no_grad()
def synthetic_decoder(config: ModelSpec, perm: Tensor, device: str = "cuda") -> Decoder:
    """A decoder whose greedy choice after t is perm[t], built on the device. Where matrices are tied, that is t itself."""
    with torch.device(device):
        decoder = Decoder(config, torch.bfloat16, torch.bfloat16)
    decoder.requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 2:
            kind = name.rsplit(".", 1)[-1]
            wide = kind == "embedding" and not config.tied
            parameter.zero_() if kind in ("out", "down", "write") else parameter.normal_(std=1.0 if wide else 0.02)
        elif parameter.dim() == 3:  # the convolution of a recurrent layer
            parameter.normal_(std=0.3)
    if decoder.output is not None:
        decoder.output[perm.to(device)] = decoder.embedding
    return decoder


@dataclass(slots=True)
class SyntheticRun:
    """One generation: seconds per token after the first, and what speculation did."""

    tokens: int
    rounds: int
    seconds: float
    first_s: float
    right: bool  # the text is the permutation's
    full_tok_s: float = 0.0  # up to the end of the first sequence

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


class Synthetic:
    """A target of one of SHAPES, a draft of another with the target's vocabulary, and engines over them.

    `form` is one of `synthetic_forms.FORMS`: what the matrices of both are quantised to.
    """

    def __init__(
        self,
        agreement: float = 0.8,
        exact: bool = True,
        layers: int | None = None,
        pages: int = 1600,
        shape: str = "8b",
        context: int | None = None,
        form: str = "",
        draft: str = "1b",
    ) -> None:
        from outrider.model.cuda_runner import CudaOptions  # needs Triton

        self._layers, self._pages, self._context, self._form, self._draft = layers, pages, context, form, draft
        self.perm, self._drafted = permutations(SHAPES[shape].vocab, agreement)
        if SHAPES[shape].tied:
            self.perm = torch.arange(len(self.perm))
        self.options = CudaOptions(exact=exact)
        self.target = self._runner(shape, self.perm)

    @cached_property
    def draft(self) -> CudaRunner:
        return self._runner(self._draft, self._drafted, self.target)

    def use_draft(self, shape: str) -> None:
        """Draft with a model of another of SHAPES."""
        self._draft = shape
        self.__dict__.pop("draft", None)

    def _runner(self, shape: str, perm: Tensor, target: CudaRunner | None = None) -> CudaRunner:
        from outrider.model.cuda_runner import CudaRunner

        spec = replace(self._shortened(SHAPES[shape]), vocab=len(perm))
        decoder = quantised_decoder(spec, perm, self._form) if self._form else synthetic_decoder(spec, perm)
        return CudaRunner(decoder, self._pages, _PAGE, "cuda", self.options, target)

    def _shortened(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, layers=spec.layers[: self._layers], context=self._context or spec.context)

    def engine(
        self, drafter: Drafter | None = None, length: int = 0, policy: Policy | None = None, max_batch_rows: int = 2048
    ) -> Engine:
        config = EngineConfig(page_size=_PAGE, max_num_seqs=256, max_batch_rows=max_batch_rows, prefix_cache=False)
        return Engine(self.target, None, drafter or NoDrafter(), policy or FixedLength(length), config)

    def with_draft_model(self, length: int) -> Engine:
        return self.engine(DraftModel(self.draft), length)

    def with_ngram(self, length: int) -> Engine:
        return self.engine(NGramDrafter(), length)

    def auto(self, batch: int) -> Engine:
        """As `auto` resolves for a target that brings a draft model: suffix automaton and draft model."""
        members = (SpeculationConfig("suffix", draft_tokens=32), SpeculationConfig("draft_model", draft_tokens=12))
        arms = arms_of(members, on_gpu=True)
        drafters: list[Drafter] = [SuffixDrafter(), DraftModel(self.draft)]
        sizes = EngineConfig(page_size=_PAGE, max_num_seqs=batch, max_batch_rows=2048)
        costs = Device("cuda").warm_up(self.target, [self.draft], (), sizes, 12)
        engine = self.engine(AutoDrafter(drafters), policy=Controller(arms, costs))
        calibrate(engine, (1, 8, batch))
        return engine

    def prompt(self, length: int, start: int = 5) -> list[int]:
        """The first tokens of a cycle, over and over."""
        tokens = [start]
        while len(tokens) < length:
            tokens.append(int(self.perm[tokens[-1]]))
        return tokens

    def scattered(self, length: int, start: int) -> list[int]:
        """Tokens that no lookup finds again, then one to go on from."""
        generator = torch.Generator().manual_seed(start)
        return [*torch.randint(0, len(self.perm), (length - 1,), generator=generator).tolist(), start]

    def run(self, engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0) -> SyntheticRun:
        """Generate for all prompts at once."""
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True)
        writers = [
            engine.submit(Request(f"r{i}", tuple(prompt), params, i, frozenset(), tokens), "bench")
            for i, prompt in enumerate(prompts)
        ]
        begun = time.perf_counter()
        full: tuple[int, float] | None = None  # tokens and time when the first sequence ended
        while engine.has_work:
            engine.round()
            if full is None and any(writer.seq.finish_reason for writer in writers):
                full = sum(writer.seq.output_len - 1 for writer in writers), time.perf_counter()
        run = _measured(writers, begun, self.perm)
        if full is not None:
            run.full_tok_s = full[0] / (full[1] - min(writer.first_token for writer in writers))
        return run

    def forward_seconds(self, rows: int, context: int, batch: int = 1) -> float:
        """One replay of the target's graph alone, its rows shared by `batch` sequences."""
        share = rows // batch
        pages = [list(range(b * 8, b * 8 + 8)) for b in range(batch)]
        feeds = [Feed(pages[b], context, [5], [7] * (share - 1), list(range(-1, share - 2))) for b in range(batch)]
        graph = self.target.rounds.graph(rows)
        self.target.fill(graph.sides[0].inputs, feeds)
        graph.sides[0].inputs.send()
        return timed(graph.replay, 20)

    def draft_seconds(self, length: int, context: int) -> float:
        """One replay of the draft's graph alone."""
        chain = self.draft.chains.graph(1, length)
        self.draft.chains.fill(chain, [Feed(list(range(8)), context - 1, [5, 6])])
        return timed(chain.replay, 20)

    @torch.inference_mode()
    def prefill_seconds(self, tokens: int, repeats: int = 5) -> float:
        """The target's forward over a prompt, with the logits of its last row."""
        ids, pages = self.scattered(tokens, 3), list(range(tokens // _PAGE + 2))

        def read() -> None:
            self.target.logits(self.target.forward([Feed(pages, 0, ids)]).last, [tokens - 1])

        read()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            read()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)


def _measured(writers: Sequence[OutputProcessor], begun: float, perm: Tensor) -> SyntheticRun:
    first, last = min(w.first_token for w in writers), max(w.last_token for w in writers)
    right = all(_follows(writer.seq.tokens[writer.seq.prompt_len - 1 :], perm) for writer in writers)
    emitted = sum(writer.seq.output_len for writer in writers) - len(writers)
    rounds = max(writer.seq.stats.rounds for writer in writers) - 1
    return SyntheticRun(emitted, rounds, last - first, first - begun, right)


def _follows(tokens: Sequence[int], perm: Tensor) -> bool:
    return perm[torch.tensor(tokens[:-1])].tolist() == list(tokens[1:])


def timed(call: Callable[[], object], repeats: int) -> float:
    """Seconds of a call on the device, of many in a row."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats / 1e3


def measure_engine(
    bench: Synthetic, drafted: Sequence[int], tokens: int, prompt: int, lookups: Sequence[int] = (7, 15)
) -> Iterator[dict[str, Any]]:
    """Plain decoding, the draft model and n-gram lookup, each beside the time its forwards need alone."""
    text, middle = bench.prompt(prompt), prompt + tokens // 2
    plain, row = _plain(bench, text, tokens)
    yield row | {"of_273": plain.tok_s / 273}
    for k in drafted:
        run = _best(bench, bench.with_draft_model(k), text, tokens)
        forwards = bench.forward_seconds(_power(k + 1), middle), bench.draft_seconds(k, middle)
        yield _speculated(f"draft_model K={k}", run, plain, forwards)
    for k in lookups:
        run = _best(bench, bench.with_ngram(k), text, tokens)
        yield _speculated(f"ngram K={k}", run, plain, (bench.forward_seconds(k + 1, middle), 0.0))


def measure_shapes(shapes: Sequence[str], tokens: int, prompt: int) -> Iterator[dict[str, Any]]:
    """Plain decoding of other shapes."""
    for shape in shapes:
        bench = Synthetic(pages=64, shape=shape)
        yield {"shape": shape} | _plain(bench, bench.prompt(prompt), tokens)[1]
        del bench
        gc.collect()
        torch.cuda.empty_cache()


def measure_contexts(contexts: Sequence[int] = (512, 8192, 32768, 60000), tokens: int = 64) -> Iterator[dict[str, Any]]:
    """Reading a prompt, and plain decoding after it, by its length."""
    longest = max(contexts) + tokens
    bench = Synthetic(pages=longest // _PAGE + 8, context=-(-longest // 1024) * 1024)
    engine = bench.engine()
    bench.run(engine, [bench.scattered(512, 5)], tokens)  # captures the graphs
    for context in contexts:
        prompt = bench.scattered(context, 5)
        run = min((bench.run(engine, [prompt], tokens) for _ in range(2)), key=lambda run: run.seconds)
        yield {
            "what": f"context {context}", "tok_s": run.tok_s, "prefill_tok_s": context / run.first_s, "right": run.right
        }  # fmt: skip


def _plain(bench: Synthetic, text: Sequence[int], tokens: int) -> tuple[SyntheticRun, dict[str, Any]]:
    """Plain decoding at batch 1 beside the time in which this device reads the weights."""
    floor = bench.target.weight_bytes / gpu_bandwidth()
    plain = _best(bench, bench.engine(), text, tokens)
    alone = bench.forward_seconds(1, len(text) + tokens // 2)
    return plain, {
        "what": "plain", "tok_s": plain.tok_s, "right": plain.right, "floor_tok_s": 1 / floor, "of_floor": plain.tok_s * floor,
        "forward_ms": alone * 1e3, "efficiency": alone / (plain.seconds / plain.rounds),
    }  # fmt: skip


def _speculated(what: str, run: SyntheticRun, plain: SyntheticRun, forwards: tuple[float, float]) -> dict[str, Any]:
    wall = run.seconds / run.rounds
    return {
        "what": what, "tok_s": run.tok_s, "right": run.right, "speedup": run.tok_s / plain.tok_s,
        "tokens_per_round": run.tokens / run.rounds, "round_ms": wall * 1e3, "verify_ms": forwards[0] * 1e3,
        "draft_ms": forwards[1] * 1e3, "efficiency": sum(forwards) / wall,
    }  # fmt: skip


def _best(bench: Synthetic, engine: Engine, prompt: Sequence[int], tokens: int, repeats: int = 3) -> SyntheticRun:
    """The median of a few runs after one that captures graphs."""
    bench.run(engine, [prompt], tokens)
    return sorted((bench.run(engine, [prompt], tokens) for _ in range(repeats)), key=lambda run: run.seconds)[repeats // 2]


def measure_batches(bench: Synthetic, batches: Sequence[int], tokens: int) -> Iterator[dict[str, Any]]:
    """Throughput of plain decoding and of `auto` by batch size, on texts without repeats, alternating."""
    plain, auto = bench.engine(), bench.auto(max(batches))
    gc.collect()
    gc.freeze()  # a collection of all that torch and Triton keep takes longer than many rounds
    for batch in batches:
        prompts = [bench.scattered(32, 1000 + 64 * i) for i in range(batch)]
        for engine in (plain, auto):
            bench.run(engine, prompts, tokens)
        pairs = [(bench.run(plain, prompts, tokens), bench.run(auto, prompts, tokens)) for _ in range(5)]
        plain_tok_s, auto_tok_s = (statistics.median(pair[i].tok_s for pair in pairs) for i in (0, 1))
        full = statistics.median(pair[1].full_tok_s / pair[0].full_tok_s for pair in pairs)
        right = all(run.right for pair in pairs for run in pair)
        yield {"what": f"batch {batch}", "plain_tok_s": plain_tok_s, "auto_tok_s": auto_tok_s,
               "auto_over_plain": auto_tok_s / plain_tok_s, "while_all_run": full, "right": right}  # fmt: skip


def measure_transformers(
    perm: Tensor, agreement: float, tokens: int, prompt: Sequence[int], k: int = 5
) -> Iterator[dict[str, Any]]:
    """Transformers on the same shapes and permutations: eager, assisted, and compiled with a static cache."""
    target = _transformers_model(SHAPES["8b"], perm)
    draft = _transformers_model(SHAPES["1b"], permutations(len(perm), agreement)[1])
    ids = torch.tensor([list(prompt)], device="cuda")
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ways: dict[str, dict[str, Any]] = {
        "transformers eager": {},
        f"transformers assisted K={k}": {"assistant_model": draft},
        "transformers static cache, compiled": {"cache_implementation": "static"},
    }
    short: float | None = None  # reading the prompt and the first token, eager; other lengths would compile again
    for name, options in ways.items():
        generate = partial(target.generate, ids, do_sample=False, **options)
        generate(max_new_tokens=tokens, min_new_tokens=tokens)
        if short is None:
            short = _wall(lambda: target.generate(ids, do_sample=False, max_new_tokens=1))[0]
        long, text = _wall(lambda run=generate: run(max_new_tokens=tokens, min_new_tokens=tokens))  # type: ignore[misc]
        right = _follows(text[0, len(prompt) - 1 :].tolist(), perm)
        yield {"what": name, "tok_s": (tokens - 1) / (long - short), "right": right}


def _wall(call: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def _transformers_model(c: ModelSpec, perm: Tensor) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.depth, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn, max_position_embeddings=c.context,
        rms_norm_eps=c.norm.eps, tie_word_embeddings=False, dtype=torch.bfloat16, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"), torch.no_grad():
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.0 if "embed" in name else 0.02)
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.lm_head.weight[perm.to("cuda")] = model.model.embed_tokens.weight
    model.generation_config.eos_token_id = None
    return model


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def main(
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens the draft guesses right.")] = 0.8,
    drafted: Annotated[str, typer.Option(help="Comma-separated numbers of draft tokens.")] = "2,3,4,5",
    transformers: Annotated[bool, typer.Option(help="Measure Transformers beside it: eager, assisted, compiled.")] = True,
) -> None:
    """Speed of 8B- and 1B-shaped models with synthetic weights on a GPU; one JSON line per number."""
    Device.resolve("cuda")
    from benchmarks.gpu import gpu_environment

    print(json.dumps(gpu_environment()), flush=True)
    bench = Synthetic(agreement)
    for row in measure_engine(bench, numbers("--drafted", drafted, int), 256, 128):
        print(json.dumps(row), flush=True)
    if transformers:
        for row in measure_transformers(bench.perm, agreement, 256, bench.prompt(128)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
