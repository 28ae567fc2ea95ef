"""A draft model of another tokenizer, by way of the text it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from functools import partial

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.growth import drafts_for
from outrider.draft.reader import Reader, Text
from outrider.draft.vocabulary import Transcript
from outrider.draft.window import limit_reason
from outrider.errors import DrafterFault
from outrider.model import Runner
from outrider.text import Tokenizer

__all__ = ["RetokenizedModel", "cut_after"]

_SURROUNDINGS = 8  # tokens before the draft that may change how it is cut
_OPEN = "\ufffd"


class RetokenizedModel:
    """Drafts text with a model whose tokens are hardly the target's.

    What it does: the smaller model reads the text in its own tokens and writes on, always its most
        probable token; what it wrote is cut into the target's tokens. The two share no noise,
        because they share no tokens to key it by.
    When it helps: where the only small model has a vocabulary of its own; the more so the lower the
        temperature.
    Cost: one forward of the small model per token of its own; its own KV in pages of its own.
    Needs: text: while the target's last character is incomplete it drafts nothing.
    Reference: Timor et al. 2502.05202 (string-level exact match).
    """

    def __init__(self, runner: Runner, target: Tokenizer, draft: Tokenizer) -> None:
        self.needs = Needs(kv_bytes_per_token=runner.pool.token_bytes)
        self._target = target
        self._draft = draft
        self._reader = Reader(runner, separate_pages=True)
        self._transcripts: dict[Sequence, Transcript] = defaultdict(partial(Transcript, target, draft))

    def begin(self, seq: Sequence) -> None:
        self._reader.begin(seq)

    def end(self, seq: Sequence) -> None:
        self._transcripts.pop(seq, None)
        self._reader.end(seq)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        pass

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        planned = {seq: n for seq, n in zip(batch.sequences, plan.lengths, strict=True) if n}
        texts = [text for seq, n in planned.items() if (text := self._text(seq, n))]
        written: dict[Sequence, list[int]] = {text.seq: [] for text in texts}
        writing = texts
        while writing:
            logits = self._reader.read([text._replace(ids=[*text.ids, *written[text.seq]]) for text in writing])
            if not bool(logits.isfinite().all()):
                raise DrafterFault("the draft's logits are not finite")
            going = []
            for text, token in zip(writing, logits.argmax(-1).tolist(), strict=True):
                written[text.seq].append(token)
                if len(written[text.seq]) < planned[text.seq] and token != self._draft.eos_id:
                    going.append(text)
            writing = going
        trees = {text.seq: Tree.chain(self._cut(text, written[text.seq])[: planned[text.seq]]) for text in texts}
        return drafts_for(batch, trees)

    def _text(self, seq: Sequence, planned: int) -> Text | None:
        """What the model reads before it writes; None where it cannot."""
        transcript = self._transcripts[seq]
        transcript.extend(seq.tokens)
        size = len(transcript.ids) + planned
        if size > self._reader.positions:
            seq.stats.limit = limit_reason("draft model", self._reader.context)
        if not transcript.ids or transcript.pending or size > self._reader.positions or not self._reader.room(seq, size):
            return None
        return Text(seq, transcript.ids, transcript.settled)

    def _cut(self, text: Text, written: list[int]) -> list[int]:
        """The target's tokens of what the draft wrote, cut as they would be after the text."""
        ended = bool(written) and written[-1] == self._draft.eos_id
        words = _after(self._draft, list(text.ids[-_SURROUNDINGS:]), written[:-1] if ended else written).rstrip(_OPEN)
        cut = cut_after(self._target, text.seq.tokens, words)
        return [*cut, self._target.eos_id] if ended and self._target.eos_id is not None else cut


def cut_after(tokenizer: Tokenizer, tokens: Seq[int], words: str) -> list[int]:
    """Words as the tokens that they would be after others."""
    before = list(tokens[-_SURROUNDINGS:])
    ids = [span.token for span in tokenizer.spans(tokenizer.decode(before, skip_special_tokens=False) + words)]
    return ids[len(before) :] if ids[: len(before)] == before else list(tokenizer.encode_bare(words))


def _after(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """What tokens write after others: alone, some lose a leading space or half a character."""
    first, whole = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (before, before + tokens))
    return whole[len(first) :] if whole.startswith(first) else tokenizer.decode(tokens, skip_special_tokens=False)
