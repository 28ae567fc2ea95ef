"""KV memory: the page table and prefix cache (plain Python), the KV tensors, and the states of recurrent layers."""

from outrider.cache.device_states import Place, Places, StoredRows
from outrider.cache.kv import KVPool, Slots
from outrider.cache.pages import Key, OutOfPages, PageTable, next_key, root_key
from outrider.cache.states import LayerState, Past, Pending, SequenceState, StateCache, States

__all__ = [
    "KVPool", "Key", "LayerState", "OutOfPages", "PageTable", "Past", "Pending", "Place", "Places", "SequenceState", "Slots",
    "StateCache", "States", "StoredRows", "next_key", "root_key",
]  # fmt: skip
