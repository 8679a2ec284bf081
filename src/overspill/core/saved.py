"""JSON round trip shared by the nouns."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from .errors import RequestError
from .files import read_whole, write_whole


class Saved:
    """Mixin: a frozen dataclass that can be written as JSON and read back equal to itself."""

    def to_json(self) -> str:
        """This noun as one JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The noun that `text` holds. Raises RequestError when it holds something else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter for a text that is not UTF-8
            raise RequestError(
                f"this is not a saved {cls.__name__}: {error}; give what Overspill saved as one"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write this noun to `path`. Raises RequestError when that cannot be written."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The noun saved at `path`. Raises RequestError when the file is missing or holds something else."""
        return cls.from_json(read_whole(path))
