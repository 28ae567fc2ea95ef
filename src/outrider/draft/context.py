"""What a drafter is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from outrider.config import SpeculationConfig
from outrider.draft.options import declared, read_options
from outrider.draft.suffix_array import SuffixArray
from outrider.errors import InvalidParameter
from outrider.heads import holds_mtp
from outrider.heads.fit import require_same_tokenizer
from outrider.model import LoadOptions, Runner, locate
from outrider.text import Tokenizer

if TYPE_CHECKING:
    from outrider.draft.protocol import Drafter

__all__ = ["DraftContext", "LoadedDraft", "weights_directory"]

T = TypeVar("T")


class LoadedDraft(NamedTuple):
    """A draft model that a caller has loaded already."""

    name: str
    runner: Runner
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The settings, the target, and how to load another model beside it."""

    config: SpeculationConfig
    target: Runner
    directory: Path  # of the target
    read_as: Callable[[Path, Mapping[str, Any]], LoadOptions]  # how the weights in a directory are read, by settings
    load_model: Callable[[Path], Runner]  # a draft model, its KV in as many pages as the target's
    tokenizer: Tokenizer | None = None  # the target's
    loaded: LoadedDraft | None = None  # what drafts where the settings name no weights
    max_length: int = 0  # of a request
    corpus: SuffixArray | None = None  # the user's texts, which lookups search for everybody

    def options(self, kind: type[T]) -> T:
        """The drafter's settings, checked, as the dataclass it declares."""
        return kind(**read_options(self.config.method, declared(kind), self.config.options))

    def nested(self) -> list[Drafter]:
        """The drafters that this one is made of, built."""
        return [self.build(config) for config in self.config.nested()]

    def build(self, config: SpeculationConfig) -> Drafter:
        """Another drafter for the same target."""
        from outrider.draft.registry import build_drafter  # the registry knows every drafter, and some are made of others

        return build_drafter(replace(self, config=config))

    def weights(self, folder: str) -> Path:
        """The directory that the settings name, or the one that lies beside the target's weights."""
        return weights_directory(self.config, self.directory, folder)

    def head_weights(self, folder: str) -> Path:
        """The directory of a head. One in which another tokenizer than the target's lies is refused."""
        directory = self.weights(folder)
        if directory != self.directory:
            require_same_tokenizer(directory, self.tokenizer)
        return directory

    def weight_options(self, directory: Path) -> LoadOptions:
        """How to read the weights in a directory for this drafter."""
        return self.read_as(directory, self.config.options)


def weights_directory(config: SpeculationConfig, target: Path, folder: str) -> Path:
    """Where a drafter's weights are: the directory that its settings name, or a folder beside the target's weights.

    An MTP module may be in the target's own checkpoint.
    """
    if config.model is not None:
        return locate(config.model)
    directory, method = target / folder, config.method
    if not (directory / "config.json").exists():
        if folder == "mtp" and holds_mtp(target):
            return target
        raise InvalidParameter(
            f"{folder}_model" if folder == "draft" else "model",
            f"method {method!r} needs the directory or hub id of its weights: {target} brings none in {folder}/; "
            f"pass --method {method} --draft-model DIR, or in Python speculation={{'method': {method!r}, 'model': DIR}}",
        )
    return directory
