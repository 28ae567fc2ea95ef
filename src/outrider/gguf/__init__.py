"""GGUF files: the container, and the tokenizer in its metadata. What a model is, `model/formats` reads from here."""

from outrider.gguf.file import Gguf, GgufTensor, find_gguf
from outrider.gguf.kinds import KINDS, Kind
from outrider.gguf.tokenizer import end_ids, read_tokenizer

__all__ = ["KINDS", "Gguf", "GgufTensor", "Kind", "end_ids", "find_gguf", "read_tokenizer"]
