"""The decoder against Transformers, in float32, on small random models of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.model import Feed, Runner, load_decoder
from tests.support import BASE, FAMILIES, VOCAB, make_pool

pytestmark = pytest.mark.usefixtures("both_paths")

LENGTH = 70
PAGES = [3, 9, 1, 7, 4]
# token, parent: two branches from the root, one of them forking again
TREE = [(5, -1), (17, -1), (8, 0), (31, 0), (2, 2), (40, 1), (77, 4)]
VARIANTS = {
    **FAMILIES,
    "llama-bias-linear-rope": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": 10000.0,
    },
    "qwen2-mixed-windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
}


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A Transformers model and the runner that loaded what it saved."""
    import transformers

    fields = dict(BASE | VARIANTS[request.param])
    name = fields.pop("architectures")[0]
    torch.manual_seed(3)
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**fields)
    reference = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    return reference, Runner(decoder, make_pool(decoder))


def expected(reference, tokens: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


def test_prefill_decode_and_tree_agree(pair) -> None:  # type: ignore[no-untyped-def]
    reference, runner = pair
    text = [i * 37 % VOCAB for i in range(LENGTH)]
    want = expected(reference, text)

    prefill = runner.logits(runner.forward([Feed(PAGES, 0, text)]).last, range(LENGTH))
    torch.testing.assert_close(prefill, want, atol=1e-4, rtol=0)

    steps = [runner.logits(runner.forward([Feed(PAGES, i, [token])]).last, [0]) for i, token in enumerate(text)]
    assert torch.equal(torch.cat(steps), prefill), "decoding token by token gives the bits of prefill"

    tokens, parents = zip(*TREE, strict=True)
    rows = runner.logits(runner.forward([Feed(PAGES, LENGTH - 1, text[-1:], tokens, parents)]).last, range(len(TREE) + 1))
    assert torch.equal(rows[0], prefill[-1])
    for node in range(len(TREE)):
        path: list[int] = []
        here = node
        while here >= 0:
            path.insert(0, tokens[here])
            here = parents[here]
        torch.testing.assert_close(rows[node + 1], expected(reference, text + path)[-1], atol=1e-4, rtol=0)
        alone = runner.logits(runner.forward([Feed(PAGES, LENGTH, path)]).last, [len(path) - 1])[0]
        assert torch.equal(rows[node + 1], alone), "a tree node gives the bits of its path decoded alone"


def test_taps_are_the_rows_entering_a_layer(pair) -> None:  # type: ignore[no-untyped-def]
    reference, runner = pair
    text = [i * 11 % VOCAB for i in range(20)]
    layers = runner.decoder.spec.depth
    hidden = runner.forward([Feed(PAGES, 0, text)], taps=(0, 1, layers - 1))
    with torch.no_grad():
        states = reference(torch.tensor([text]), output_hidden_states=True).hidden_states
    for tap, layer in zip(hidden.taps, (0, 1, layers - 1), strict=True):
        torch.testing.assert_close(tap[:20], states[layer][0], atol=1e-4, rtol=0)
