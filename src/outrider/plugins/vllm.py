"""The suffix drafter as a proposer of vLLM: method `custom_class`, model `outrider.plugins.vllm.SuffixProposer`."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core import Request, Sequence
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = ["SuffixProposer"]

_MIN_SURVIVAL = 0.1  # of a drafted token: vLLM verifies every one
Ids = NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    """A request of vLLM's batch: its tokens, and what the drafter knows of them."""

    tokens: Ids
    seq: Sequence

    def begins(self, tokens: Ids) -> bool:
        """Whether this is the request whose tokens these are now."""
        return len(self.tokens) <= len(tokens) and np.array_equal(self.tokens, tokens[: len(self.tokens)])


class SuffixProposer:
    """Proposes what followed the text's longest suffix before, and goes on with copies behind edits.

    vLLM tells a proposer no request ids, and moves requests from row to row, so a request is known by its tokens. Nothing is
    shared between requests: vLLM does not say whose they are.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._length = int(vllm_config.speculative_config.num_speculative_tokens)
        self._context = int(vllm_config.model_config.max_model_len)
        self._drafter = SuffixDrafter(SuffixOptions(edits=True), _tokenizer(vllm_config.model_config))
        self._rows: list[_Row | None] = []

    def propose(
        self,
        sampled_token_ids: Seq[Seq[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: object = None,  # noqa: ARG002  (of attention, which nothing here computes)
    ) -> list[list[int]]:
        """A draft for each row; none for rows that read their prompt or have filled their context.

        `num_tokens_no_spec[i]` tokens of row i are text, the sampled ones included.
        """
        before, self._rows = self._rows, []
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            size = int(num_tokens_no_spec[row])
            if not len(sampled) or size + 1 >= self._context:
                self._rows.append(None)
                drafts.append([])
                continue
            tokens = np.asarray(token_ids_cpu[row, :size]).astype(np.int32)
            self._rows.append(self._known(before, row, tokens, size - len(sampled)))
            drafts.append(self._draft(self._rows[-1], min(self._length, self._context - size - 1)))
        self._end(one for one in before if one is not None)
        return drafts

    def _known(self, before: list[_Row | None], row: int, tokens: Ids, prompt_len: int) -> _Row:
        """The row's request with its new tokens: the one that had the row, one that had another, or a new one."""
        order = [row, *(other for other in range(len(before)) if other != row)]
        for other in order:
            known = before[other] if other < len(before) else None
            if known is not None and known.begins(tokens):
                before[other] = None
                known.seq.tokens += tokens[len(known.tokens) :].tolist()
                known.tokens = tokens
                return known
        ids = tokens.tolist()
        request = Request("", tuple(ids[:prompt_len]), SamplingParams(temperature=0.0), 0, frozenset(), self._context)
        seq = Sequence(request)
        seq.tokens += ids[prompt_len:]
        self._drafter.begin(seq)
        return _Row(tokens, seq)

    def _draft(self, row: _Row | None, nodes: int) -> list[int]:
        assert row is not None
        tree = self._drafter.draft(row.seq, nodes, branches=False)
        return [token for token, chance in zip(tree.tokens, tree.survival, strict=True) if chance >= _MIN_SURVIVAL]

    def _end(self, rows: Iterable[_Row]) -> None:
        for row in rows:
            self._drafter.end(row.seq)


def _tokenizer(model_config: Any) -> Tokenizer | None:
    """The model's tokenizer, for diffs, where it lies on this machine."""
    folder = Path(str(getattr(model_config, "tokenizer", None) or model_config.model))
    return Tokenizer.load(folder) if folder.is_dir() else None
