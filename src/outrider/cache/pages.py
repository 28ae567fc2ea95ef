"""The page table: who owns which page of KV memory, and what its full pages hold. Plain Python, no tensors."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from outrider.errors import OutriderError

__all__ = ["Key", "OutOfPages", "PageTable", "next_key", "root_key"]

Key = bytes  # names what a full page holds: its tokens, all tokens before them, and whose they are


class OutOfPages(OutriderError):
    """More pages were asked for than are free."""


def root_key(tenant: str | None) -> Key:
    """The key before the first page. Tenants never meet in the prefix cache."""
    return b"" if tenant is None else blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"tenant").digest()


def next_key(previous: Key, tokens: Sequence[int]) -> Key:
    """The key of a full page that follows the one named `previous`. A cryptographic hash: no two texts share it."""
    return blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PageTable:
    """Pages 0..count-1 with reference counts. The lowest free page is handed out first.

    Handing out low ids in order keeps a sequence's pages mostly consecutive, and attention reads a
    run of consecutive pages as one view. A full page may be named by what it holds; when nobody refers
    to it any more it stays findable until its memory is needed, the least recently used first.
    """

    def __init__(self, count: int, page_size: int) -> None:
        if count < 1 or page_size < 1:
            raise ValueError(f"a page table needs pages: count={count}, page_size={page_size}")
        self.count = count
        self.page_size = page_size
        self._free = list(range(count))
        self._references = [0] * count
        self._births = [0] * count
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named pages without references, least recently used first

    @property
    def free(self) -> int:
        """Pages that can be had; idle ones of the prefix cache count, they are given up on demand."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - self.free

    @property
    def cached(self) -> int:
        """Pages kept only because their content may be asked for again."""
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int]:
        """That many pages with one reference each, or OutOfPages and no change."""
        if pages > self.free:
            raise OutOfPages(f"{pages} pages wanted, {self.free} of {self.count} free")
        while len(self._free) < pages:
            self.forget(next(iter(self._idle)))
        taken = [heapq.heappop(self._free) for _ in range(pages)]
        for page in taken:
            self._references[page] = 1
            self._births[page] += 1
        return taken

    def extend(self, pages: list[int], tokens: int) -> None:
        """Grow a sequence's pages in place until they hold that many tokens."""
        missing = self.pages_for(tokens) - len(pages)
        if missing > 0:
            pages.extend(self.allocate(missing))

    def truncate(self, pages: list[int], tokens: int) -> None:
        """Give back the pages past the first that many tokens."""
        keep = self.pages_for(tokens)
        if len(pages) > keep:
            self.release(pages[keep:])
            del pages[keep:]

    def share(self, pages: list[int]) -> list[int]:
        """Another reference to each page."""
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """Drop one reference to each page; pages without references are free again, named ones idle."""
        for page in reversed(pages):  # the end of a text grows old before its beginning
            if self._references[page] < 1:
                raise ValueError(f"page {page} was released more often than taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        return self._references[page]

    def birth(self, page: int) -> int:
        """Changes whenever the page is given a new content, so that others can tell old data from new."""
        return self._births[page]

    def name(self, page: int, key: Key) -> None:
        """Say what a full page holds; it is not written again. A content already known keeps its first page."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is free and holds nothing")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Pages that hold the longest known run of leading keys, with a reference to each."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._references[page] += 1
            found.append(page)
        return found

    def disown(self, pages: Sequence[int]) -> list[int]:
        """Those of the pages nobody else refers to, no longer to be found: their content is not to be trusted."""
        own = [page for page in pages if self._references[page] == 1]
        for page in own:
            self.forget(page)
        return own

    def forget(self, page: int) -> None:
        """The page's content is no longer to be found."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
        if page in self._idle:
            del self._idle[page]
            heapq.heappush(self._free, page)
