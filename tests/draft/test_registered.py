"""Drafters of the user's own: by class path and by registering a name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider
from outrider import LLM, SamplingParams
from outrider.config import SpeculationConfig
from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft import check_speculation, method_names, registry
from outrider.errors import InvalidParameter, UnknownMethod
from tests.support import write_family, write_tokenizer


class Echo:
    """Guesses that the text goes on as it did `back` tokens ago."""

    needs = Needs()

    def __init__(self, back: int = 1) -> None:
        self.back = back

    def begin(self, seq: Sequence) -> None: ...

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        tails = [seq.tokens[-self.back :] * n for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        return Drafts.chains([tail[:n] for tail, n in zip(tails, plan.lengths, strict=True)])

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None: ...

    def end(self, seq: Sequence) -> None: ...


class NoVerbs:
    needs = Needs()

    def begin(self, seq: Sequence) -> None: ...

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        return Drafts.empty(len(batch.sequences))


class NoNeeds(NoVerbs):
    needs = None  # type: ignore[assignment]

    def commit(self, *what: object) -> None: ...

    def end(self, seq: Sequence) -> None: ...


def not_a_class() -> None: ...


ECHO = f"{__name__}:Echo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("m")
    write_tokenizer(directory)
    return write_family(directory, "llama2", vocab_size=300)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Names registered by a test are gone after it."""
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


def tokens(model: Path, speculation: object) -> tuple[list[int], dict[str, object]]:
    llm = LLM(str(model), load_format="dummy", speculation=speculation)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={7: 20.0, 8: 20.0})
    output = llm.generate([[1, 7, 8]], params)[0].outputs[0]
    return output.token_ids, output.speculation


def test_a_class_by_its_path(model: Path) -> None:
    plain, _ = tokens(model, None)
    for back in (1, 2):
        fast, stats = tokens(model, {"method": ECHO, "back": back, "draft_tokens": 4, "adaptive": False})
        assert fast == plain
        assert stats["method"] == ECHO
        assert stats["fallback_reason"] is None
        assert stats["drafted"]
        assert stats["accepted"]


def test_a_registered_name(model: Path, forgetful: None) -> None:
    outrider.register_drafter("echo", lambda context: Echo(**context.config.options))
    assert "echo" in method_names()
    fast, stats = tokens(model, {"method": "echo", "back": 1, "adaptive": False})
    assert fast == tokens(model, None)[0]
    assert stats["method"] == "echo"
    assert stats["accepted"]
    outrider.register_drafter("echo", lambda context: Echo(2))  # again: replaced
    with pytest.raises(UnknownMethod, match="known: .*echo.*package.module:Class"):
        check_speculation(SpeculationConfig("ecko"))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ecko", "unknown 'ecko'; known: .*ngram.*package.module:Class.*recycle.*suffix"),
        ("no.such.package:Echo", "cannot import 'no.such.package'.*ModuleNotFoundError"),
        (":Echo", "cannot import ''"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        (f"{__name__}:", "neither a number of draft tokens nor name=value"),
        (f"{__name__}:not_a_class", "not a class but function"),
        (f"{__name__}:NoVerbs", "lacks commit, end"),
    ],
)
def test_unfit_names_fail_before_loading(method: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        LLM("/no/such/model", speculation=method)


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (f"{__name__}:NoNeeds", "no attribute `needs`"),
        ({"method": ECHO, "forth": 1}, f"unknown setting 'forth' for method '{ECHO}'.*its options: back, deadline_s"),
    ],
)
def test_unfit_drafters_fail_when_built(model: Path, speculation: object, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        tokens(model, speculation)


def test_factories_must_give_drafters(model: Path, forgetful: None) -> None:
    outrider.register_drafter("hollow", lambda context: object())  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidParameter, match="'hollow' lacks begin, propose, commit, end"):
        tokens(model, "hollow")


@pytest.mark.parametrize("taps", [(3,), (-1,), (0.5,), (True,), "ab", None, [1]])
def test_layers_to_tap_must_exist(model: Path, forgetful: None, taps: object) -> None:
    """A layer that the model lacks has no rows: memory that was never written would be handed over."""
    drafter = Echo()
    outrider.register_drafter("tapping", lambda context: drafter)
    drafter.needs = Needs(taps=(0, 1, 2))  # the model has two layers; the last one's output may be read
    assert tokens(model, "tapping")[1]["fallback_reason"] is None
    drafter.needs = Needs(taps=taps)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=r"needs.taps must be a tuple of layers in \[0, 2\]"):
        tokens(model, "tapping")


class Following(Echo):
    """Can also guess after a path; `odd` is what it says instead."""

    needs = Needs(follows=True)

    def __init__(self, odd: object = None) -> None:
        super().__init__()
        self.odd, self.asked = odd, 0

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        """One token: what comes behind it is for `follow` to say."""
        return Drafts.chains([seq.tokens[-1:][:n] for seq, n in zip(batch.sequences, plan.lengths, strict=True)])

    def follow(self, seq: Sequence, path: list[int], nodes: int) -> object:
        self.asked += 1
        last = path[-1] if path else seq.tokens[-1]
        path.clear()
        seq.tokens.clear()
        return ([last] * nodes, list(range(-1, nodes - 1)), [0.9] * nodes) if self.odd is None else self.odd


@pytest.fixture(scope="module")
def drafted(model: Path) -> Path:
    write_family(model / "draft", "llama2", vocab_size=300, num_hidden_layers=1)
    write_tokenizer(model / "draft")
    return model


COMPOUND = [
    {"method": "mixture", "members": ["ngram", "following"]},
    {"method": "cascade", "levels": ["following", "draft_model"]},
]
ODD = [
    *([[10**9], [-1], [0.9]], [[-1], [-1], [0.9]], [[1], [0], [0.9]], [[1] * 500, [*range(-1, 499)], [0.9] * 500]),
    *([[1, 2], [-1], [0.9]], [[1], [-1], [float("nan")]], 7, [[1.5], ["x"], [0.9]], "abc", [[], [], []]),
]


@pytest.mark.parametrize("speculation", COMPOUND, ids=lambda settings: settings["method"])
def test_a_registered_drafter_can_follow(drafted: Path, forgetful: None, speculation: dict[str, object]) -> None:
    drafter = Following()
    outrider.register_drafter("following", lambda context: drafter)  # type: ignore[arg-type, return-value]
    fast, stats = tokens(drafted, speculation | {"adaptive": False})
    assert fast == tokens(drafted, "none")[0]
    assert stats["fallback_reason"] is None
    assert stats["drafted"]
    assert drafter.asked


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("speculation", COMPOUND, ids=lambda settings: settings["method"])
def test_nonsense_after_a_path_changes_nothing(
    drafted: Path, forgetful: None, speculation: dict[str, object], odd: object
) -> None:
    """A draft model would read it, and write its rows, before the engine could check it."""
    drafter = Following(odd)
    outrider.register_drafter("following", lambda context: drafter)  # type: ignore[arg-type, return-value]
    fast, stats = tokens(drafted, speculation | {"adaptive": False})
    assert fast == tokens(drafted, "none")[0]
    assert drafter.asked
    assert stats["fallback_reason"] is None if odd == [[], [], []] else "Fault" in str(stats) or "Error" in str(stats)


def test_who_follows_has_follow(model: Path, forgetful: None) -> None:
    drafter = Echo()
    drafter.needs = Needs(follows=True)
    outrider.register_drafter("lame", lambda context: drafter)
    with pytest.raises(InvalidParameter, match="'lame' needs `follow`"):
        tokens(model, "lame")


@pytest.mark.parametrize("name", ["ngram", "none", "a:b", "", "two words"])
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(InvalidParameter, match="name"):
        outrider.register_drafter(name, lambda context: Echo())
    assert method_names() == sorted(registry._CLASSES)


def test_a_factory_is_called() -> None:
    with pytest.raises(InvalidParameter, match="factory"):
        outrider.register_drafter("echo", 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speculation", "kind"),
    [
        ({"method": "suffix", "min_match": 2, "factor": 1.5, "shared_tokens": 9}, "SuffixDrafter"),
        ({"method": "recycle", "top": 4, "shared": 1}, "RecycleDrafter"),
    ],
)
def test_lookup_drafters_take_their_settings(model: Path, speculation: dict[str, object], kind: str) -> None:
    llm = LLM(str(model), load_format="dummy", speculation=speculation | {"adaptive": False})
    assert type(llm.engine.drafter.drafter).__name__ == kind
    with pytest.raises(InvalidParameter, match="unknown setting 'typo'"):
        check_speculation(SpeculationConfig.parse(speculation | {"typo": 1}))


def test_the_readme_s_drafter_runs() -> None:
    """The example as printed, on the bundled model: same tokens, and its guesses were judged."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    code = next(part for part in text.split("```python\n")[1:] if "register_drafter" in part).split("```")[0]
    names: dict[str, object] = {}
    try:
        exec(compile(code, "README.md", "exec"), names)
        llm = names["llm"]
        assert isinstance(llm, LLM)
        params = SamplingParams(temperature=0, max_tokens=24)
        fast, plain = (llm.generate("a = [0, 0, 0,", params, speculation=on)[0].outputs[0] for on in (True, False))
        assert fast.token_ids == plain.token_ids
        assert fast.speculation["drafted"] > 0
        assert fast.speculation["fallback_reason"] is None
    finally:
        registry._REGISTERED.pop("echo", None)
