"""The engine: the round, the scheduler, commit, and the LLM that wraps them."""

from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput, RequestOutput, StreamPiece

__all__ = ["LLM", "CompletionOutput", "Engine", "RequestOutput", "StreamPiece"]
