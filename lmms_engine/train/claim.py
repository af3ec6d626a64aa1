"""Whose a run folder is: one process at a time writes to it.

    claim = Claim(run_dir)      # UserError if another process has it
    …
    claim.close()

The system drops a process's claim when the process ends, however it ends; the file alone says nothing. A
process may claim a folder again that it has. File systems that know no locks let everybody in.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from lmms_engine.errors import UserError

CLAIM_FILE = ".running"
TAKEN = (errno.EAGAIN, errno.EACCES)


class Claim:
    """Holds a run folder until it is closed."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / CLAIM_FILE
        while True:
            self._file = self._path.open("a+")
            self._lock(run_dir)
            try:
                if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                    break
            except FileNotFoundError:
                pass
            self._file.close()   # whoever had the folder has deleted the file since it was opened
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _lock(self, run_dir: Path) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in TAKEN:
                return
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"{run_dir}: {holder} is training in it; wait for its end, stop it, or choose another "
                "trainer_args.output_dir"
            ) from None

    def close(self) -> None:
        """Lets others in; may be called again."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()
