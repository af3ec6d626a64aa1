"""An error that all ranks share is said once. Ranks are threads here; the store is a real one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lmms_engine.launch import once
from lmms_engine.launch.once import another_has_spoken, is_to_say


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a launcher, as torchrun tells its ranks of it."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    return made


def ask(errors: dict[int, tuple[str, float]]) -> set[int]:
    """The ranks that print; errors: rank -> (message, seconds until it comes upon it)."""
    speakers = set()

    def rank_main(rank: int, message: str, after: float) -> None:
        time.sleep(after)
        if is_to_say(message, rank):
            speakers.add(rank)

    ranks = [threading.Thread(target=rank_main, args=(rank, *error)) for rank, error in errors.items()]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return speakers


def test_rank_0_says_what_all_have(store: dist.TCPStore) -> None:
    assert ask({0: ("no such file", 0.5), 1: ("no such file", 0), 2: ("no such file", 0.2)}) == {0}


def test_what_rank_0_has_not_is_said_by_one_of_the_others(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "PATIENCE", timedelta(seconds=0.5))
    said = ask({0: ("mine alone", 0), 1: ("shared", 0), 2: ("shared", 0), 3: ("out of memory", 0)})
    assert said in ({0, 1, 3}, {0, 2, 3})


@pytest.mark.parametrize("missing", ["TORCHELASTIC_USE_AGENT_STORE", "server"])
def test_without_a_store_every_rank_says_it(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(once, "PATIENCE", timedelta(seconds=0.5))
    if missing == "server":
        monkeypatch.setenv("MASTER_PORT", "1")
    else:
        monkeypatch.delenv(missing)
    assert ask({0: ("a", 0), 1: ("a", 0)}) == {0, 1}


def test_what_follows_from_another_ranks_error_waits_for_it(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(another_has_spoken()))
    waiting.start()
    time.sleep(0.2)
    assert ask({0: ("planted", 0)}) == {0}
    waiting.join()
    assert heard == [True]


def test_without_another_error_it_is_said(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "PATIENCE", timedelta(seconds=0.3))
    assert not another_has_spoken()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert not another_has_spoken()
