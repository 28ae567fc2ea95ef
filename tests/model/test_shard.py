"""A rank's share of the stored weights: the shares of all ranks make up the model, and none of them is more than a share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.model import Decoder, LoadOptions, load_decoder
from outrider.model.decoder import Layer
from outrider.model.load import describe_decoder
from outrider.model.shard import LACKS, Cut, open_shard, vocabulary_share
from tests.support import write_family
from tests.support.families import CASES, VOCAB, build_reference
from tests.support.gguf_files import write_gguf

RANKS = 2
STORED = [  # every way in which products lie in files: split, fused, by head, transposed, in another rotary order, with biases
    "llama-biased", "gemma2", "phi", "phi3", "glm", "falcon-40b", "pythia", "gptj", "stablelm-parallel", "cohere-normed",
]  # fmt: skip


def assert_shares_make_up(folder: Path, options: LoadOptions = LoadOptions()) -> None:  # noqa: B008 (it is frozen)
    whole = load_decoder(folder, options)
    described = describe_decoder(folder, options)
    assert all(parameter.is_meta for parameter in described.parameters())
    shares = [open_shard(described, Cut(rank, RANKS)) for rank in range(RANKS)]
    for i, of_whole in enumerate(whole.layers):
        for name, want in of_whole.named_parameters():  # type: ignore[union-attr]
            tensors = [share.weight(f"layers.{i}.{name}").detach().clone() for share in shares]
            assert_joins(of_whole, name, tensors, want.detach())  # type: ignore[arg-type]
    rows = vocabulary_share(whole.spec, RANKS)
    for name in ("embedding", "output", "output_bias"):
        if getattr(whole, name) is not None:
            joined = torch.cat([share.weight(name).detach() for share in shares])
            assert len(joined) == RANKS * rows
            assert torch.equal(joined[: whole.spec.vocab].float(), getattr(whole, name).detach().float())
            assert not joined[whole.spec.vocab :].any()
    for share in shares:
        assert torch.equal(share.norm, whole.norm)
        share.close()


def assert_joins(layer: Layer, name: str, parts: list[Tensor], want: Tensor) -> None:
    """The parts of all ranks side by side are the whole parameter."""
    a, m = layer.spec.attention, layer.spec.mlp
    if name in ("out", "down"):
        joined = torch.cat(parts, 1)
    elif name in ("out_bias", "down_bias"):
        joined = parts[0]
        assert not any(part.any() for part in parts[1:]), "a bias is added once"
    elif name.startswith("qkv"):
        joined = side_by_side(parts, [a.q_width, a.kv_width, a.kv_width])
    elif name.startswith("gate_up"):
        joined = side_by_side(parts, [m.width] * (2 if m.gated else 1))
    elif name.startswith(("q_norm", "k_norm")) and a.qk_norm is not None and not a.qk_norm.one_head:
        joined = torch.cat(parts)
    else:
        joined = parts[0]
        assert all(torch.equal(part, joined) for part in parts)
    assert torch.equal(joined.to(want.dtype), want), name


def side_by_side(parts: list[Tensor], widths: list[int]) -> Tensor:
    """Rows of each section, in order of rank."""
    sections = [part.split([width // RANKS for width in widths]) for part in parts]
    return torch.cat([torch.cat(section) for section in zip(*sections, strict=True)])


@pytest.mark.parametrize("name", STORED)
def test_shares_make_up_the_model(name: str, tmp_path: Path) -> None:
    build_reference(name, tmp_path)
    assert_shares_make_up(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES if name not in STORED])
def test_shares_make_up_every_model(name: str, tmp_path: Path) -> None:
    build_reference(name, tmp_path)
    spec = describe_decoder(tmp_path).spec
    if LACKS & spec.features() or any(count % RANKS for count in (spec.heads, spec.kv_heads, spec.ffn)):
        pytest.skip("ranks cannot share it")
    assert_shares_make_up(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_shares_of_other_files_make_up_the_model(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the files")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    write_gguf(tmp_path / "m.gguf", build_reference("llama", None, **sizes), "Q8_0")
    assert_shares_make_up(tmp_path, LoadOptions(dtype))


@pytest.mark.parametrize("tied", [False, True])
def test_shares_of_random_weights_make_up_the_model(tmp_path: Path, tied: bool) -> None:
    folder = write_family(tmp_path, "qwen2", tie_word_embeddings=tied, vocab_size=VOCAB + 1)
    assert_shares_make_up(folder, LoadOptions("float32", "dummy", 3))


def test_a_share_holds_no_more_than_its_part(tmp_path: Path) -> None:
    build_reference("llama", tmp_path)
    whole = load_decoder(tmp_path)
    share = open_shard(describe_decoder(tmp_path), Cut(1, RANKS)).materialise()
    sizes = [sum(x.numel() for x in decoder.parameters() if x.dim() == 2) for decoder in (whole, share)]
    assert sizes[1] * RANKS == sizes[0]
    assert isinstance(share, Decoder)
