"""Names to things. Duplicate and unknown names are errors; built-in entries are imported on first use."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from lmms_engine.errors import UserError

T = TypeVar("T")


def nearest(name: str, legal: list[str]) -> str:
    """A hint ``; did you mean 'x'?`` for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, legal, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


class Registry(Generic[T]):
    """A table of one kind of thing.

    kind: what the entries are, in error messages ("model", "dataset", …).
    builtin: name -> module that registers it when imported.
    """

    def __init__(self, kind: str, builtin: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._builtin = dict(builtin or {})
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters its object under `name`; a name that is taken raises UserError."""

        def enter(entry: T) -> T:
            if name in self._entries:
                raise UserError(f"{self.kind} '{name}' is registered already, by {self._entries[name]!r}")
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """The entry called `name`; unknown names raise UserError with the legal ones."""
        if name not in self._entries and name in self._builtin:
            importlib.import_module(self._builtin[name])
        if name not in self._entries:
            legal = self.names()
            raise UserError(
                f"unknown {self.kind} '{name}' (legal: {', '.join(legal)}){nearest(name, legal)}"
            )
        return self._entries[name]

    def names(self) -> list[str]:
        """All legal names, sorted, without importing anything."""
        return sorted({*self._entries, *self._builtin})

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._builtin

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
