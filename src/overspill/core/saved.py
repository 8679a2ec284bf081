"""Save shared data types as JSON and read them back."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from .errors import RequestError
from .files import read_whole, write_whole


class Saved:
    """Mixin of frozen dataclasses that can be saved as JSON and read back equal."""

    def to_json(self) -> str:
        """Return the object as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read an object from JSON. Raises RequestError if `text` holds anything else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter for a text that is not UTF-8
            raise RequestError(
                f"this is not a saved {cls.__name__}: {error}; give what Overspill saved as one"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the object to `path` as JSON. Raises RequestError if that fails."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read an object from `path`. Raises RequestError if the file is missing or holds anything else."""
        return cls.from_json(read_whole(path))
