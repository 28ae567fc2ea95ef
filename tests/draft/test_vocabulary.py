"""Draft models with another tokenizer: what is shared, what is re-encoded, and that nothing changes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from outrider import LLM, SamplingParams
from outrider.core import Sequence
from outrider.draft.draft_model import DraftModel
from outrider.draft.growth import TreeShape
from outrider.draft.retokenized import RetokenizedModel
from outrider.draft.vocabulary import SameTokens, SharedTokens, Side, Transcript, relate, shared_tokens
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Runner
from outrider.text import Tokenizer
from tests.support import make_engine, make_pool, make_request, random_decoder, run, write_family, write_tokenizer

ENGLISH = ["the quick brown fox jumps over the lazy dog", "a naïve café 🙂 in 日本語 and 日本"]
CODE = ["def main(argument):\n    return argument + 1\n", "import os\nfor name in os.listdir(): print(name)", "日本語の名前"]
TEXT = "def fox(argument):\n    # naïve café 🙂, 日本語 the quick 名前\n    return the_quick(argument) + 1\n"


def trained(directory: Path, texts: list[str], size: int, end: str = "<|end|>") -> Path:
    """A byte-level BPE of its own."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        texts * 3, trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    )
    return saved(directory, fast, end)


def saved(directory: Path, fast: Fast, end: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def spaced(directory: Path) -> Path:
    """A SentencePiece-like BPE: a marked space before every word, bytes where a character is unknown."""
    fast = Fast(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_only = [text.encode("ascii", "ignore").decode() for text in ENGLISH + CODE]
    alphabet = [chr(i) for i in range(33, 127)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special[:2], initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(ascii_only * 3, trainer)
    table = json.loads(fast.to_str())
    vocab = table["model"]["vocab"]
    for piece in special[2:]:
        vocab[piece] = len(vocab)
    return saved(directory, Fast.from_str(json.dumps(table)), "</s>")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    write_family(trained(root / "target", CODE, 330), "llama2", vocab_size=330)
    write_family(trained(root / "draft", ENGLISH, 310, end="<|stop|>"), "qwen3", vocab_size=310)
    write_family(spaced(root / "spaced"), "llama2", vocab_size=600)
    return root


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


def side(directory: Path, vocab: int = 330) -> Side:
    return Side(str(directory), load(directory), vocab)


def test_shared_tokens_write_the_same(root: Path) -> None:
    target, draft = load(root / "target"), load(root / "draft")
    shared = shared_tokens(target, draft)
    assert 257 <= len(shared) < 310
    assert len(set(shared.values())) == len(shared)
    ours, theirs = target.spellings(), draft.spellings()
    assert shared.pop(target.eos_id) == draft.eos_id  # the ends of text, whatever they are called
    assert all(ours[a] == theirs[b] for a, b in shared.items())
    assert any(a != b for a, b in shared.items())
    assert {ours[a][1] for a in shared} >= {bytes([byte]) for byte in range(256)}


def test_spaces_and_bytes_of_another_kind_are_recognised(root: Path) -> None:
    target, draft = load(root / "target"), load(root / "spaced")
    shared = shared_tokens(target, draft)
    ours = {written: i for i, (added, written) in target.spellings().items() if not added}
    theirs = {written: i for i, (added, written) in draft.spellings().items() if not added}
    assert draft.table()["▁"] == shared[ours[b" "]]
    assert draft.table()["<0xE6>"] == shared[ours[b"\xe6"]]
    assert all(ours[w] in shared for w in set(ours) & set(theirs))


@pytest.mark.parametrize("other", ["draft", "spaced"])
@pytest.mark.parametrize("seed", range(4))
def test_a_transcript_is_the_text_encoded(root: Path, other: str, seed: int) -> None:
    """However the text arrives, in tokens that split characters too, the ids give it back, and nearly as encoded whole."""
    target, draft = load(root / "target"), load(root / other)
    text = " ".join(random.Random(seed).sample(TEXT.split(" ") * 8, 60))
    tokens = list(target.encode_bare(text))
    transcript = Transcript(target, draft)
    rng, read, settled = random.Random(seed), 0, []
    while read < len(tokens):
        read += rng.randint(1, 9)
        transcript.extend(tokens[:read])
        assert transcript.ids[: len(settled)] == settled, "what is settled stays"
        settled = transcript.ids[: transcript.settled]
        if not transcript.pending:
            assert draft.decode(transcript.ids) == target.decode(tokens[:read])
    assert len(settled) > len(transcript.ids) / 2
    assert transcript.ids == list(draft.encode_bare(text))


def test_an_open_character_is_pending(root: Path) -> None:
    target = load(root / "target")
    tokens = list(target.encode_bare("a🙂b"))
    transcript = Transcript(target, load(root / "draft"))
    transcript.extend(tokens[:2])
    assert list(transcript.pending) == tokens[1:2]
    vocabulary = SharedTokens(target, load(root / "draft"), 330)
    seq = Sequence(make_request(tokens[:2], SamplingParams()))
    text = vocabulary.text(seq)
    assert text is not None
    assert load(root / "draft").spellings()[text.ids[-1]] == target.spellings()[tokens[1]], "the bytes so far are read"


def test_scores_lie_at_the_targets_ids(root: Path) -> None:
    target, draft = load(root / "target"), load(root / "draft")
    vocabulary = SharedTokens(target, draft, 330)
    logits = torch.arange(310.0)[None]
    scores = vocabulary.scores(logits)
    shared = shared_tokens(target, draft)
    assert scores.shape == (1, 330)
    for token in range(330):
        assert scores[0, token] == (logits[0, shared[token]] if token in shared else float("-inf"))
        assert token not in shared or vocabulary.draft_id(token) == shared[token]


def test_padded_matrices_of_the_same_tokens() -> None:
    assert SameTokens(5).scores(torch.zeros(2, 3)).tolist() == [[0, 0, 0, float("-inf"), float("-inf")]] * 2
    assert SameTokens(2).scores(torch.zeros(1, 3)).shape == (1, 2)


def drafters(root: Path, other: str, seed: int) -> dict[str, DraftModel | RetokenizedModel]:
    model, target = random_decoder(root / other, seed), load(root / "target")
    made: dict[str, DraftModel | RetokenizedModel] = {}
    for name, shape in (("chain", TreeShape()), ("tree", TreeShape(beam=3, branch=3, depth=4))):
        vocabulary = SharedTokens(target, load(root / other), 330)
        made[name] = DraftModel(Runner(model, make_pool(model)), shape, vocabulary)
    made["text"] = RetokenizedModel(Runner(model, make_pool(model)), target, load(root / other))
    return made


@pytest.mark.parametrize("other", ["draft", "spaced"])
@pytest.mark.parametrize("kind", ["chain", "tree", "text"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_tokens(root: Path, other: str, kind: str, temperature: float) -> None:
    """Over readable text, split characters, and bytes that never become text."""
    target = load(root / "target")
    decoder = random_decoder(root / "target")
    readable = tuple(i for i, (_, written) in target.spellings().items() if written.isascii() and written.decode().isprintable())
    japanese = tuple(sorted(set(target.encode_bare("日本語🙂é"))))
    requests = [
        make_request(
            list(target.encode_bare(prompt)), SamplingParams(temperature=temperature, seed=i, max_tokens=24, **extra), f"r{i}"
        )
        for i, (prompt, extra) in enumerate(
            [
                ("def fox(", {"allowed_token_ids": readable}),
                (TEXT[:60], {"allowed_token_ids": japanese}),
                ("日本", {"frequency_penalty": 0.5}),
                ("the ", {"allowed_token_ids": readable, "stop_token_ids": [target.encode_bare("a")[0]]}),
                (TEXT, {"top_p": 0.8}),
            ]
        )
    ]
    plain = [run(make_engine(decoder), [request])[0].seq.tokens for request in requests]
    drafter = drafters(root, other, 3)[kind]
    fast = run(make_engine(decoder, drafter, 6), requests)
    assert [w.seq.tokens for w in fast] == plain
    assert [w.seq.stats.fallback_reason for w in fast] == [None] * 5
    assert sum(w.seq.stats.drafted for w in fast) > 20
    reader = drafter._reader
    assert not reader._states
    assert reader._table is not None
    assert reader._table.used == 0


def test_a_model_that_agrees_is_accepted_whole(root: Path) -> None:
    """The target's own weights behind a tokenizer with other ids: every guess is right, greedy and sampled."""
    target = load(root / "target")
    fast = json.loads((root / "target" / "tokenizer.json").read_text())
    turned = {token: 329 - i for token, i in fast["model"]["vocab"].items()}
    fast["model"]["vocab"] = turned
    for added in fast["added_tokens"]:
        added["id"] = 329 - added["id"]
    directory = saved(root / "turned", Fast.from_str(json.dumps(fast)), "<|end|>")
    decoder, other = random_decoder(root / "target"), random_decoder(root / "target")
    order = torch.arange(329, -1, -1)
    for matrix in (other.embedding, other.output):
        if matrix is not None:
            matrix.copy_(matrix[order])
    vocabulary = SharedTokens(target, load(directory), 330)
    readable = [i for i, (_, w) in target.spellings().items() if len(w) == 1 and w.isalpha() and w.isascii()]
    prompt = list(target.encode_bare("q x z"))
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=21, allowed_token_ids=[*readable])
        drafter = DraftModel(Runner(other, make_pool(other)), vocabulary=vocabulary)
        stats = run(make_engine(decoder, drafter, 4), [make_request(prompt, params)])[0].seq.stats
        # letters may merge in the draft's own reading of the text, which the target's tokens did not; most do not
        assert stats.accepted > 0.8 * stats.drafted


def test_ratio_tests_draw_from_shared_tokens(root: Path) -> None:
    decoder = random_decoder(root / "target")
    prompt = list(load(root / "target").encode_bare("def fox("))
    for rule in ("rejection", "block", "lossy_typical"):
        for kind in ("chain", "tree", "text"):
            drafter = drafters(root, "draft", 3)[kind]
            request = make_request(prompt, SamplingParams(temperature=0.9, seed=3, max_tokens=15))
            writer = run(make_engine(decoder, drafter, 4, rule=rule), [request])[0]
            assert writer.seq.stats.fallback_reason is None
            assert writer.seq.output_len == 15


def test_how_vocabularies_relate(root: Path, tmp_path: Path) -> None:
    target = side(root / "target")
    assert isinstance(relate(target, side(root / "target", 336)), SameTokens)
    assert isinstance(relate(target, side(root / "draft", 310)), SharedTokens)
    assert relate(target, side(root / "draft", 310), "text") is None
    assert isinstance(relate(target, Side("bare", None, 330)), SameTokens)
    with pytest.raises(ModelError, match=r"bare has a vocabulary of 331, the target 330, and bare holds no tokenizer"):
        relate(target, Side("bare", None, 331))
    with pytest.raises(InvalidParameter, match="auto, shared, text"):
        relate(target, side(root / "draft", 310), "guess")


def test_too_little_in_common_goes_by_text_or_not_at_all(root: Path, tmp_path: Path) -> None:
    words = Fast(models.WordLevel({"</s>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(50)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy = side(saved(tmp_path / "words", words, "</s>"), 52)
    with pytest.raises(ModelError, match=r"different tokenizers.*first difference.*share 1 tokens.*text does not survive.*turns"):
        relate(side(root / "target"), lossy)
    few = Fast(models.BPE({"</s>": 0, **{chr(i): i - 8 for i in range(9, 127)}}, []))
    few.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    few.decoder = decoders.Fuse()
    assert relate(side(root / "target"), side(saved(tmp_path / "few", few, "</s>"), 120)) is None


@pytest.mark.parametrize("way", ["auto", "shared", "text"])
def test_through_the_front_door(root: Path, way: str) -> None:
    speculation = {"method": "draft_model", "model": str(root / "draft"), "draft_tokens": 4, "vocabulary": way, "adaptive": False}
    llm = LLM(root / "target", load_format="dummy", speculation=speculation)
    plain = LLM(root / "target", speculation="none", load_format="dummy")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20)
    fast, slow = (engine.generate([TEXT, "日本"], params) for engine in (llm, plain))
    assert [o.outputs[0].token_ids for o in fast] == [o.outputs[0].token_ids for o in slow]
    assert all(o.outputs[0].speculation["fallback_reason"] is None for o in fast)


def test_a_table_with_one_token_more_still_drafts(root: Path, tmp_path: Path) -> None:
    target = write_family(write_tokenizer(tmp_path / "target"), "llama2", vocab_size=300)
    other = write_family(write_tokenizer(tmp_path / "other", 300, extra=("<|odd|>",)), "llama2", vocab_size=300)
    llm = LLM(target, load_format="dummy", speculation={"method": "draft_model", "model": str(other), "adaptive": False})
    assert isinstance(llm.engine.drafter.drafter, DraftModel)
    out = llm.generate("the lazy", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    assert out.speculation["drafted"] > 0
