import subprocess
import sys

import torch

from lmms_engine.train.seed import derive, generator


def test_a_seed_is_a_function_of_its_keys():
    assert derive(1, "step", 0, 5) == derive(1, "step", 0, 5)


def test_every_key_matters():
    seeds = [
        derive(1, "step", 0, 5),
        derive(2, "step", 0, 5),
        derive(1, "noise", 0, 5),
        derive(1, "step", 1, 5),
        derive(1, "step", 0, 6),
        derive(1, "step", 5, 0),
        derive(1, "step", 0),
        derive(1, "step", "0", 5),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_another_process_derives_the_same():
    code = "from lmms_engine.train.seed import derive; print(derive(42, 'shuffle', 3))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == derive(42, "shuffle", 3)


def test_generators_of_one_purpose_agree_and_leave_the_global_one_alone():
    before = torch.get_rng_state()
    a, b = (torch.rand(4, generator=generator(1, "noise", 2)) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, torch.rand(4, generator=generator(1, "noise", 3)))
    assert torch.equal(before, torch.get_rng_state())
