"""The helper itself: results in order, failures and hangs seen."""

import os
import time

import pytest

from tests.distributed import RankError, run_ranks


def add_up(mesh, value):
    return mesh.rank, mesh.host_sum([float(mesh.rank + value)])[0], mesh.fsdp.size()


def fail_on_one(mesh):
    if mesh.rank == 1:
        raise KeyError("planted")
    mesh.barrier()


def die_on_one(mesh):
    if mesh.rank == 1:
        os._exit(3)
    mesh.barrier()


def hang(mesh):
    if mesh.rank == 0:
        time.sleep(60)


def test_results_come_in_rank_order():
    assert run_ranks(add_up, 2, 10) == [(0, 21.0, 2), (1, 21.0, 2)]


def test_an_exception_in_one_rank_fails_the_test_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*planted"):
        run_ranks(fail_on_one, 2)


def test_a_dead_rank_is_seen():
    # rank 0 may notice the lost peer before the parent notices the lost pipe
    with pytest.raises(RankError, match=r"rank 1 died|rank 0 failed"):
        run_ranks(die_on_one, 2)


def test_a_hanging_rank_is_killed():
    start = time.monotonic()
    with pytest.raises(RankError, match="did not finish"):
        run_ranks(hang, 2, timeout=3)
    assert time.monotonic() - start < 20
