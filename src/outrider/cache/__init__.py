"""KV memory: the page table and prefix cache (plain Python) and the KV tensors."""

from outrider.cache.kv import KVPool, Slots
from outrider.cache.pages import Key, OutOfPages, PageTable, next_key, root_key

__all__ = ["KVPool", "Key", "OutOfPages", "PageTable", "Slots", "next_key", "root_key"]
