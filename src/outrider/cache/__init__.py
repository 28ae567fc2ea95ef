"""KV memory: the page table (plain Python) and the tensors behind it."""

from outrider.cache.kv import KVPool
from outrider.cache.pages import OutOfPages, PageTable

__all__ = ["KVPool", "OutOfPages", "PageTable"]
