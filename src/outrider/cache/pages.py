"""The page table: who owns which page of KV memory. Plain Python, no tensors."""

from __future__ import annotations

import heapq

from outrider.errors import OutriderError

__all__ = ["OutOfPages", "PageTable"]


class OutOfPages(OutriderError):
    """More pages were asked for than are free."""


class PageTable:
    """Pages 0..count-1 with reference counts. The lowest free page is handed out first.

    Handing out low ids in order keeps a sequence's pages mostly consecutive, and attention reads a
    run of consecutive pages as one view.
    """

    def __init__(self, count: int, page_size: int) -> None:
        if count < 1 or page_size < 1:
            raise ValueError(f"a page table needs pages: count={count}, page_size={page_size}")
        self.count = count
        self.page_size = page_size
        self._free = list(range(count))
        self._references = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int]:
        """That many pages with one reference each, or OutOfPages and no change."""
        if pages > len(self._free):
            raise OutOfPages(f"{pages} pages wanted, {len(self._free)} of {self.count} free")
        taken = [heapq.heappop(self._free) for _ in range(pages)]
        for page in taken:
            self._references[page] = 1
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
        """Drop one reference to each page; pages without references are free again."""
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} was released more often than taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        return self._references[page]
