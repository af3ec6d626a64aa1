"""Whether the tensors in a checkpoint are those that were written.

torch writes each shard of a tensor as a zip archive with checksums and does not look at them when it reads.
Here they are looked at, without a tensor being made: one shard at a time is in memory.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# What zipfile raises on archives that are cut or garbled.
DAMAGED = (
    zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, LookupError, ArithmeticError,
    NotImplementedError, struct.error, zlib.error,
)  # fmt: skip


def find_damage(
    folder: Path,
    metadata: Metadata,
    rank: int = 0,
    size: int = 1,
    *,
    wanted: Callable[[str], bool] | None = None,
) -> str | None:
    """What is wrong with the first damaged shard, or None. Each of `size` ranks looks at its part of them.

    wanted: says by their names which tensors count; None: all.
    """
    shards = [
        (place.relative_path, place.offset, place.length, index.fqn)
        for index, place in metadata.storage_data.items()
        if isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata)
        and (wanted is None or wanted(index.fqn))
    ]
    for path, offset, length, name in sorted(shards)[rank::size]:
        if reason := _damage(folder / path, offset, length):
            return f"{folder / path}: {name} is not as it was written ({reason})"
    return None


def _damage(path: Path, offset: int, length: int) -> str | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record: Any = io.BytesIO(file.read(length))
        with zipfile.ZipFile(record) as archive:
            return "its checksum differs" if archive.testzip() else None
    except DAMAGED as error:
        return str(error) or type(error).__name__
