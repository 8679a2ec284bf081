"""A set of address ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


class Ranges:
    """Address ranges that do not overlap, in order, neighbours joined."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def add(self, start: int, nbytes: int) -> bool:
        """Add `[start, start + nbytes)`; return False if any of it was in already."""
        end = start + nbytes
        if start == end:
            return True
        at = bisect_left(self.spans, (start, end))
        before = self.spans[at - 1] if at else (-1, -1)
        after = self.spans[at] if at < len(self.spans) else (end + 1, end + 1)
        if before[1] > start or after[0] < end:
            return False
        # Join with the neighbours.
        if after[0] == end:
            end = after[1]
            del self.spans[at]
        if before[1] == start:
            start = before[0]
            del self.spans[at - 1]
        insort(self.spans, (start, end))
        return True

    def remove(self, start: int, nbytes: int) -> bool:
        """Remove `[start, start + nbytes)`; return False if any of it was missing."""
        end = start + nbytes
        at = bisect_right(self.spans, (start, 1 << 70)) - 1
        if at < 0 or self.spans[at][1] < end:
            return False
        first, last = self.spans.pop(at)
        for span in ((first, start), (end, last)):
            if span[0] < span[1]:
                insort(self.spans, span)
        return True
