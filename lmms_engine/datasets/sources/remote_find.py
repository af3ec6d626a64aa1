"""Which files an address stands for: one file, those of a folder or glob, or a split of a hub data set."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lmms_engine.config_load import HUB_ID
from lmms_engine.datasets.sources.cache import CacheSettings
from lmms_engine.datasets.sources.files import SUFFIXES, suffixes_of
from lmms_engine.datasets.sources.remote import (
    RemoteFile,
    file_system,
    offline,
    patiently,
    shown,
    version_of,
)
from lmms_engine.errors import UserError

SCHEMES = ("hf", "s3", "gs", "gcs", "http", "https")
THREADS = 16


@dataclass(frozen=True)
class HubSet:
    """`org/name[@revision][:config[:split]]`."""

    repo: str
    revision: str | None
    config: str | None
    split: str


def find_remote(path: str, kind: str, cache: CacheSettings) -> list[RemoteFile]:
    """The files of an entry whose path is an address or a hub id, in order, with their sizes and versions."""
    scheme = path.partition("://")[0] if "://" in path else "hf"
    if scheme not in SCHEMES:
        raise UserError(f"dataset '{path}': {scheme}:// is not known (legal: {', '.join(SCHEMES)})")
    if scheme == "hf" and _hub_is_off():
        raise offline(f"dataset '{path}'")
    hub = hub_set(path)
    urls = _split_urls(hub, path) if hub else _listed(path, kind)
    with ThreadPoolExecutor(THREADS) as pool:
        files = list(pool.map(lambda url: _described(url, cache), urls))
        list(pool.map(RemoteFile.mark, files))   # fetches the ends of all files, many at a time
    return files


def hub_set(path: str) -> HubSet | None:
    """What a hub id says; None if the path is another address, also one of a folder or file in a hub set."""
    bare = path.removeprefix("hf://").removeprefix("datasets/") if path.startswith("hf://") else path
    found = None if "://" in bare else re.fullmatch(HUB_ID, bare)
    if found is None or ("://" in path and "/" in (found["revision"] or "")):
        return None
    return HubSet(found["repo"], found["revision"], found["config"] or None, found["split"] or "train")


def _hub_is_off() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _split_urls(hub: HubSet, path: str) -> list[str]:
    """The files of a split, found by the datasets library from the set's card or its file names."""
    import datasets
    import huggingface_hub

    def build() -> Any:
        # Asked first, and for a commit: for a revision that is not there the library takes a cached one.
        info = huggingface_hub.HfApi().dataset_info(hub.repo, revision=hub.revision)
        return datasets.load_dataset_builder(hub.repo, hub.config, revision=info.sha)

    try:
        builder = patiently(f"hf://datasets/{hub.repo}", build)
    except UserError as error:
        raise UserError(f"dataset '{path}' (no folder here, so taken for a hub id): {error}") from error
    splits = builder.config.data_files or {}
    if hub.split not in splits:
        raise UserError(
            f"dataset '{path}': there is no split '{hub.split}' (legal: {', '.join(map(str, splits))}); write"
            f" {hub.repo}:{hub.config or ''}:SPLIT"
        )
    urls = [str(url) for url in splits[hub.split]]
    odd = [url for url in urls if not url.lower().endswith(tuple(SUFFIXES))]
    if odd:
        raise UserError(
            f"dataset '{path}' holds {odd[0]}; only {', '.join(SUFFIXES)} can be read. Download it and bring"
            " it in with `data-prep convert`"
        )
    return urls


def _listed(path: str, kind: str) -> list[str]:
    web = path.startswith("http")
    files, root = patiently(path, lambda: file_system(path))
    if any(mark in root for mark in ("*[" if web else "*?[")):
        found = patiently(path, lambda: files.glob(root))
        if not found:
            raise UserError(f"dataset '{shown(path)}': no file matches")
    elif web and not path.endswith("/"):
        return [path]
    else:
        info = {"type": "directory"} if web else patiently(path, lambda: files.info(root))
        if info["type"] != "directory":
            return [path]
        wanted = tuple(suffixes_of(kind))
        there = patiently(path, lambda: files.find(root, **({"maxdepth": 1} if web else {})))
        found = [
            name for name in there
            if name.lower().endswith(wanted) and "/." not in name.removeprefix(root.rstrip("/"))
        ]
        if not found:
            raise UserError(f"dataset '{shown(path)}': no file ending in {', '.join(wanted)} in this folder")
    return sorted(files.unstrip_protocol(name) for name in found)


def _described(url: str, cache: CacheSettings) -> RemoteFile:
    files, path = patiently(url, lambda: file_system(url))
    info = patiently(url, lambda: files.info(path))
    if info.get("size") is None:
        raise UserError(f"{shown(url)}: the server does not say how long the file is: download it")
    return RemoteFile(url, int(info["size"]), version_of(info), cache)
