"""A user's own Python, named by `plugins:` in the configuration: it registers datasets, processors, models.

A plugin is a file (relative to the YAML that names it) or an importable module. A file is loaded under a
module name of its own, so that `./numpy.py` replaces no library and two recipes may both have a
`my_model.py`; the name follows from the path alone, so that what the file defines can be pickled between
processes that have loaded it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lmms_engine.errors import UserError

if TYPE_CHECKING:
    from lmms_engine.config import Job


def load_plugins(job: Job) -> dict[str, str]:
    """Imports the job's plugins, once per process; returns plugin -> sha256 of its source.

    Called again in every spawned worker. A plugin that cannot be imported raises UserError.
    """
    return {name: _load(name, f"plugins.{i}={name}") for i, name in enumerate(job.plugins)}


def _load(name: str, key: str) -> str:
    try:
        module = _load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:   # whatever the user's code raises while it is imported
        raise UserError(f"{key}: cannot be loaded: {type(error).__name__}: {error}") from error
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest() if module.__file__ else ""


def _load_file(path: Path) -> ModuleType:
    name = module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module   # before it runs: dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def module_name(path: Path) -> str:
    """The module name of a plugin file: its stem and a hash of its whole path."""
    stem = re.sub(r"\W", "_", path.stem)
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    return f"lmms_engine_plugin_{stem}_{digest[:12]}"
