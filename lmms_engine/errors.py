"""The errors that are meant for the user's eyes.

UserError and BadRow carry a complete message: the field, row or file, its value, what is legal, what to do.
The command line prints them as one line without a traceback.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend: a setting, a path, a machine."""


class BadRow(ValueError):
    """One row of data cannot be used.

    kind: short machine-readable reason, e.g. ``media_missing``; it is counted and written to
    ``skipped.jsonl``.
    The stream adds the row's address and applies ``dataset_config.on_bad_row``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(printable(message))
        self.kind = kind

    def __reduce__(self) -> tuple[type[BadRow], tuple[str, str]]:
        return BadRow, (self.kind, str(self))   # survives the trip from a worker process


def printable(text: str) -> str:
    """Half surrogate pairs, which rows and file names may hold and no file can, written as `\\udXXX`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Terminated(SystemExit):
    """The run was told to stop (SIGTERM) and has saved what it must; exit code 143."""

    def __init__(self) -> None:
        super().__init__(143)
