"""The Python face of the native copies (native/transfer/module.cpp)."""

from collections.abc import Callable

class CopyTicket:
    """A copy under way; it holds its memory until it is awaited."""

    def wait(self) -> None: ...

class CopyLane:
    """Copies of one direction on `stream`.

    `path` and `prefix` name the device's library. `current(device)` returns compute's stream.
    """

    def __init__(
        self, path: str, prefix: str, device: int, stream: int, outward: bool, current: Callable[[int], int]
    ) -> None: ...
    def submit(self, host: int, on_device: int, nbytes: int, memory: object) -> CopyTicket: ...

def can_copy(path: str, prefix: str) -> bool: ...
