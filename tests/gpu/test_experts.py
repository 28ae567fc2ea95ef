"""Kernels for mixtures of experts: the choice, the pairs by expert, and the products, against torch; rows keep their bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Batch, Drafts, Sequence
from outrider.draft import Drafter
from outrider.engine import commit
from outrider.engine.commit import advance
from outrider.engine.engine import Engine
from outrider.model import Decoder, ModelSpec
from outrider.model.experts import activated, routes_of
from outrider.model.spec import Clamp, FeedForward, Router
from outrider.ops import Plain
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, Oracle, make_request

INTERPRETED = True
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LIMIT = 1000  # slots from here on are those of padding
ROUTERS = {
    "softmax of the chosen": Router(6, 3),
    "softmax of all, a gate": Router(7, 2, normalised=False),
    "sigmoid, groups, a correction": Router(8, 3, "sigmoid", correction=True, groups=4, chosen_groups=2, scale=2.5),
    "softmax with a correction": Router(8, 2, correction=True),
    "biases": Router(32, 4, bias=True),
    "sparsemixer": Router(16, 2, "sparsemixer", normalised=False, closeness=0.02),
    "many": Router(128, 8),
}
HIDDEN = 64


@pytest.fixture(scope="module")
def launch() -> Any:
    from outrider.ops.cuda import experts_launch

    return experts_launch


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def router_of(launch: Any, r: Router, hidden: int = HIDDEN, gate: bool = False) -> Any:
    columns = r.experts + gate
    bias, correction = random(r.experts, seed=2) if r.bias else None, random(r.experts, seed=3) if r.correction else None
    numbers = (r.experts, r.chosen, r.scores, r.groups, r.chosen_groups, r.normalised, r.scale, r.closeness)
    return launch.ExpertRouter(random(columns, hidden, seed=1, scale=hidden**-0.5), bias, correction, *numbers)


def route(launch: Any, x: Tensor, r: Any, padding: int = 0, **options: Any) -> tuple[Any, int]:
    """Routes of rows of which the last ones are padding, and how many experts the others have."""
    kernels = launch.ExpertKernels(x.dtype, x.device, 3)
    slots = torch.arange(len(x), dtype=torch.int32, device=x.device)
    slots[len(x) - padding :] = LIMIT
    routes = kernels.route(x, r, slots, LIMIT, 1, **options)
    assert kernels.touched[[0, 2]].tolist() == [0, 0]
    return routes, int(kernels.touched[1])


def assert_sorted(routes: Any, experts: int, padding: int) -> None:
    """Pairs lie by expert, then by row, padding last, and the work items are all of them in order."""
    chosen = routes.experts.shape[1]
    pairs = [(int(e), p) for p, e in enumerate(routes.experts.flatten().tolist())]
    real = len(pairs) - padding * chosen
    want = [p for _, p in sorted(pairs[:real])] + list(range(real, len(pairs)))
    assert routes.order.tolist() == want
    items = routes.items.tolist()
    listed = [tuple(items[2 + 3 * i : 5 + 3 * i]) for i in range(items[1])]
    assert [p for _, first, count in listed for p in range(first, first + count)] == list(range(len(pairs)))
    assert all(e == experts for e, _, _ in listed[items[0] :])
    for e, first, count in listed[: items[0]]:
        assert {pairs[p][0] for p in routes.order[first : first + count].tolist()} == {e}
        assert 0 < count <= routes.tiles[0].rows
    assert items[1] <= routes.max_items


@pytest.mark.parametrize("name", ROUTERS)
def test_rows_choose_as_the_plain_router_does(launch: Any, name: str) -> None:
    r, gate = ROUTERS[name], "gate" in name
    router = router_of(launch, r, gate=gate)
    for rows, padding in ((1, 0), (5, 2), (41, 0)):
        x = random(rows, HIDDEN, seed=rows)
        logits = x @ router.matrix.T
        want = routes_of(logits[:, : r.experts], r, router.bias, router.correction, Plain())
        routes, touched = route(launch, x, router, padding)
        assert torch.equal(routes.experts, want.experts.int())
        torch.testing.assert_close(routes.weights, want.weights, rtol=1e-4, atol=1e-6)
        if gate:
            torch.testing.assert_close(routes.gates, logits[:, r.experts].sigmoid(), rtol=1e-4, atol=1e-6)
        assert_sorted(routes, r.experts, padding)
        assert touched == len(set(want.experts[: rows - padding].flatten().tolist()))


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lower_number(launch: Any, name: str) -> None:
    r = ROUTERS[name]
    router = router_of(launch, r)
    router.matrix[:] = router.matrix[:1]
    if router.bias is not None:
        router.bias[:] = 0.5
    if router.correction is not None:
        router.correction[:] = 0.5
    routes, _ = route(launch, random(3, HIDDEN), router)
    assert routes.experts.tolist() == [list(range(r.chosen))] * 3


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")  # of numpy
def test_rows_that_are_not_finite_choose_experts_too(launch: Any) -> None:
    for r in ROUTERS.values():
        x = random(3, HIDDEN)
        x[1] = float("nan")
        routes, _ = route(launch, x, router_of(launch, r))
        assert_sorted(routes, r.experts, 0)
        assert routes.experts[1].tolist() == sorted(set(routes.experts[1].tolist()))
        alone, _ = route(launch, x[2:].clone(), router_of(launch, r))
        assert torch.equal(alone.weights[0], routes.weights[2])


@pytest.mark.parametrize("rows_of_padding", [[0], [2, 3], [1, 4, 35]])
def test_padding_may_lie_between_rows(launch: Any, rows_of_padding: list[int]) -> None:
    """Drafts that outgrow their pages write to the padding's slots."""
    r = ROUTERS["many"]
    router, x = router_of(launch, r), random(41, HIDDEN)
    slots = torch.arange(41, dtype=torch.int32, device=DEVICE)
    slots[rows_of_padding] = LIMIT + 5
    routes = launch.ExpertKernels(x.dtype, x.device, 1).route(x, router, slots, LIMIT, 0)
    real = [p for p in range(41 * 8) if p // 8 not in rows_of_padding]
    by_expert = sorted(real, key=lambda p: (routes.experts.flatten()[p].item(), p))
    assert routes.order.tolist() == by_expert + [p for p in range(41 * 8) if p // 8 in rows_of_padding]


FORMS = {
    "silu": FeedForward(48),
    "gelu_tanh, biases": FeedForward(40, "gelu_tanh", bias=True),
    "clamped, biases": FeedForward(64, bias=True, clamp=Clamp(0.7, 1.702)),
    "relu2, one matrix": FeedForward(48, "relu2", gated=False),
    "a scaled gate": FeedForward(48, gate_scale=1.3),
}


def weights_of(launch: Any, m: FeedForward, experts: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> Any:
    from outrider.ops.cuda.launch import pair_rows

    opened = random(experts * m.up_width, hidden, seed=5, scale=hidden**-0.5).to(dtype)
    closing = random(experts * hidden, m.width, seed=6, scale=m.width**-0.5).to(dtype)
    biases = (random(experts * m.up_width, seed=7), random(experts * hidden, seed=8)) if m.bias else (None, None)
    biases = tuple(None if b is None else b.to(dtype) for b in biases)
    paired = launch.ExpertWeights(opened, closing, *biases)
    if m.gated:
        bias = None if biases[0] is None else pair_rows(biases[0], experts)
        paired = launch.ExpertWeights(pair_rows(opened, experts), closing, bias, biases[1])
    return paired, launch.ExpertWeights(opened, closing, *biases)


def opening_of(launch: Any, m: FeedForward) -> Any:
    clamp = (0.0, 0.0) if m.clamp is None else (m.clamp.limit, m.clamp.alpha)
    return launch.Opening(m.activation, m.gated, m.gate_scale, *clamp)


def plain_parts(x: Tensor, routes: Any, w: Any, m: FeedForward, experts: int) -> Tensor:
    """What `parts` gives, in float64."""
    chosen, hidden = routes.experts.shape[1], x.shape[1]
    opened, closing = w.open.double().chunk(experts), w.close.double().chunk(experts)
    out = torch.zeros(chosen, len(x), hidden, dtype=torch.float64, device=x.device)
    for row in range(len(x)):
        for k, e in enumerate(routes.experts[row].tolist()):
            inner = x[row].double() @ opened[e].T
            inner = inner if w.open_bias is None else inner + w.open_bias.double().chunk(experts)[e]
            y = activated(inner[None], m, Plain())[0].double() @ closing[e].T
            y = y if w.close_bias is None else y + w.close_bias.double().chunk(experts)[e]
            out[k, row] = y * routes.weights[row, k].double()
    return out


@pytest.mark.parametrize("form", FORMS)
def test_what_experts_give(launch: Any, form: str) -> None:
    m, r = FORMS[form], ROUTERS["softmax of the chosen"]
    x, router = random(37 if ON_GPU else 19, HIDDEN), router_of(launch, r)
    kernels = launch.ExpertKernels(x.dtype, x.device, 1)
    slots = torch.arange(len(x), dtype=torch.int32, device=DEVICE)
    slots[-2:] = LIMIT
    routes = kernels.route(x, router, slots, LIMIT, 0)
    paired, plain = weights_of(launch, m, r.experts)
    out = torch.full((r.chosen + 1, *x.shape), float("nan"), device=DEVICE)  # with room for a shared expert
    kernels.parts(x, routes, paired, opening_of(launch, m), out)
    assert bool(out[-1].isnan().all())
    want = plain_parts(x, routes, plain, m, r.experts)
    want[:, -2:] = 0.0
    torch.testing.assert_close(out[:-1], want.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="numpy sums products of other sizes otherwise")
@pytest.mark.parametrize(("experts", "chosen", "hidden", "width"), [(16, 4, 2048, 768), (8, 2, 720, 2880)])
def test_rows_keep_their_bits_whatever_the_tile_and_the_rows_beside_them(
    launch: Any, experts: int, chosen: int, hidden: int, width: int
) -> None:
    from outrider.ops.cuda.tiles import every_expert_tile

    r, m = Router(experts, chosen, bias=True), FeedForward(width, bias=True)
    router, dtype = router_of(launch, r, hidden), torch.bfloat16
    x, (paired, _) = random(300, hidden).to(dtype), weights_of(launch, m, experts, dtype, hidden)
    kernels, opening = launch.ExpertKernels(dtype, x.device, 1), opening_of(launch, m)
    slots = torch.arange(300, dtype=torch.int32, device=DEVICE)

    def given(rows: slice, tiles: Any = None) -> tuple[Tensor, Tensor]:
        part = x[rows].clone()
        routes = kernels.route(part, router, slots[rows], LIMIT, 0, tiles)
        out = torch.full((chosen, *part.shape), float("nan"), device=DEVICE)
        kernels.parts(part, routes, paired, opening, out)
        return out, routes.weights

    out, weights = given(slice(300))
    assert bool(torch.isfinite(out).all())
    for first, count in ((0, 1), (7, 1), (3, 2), (50, 16), (1, 33), (100, 70), (40, 200)):
        part, part_weights = given(slice(first, first + count))
        assert torch.equal(part_weights, weights[first : first + count])
        assert torch.equal(part, out[:, first : first + count]), (first, count)
    for tiles in every_expert_tile():
        part, _ = given(slice(20, 90), tiles)
        assert torch.equal(part, out[:, 20:90]), tiles


def wide(name: str) -> Decoder:
    """The features of a small model at widths of published ones, with random weights."""
    spec, sinks = FEATURE_SPECS[name], "sinks" in name
    hidden, heads, head, width = (2880, 64, 64, 2880) if sinks else (2048, 32, 128, 768)
    spec = spec.with_layers(heads=heads, kv_heads=heads // 8, head_dim=head, scale=head**-0.5)
    layers = tuple(replace(layer, mlp=replace(layer.mlp, width=width, shared=layer.mlp.shared and 512)) for layer in spec.layers)
    return random_decoder(replace(spec, hidden=hidden, layers=layers, vocab=4096), "bfloat16")


SPECS = [name for name in FEATURE_SPECS if name.startswith("experts")]


@pytest.mark.usefixtures("products_of_fixed_order")
@pytest.mark.parametrize("name", SPECS if ON_GPU else SPECS[2:3])
def test_drafts_trees_and_batches_change_no_logit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every emitted position are equal alone and in a batch with chains and trees, bit for bit."""
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    decoder = wide(name) if ON_GPU else random_decoder(FEATURE_SPECS[name])
    runner = CudaRunner(decoder, 60, 16, DEVICE, CudaOptions(graphs=ON_GPU, max_graph_rows=64))
    seen: dict[str, list[Tensor]] = {}

    def recording(writer: Any, emitted: Any, rows: Any, scores: Any) -> Any:
        settled = advance(writer, emitted, rows, scores)
        kept = [scores.logits[row].detach().clone().cpu() for row in rows[: settled.kept]]
        seen.setdefault(writer.seq.request.id, []).extend(kept)
        return settled

    monkeypatch.setattr(commit, "advance", recording)
    lengths, tokens = ([3, 40, 17, 64, 90], 24) if ON_GPU else ([3, 6], 3)
    params = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=tokens) for i in range(len(lengths))]
    prompts = [[(7 * i + n) % decoder.spec.vocab for i in range(n)] for n in lengths]
    requests = [make_request(prompt, p, f"r{i}") for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]

    def run(drafter: Drafter, length: int, together: int, chunk: int) -> tuple[dict[str, list[int]], dict[str, list[Tensor]]]:
        config = EngineConfig(page_size=16, max_num_seqs=together, max_batch_rows=chunk, prefix_cache=False)
        engine = Engine(runner, None, drafter, FixedLength(length), config)
        seen.clear()
        writers = [engine.submit(request, "test") for request in requests]
        while engine.has_work:
            engine.round()
        return {writer.seq.request.id: writer.seq.tokens for writer in writers}, dict(seen)

    texts, logits = run(NoDrafter(), 0, 1, 512)
    vocab = decoder.spec.vocab
    drafters = [(Oracle(texts, 5, branches=3, seed=1, vocab=vocab), 8 if ON_GPU else 4, 2, 40)]
    if ON_GPU:
        drafters += [
            (NoDrafter(), 0, 5, 37),
            (Oracle(texts, 7, vocab=vocab), 7, 1, 512),
            (Oracle(texts, 9, 6, 2, vocab=vocab), 15, 5, 64),
        ]
    for drafter, length, together, chunk in drafters:
        got, bits = run(drafter, length, together, chunk)
        assert got == texts
        for request, rows in logits.items():
            assert all(torch.equal(a, b) for a, b in zip(rows, bits[request], strict=True)), (request, length)


def test_scores_count_the_experts_that_were_read() -> None:
    """The mean over layers with experts, by rows of a prompt and by rounds of graphs; rows of padding read none."""
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    spec = FEATURE_SPECS["experts, a shared one behind a gate, a dense layer"]
    runner = CudaRunner(random_decoder(spec), 9, 16, DEVICE, CudaOptions(graphs=ON_GPU))
    assert [_experts(runner, count) for count in (1, 20)] == [2.0, 7.0]
    batch = [_sequence(spec, [5], [b], cached=0) for b in range(3)]  # in a graph of four rows
    assert runner.score(Batch(batch, [1] * 3), Drafts.empty(3)).experts == 2.0
    assert runner.score(Batch(batch[:1], [1]), Drafts.chains([[5, 5]])).experts >= 2.0


def _experts(runner: Any, count: int) -> float:
    seq = _sequence(runner.decoder.spec, [i * 11 % 97 for i in range(count)], [4, 5, 6, 7], cached=0)
    return float(runner.score(Batch([seq], [count]), Drafts.empty(1)).experts)


def _sequence(spec: ModelSpec, tokens: list[int], pages: list[int], cached: int) -> Sequence:
    assert max(tokens) < spec.vocab
    seq = Sequence(make_request(tokens, SamplingParams(max_tokens=4)))
    seq.pages, seq.cached = pages, cached
    return seq
