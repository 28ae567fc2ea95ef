"""The page table: reference counts of KV pages, and the prefix cache of full pages. Plain Python, no tensors."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from outrider.errors import OutriderError

__all__ = ["Key", "OutOfPages", "PageTable", "next_key", "root_key"]

Key = bytes  # identifies the content of a full page: its tokens, all tokens before them, and their tenant


class OutOfPages(OutriderError):
    """More pages were requested than are free."""


def root_key(tenant: str | None, rotary_start: int = 0, adapter: int = 0) -> Key:
    """The key before the first page.

    Tenants never share pages of the prefix cache, nor do requests with other rotary tables or other adapters. `adapter` is the
    serial number of its loading, 0 where there is none.
    """
    named = b"" if tenant is None else blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"tenant").digest()
    turned = named if rotary_start == 0 else named + rotary_start.to_bytes(8, "little")
    return turned if adapter == 0 else turned + b"lora" + adapter.to_bytes(8, "little")


def next_key(previous: Key, tokens: Sequence[int]) -> Key:
    """The key of a full page that follows the one named `previous`. A cryptographic hash: no two texts share it."""
    return blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PageTable:
    """Pages 0..count-1 with reference counts. The lowest free page is allocated first.

    So the pages of a sequence are mostly consecutive, and attention reads a run of consecutive pages as one view. A full
    page may be named by the key of its content. When its last reference is dropped it stays in the prefix cache until its
    memory is needed; the least recently used page is evicted first.
    """

    def __init__(self, count: int, page_size: int) -> None:
        if count < 1 or page_size < 1:
            raise ValueError(f"a page table needs pages: count={count}, page_size={page_size}")
        self.count = count
        self.page_size = page_size
        self.running: list[list[Any]] = []  # the running sequences of each scheduler that uses this table
        self.epoch = 0  # counts the calls of `clear`
        self._free = list(range(count))
        self._references = [0] * count
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named pages without references, least recently used first

    @property
    def free(self) -> int:
        """Pages that can be allocated. Idle pages of the prefix cache count, because they are evicted on demand."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - self.free

    @property
    def cached(self) -> int:
        """Pages without references that the prefix cache still holds."""
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """The number of pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int]:
        """Take `pages` pages with one reference each, or raise OutOfPages and change nothing."""
        if pages > self.free:
            raise OutOfPages(f"{pages} pages wanted, {self.free} of {self.count} free")
        while len(self._free) < pages:
            self.forget(next(iter(self._idle)))
        taken = [heapq.heappop(self._free) for _ in range(pages)]
        for page in taken:
            self._references[page] = 1
        return taken

    def extend(self, pages: list[int], tokens: int) -> None:
        """Grow a sequence's pages in place until they hold `tokens` tokens."""
        missing = self.pages_for(tokens) - len(pages)
        if missing > 0:
            pages.extend(self.allocate(missing))

    def truncate(self, pages: list[int], tokens: int) -> None:
        """Release the pages past the first `tokens` tokens."""
        keep = self.pages_for(tokens)
        if len(pages) > keep:
            self.release(pages[keep:])
            del pages[keep:]

    def release(self, pages: list[int]) -> None:
        """Drop one reference to each page. Pages without references become free, or idle where they are named."""
        for page in reversed(pages):  # the last pages of a text are evicted before the first
            if self._references[page] < 1:
                raise ValueError(f"page {page} was released more often than taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page)

    def clear(self) -> list[int]:
        """Release every page, forget all content, and return the pages that were in use. Holders of pages check `epoch`."""
        used = [page for page, references in enumerate(self._references) if references]
        self.epoch += 1
        self._free = list(range(self.count))
        self._references = [0] * self.count
        self._page_of, self._key_of, self._idle = {}, {}, OrderedDict()
        return used

    def references(self, page: int) -> int:
        return self._references[page]

    def name(self, page: int, key: Key) -> None:
        """Enter a full page in the prefix cache under the key of its content. Content already cached keeps its first page."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free and holds nothing")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The pages of the longest cached run of leading keys, with a reference added to each."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def disown(self, pages: Sequence[int]) -> list[int]:
        """Forget the pages with a single reference, whose content must not be trusted, and return them."""
        unshared = [page for page in pages if self._references[page] == 1]
        for page in unshared:
            self.forget(page)
        return unshared

    def forget(self, page: int) -> None:
        """Remove a page from the prefix cache."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
        if page in self._idle:
            del self._idle[page]
            heapq.heappush(self._free, page)
