"""Driver, GPUs, collectives, attention backends and Liger: each is tried with a small computation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmms_engine.commands.checks import Check, gb
from lmms_engine.kernels.attention import ATTENTION, attend, unusable
from lmms_engine.kernels.liger import FusedRMSNorm
from lmms_engine.segments import Segments
from lmms_engine.train.manifest import package_version

MIN_DRIVER = {12: 525, 13: 580}   # major version of CUDA -> the first branch of the driver that runs it
DRIVER_FILE = Path("/proc/driver/nvidia/version")
COLLECTIVE_TIMEOUT_S = 120
LENGTHS, HEADS, HEAD_DIM = (17, 64, 1, 46), (4, 2), 32   # segments; query and key heads
# Of the largest entry. A GPU's float32 may go through TF32 in places; what is broken is far outside of these.
BOUNDS = {("cpu", torch.float32): 1e-5, ("cuda", torch.float32): 1e-2, ("cuda", torch.bfloat16): 3e-2}
CPU = torch.device("cpu")


def gpu_checks() -> Iterator[Check]:
    """Everything that depends on the device that training would use."""
    yield driver(torch.version.cuda)
    yield gpus()
    yield from collectives()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from attention(device)
    yield liger(device)


# Driver and GPUs


def driver(cuda: str | None) -> Check:
    """The driver against the CUDA that torch was built with. cuda: e.g. "13.0"; None for a CPU build."""
    if shutil.which("nvidia-smi") is None:
        if not DRIVER_FILE.exists():
            return Check("driver", "ok", "no NVIDIA driver")
        return Check(
            "driver", "fail", "a driver is loaded, but this container sees no GPU",
            "start it with --gpus all (the NVIDIA container toolkit must be installed on the host)",
        )  # fmt: skip
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return Check("driver", "fail", "nvidia-smi does not answer", "reboot, or install the driver again")
    found = re.match(r"(\d+)\.[\d.]+", asked.stdout)
    if asked.returncode or found is None:
        said = (asked.stdout + asked.stderr).strip().splitlines() or ["nothing"]
        return Check("driver", "fail", f"nvidia-smi: {said[0]}", "reboot, or install the driver again")
    if cuda is None:
        return Check("driver", "fail", f"{found[0]}, but torch is a build for the CPU", "make setup")
    least = MIN_DRIVER.get(int(cuda.split(".")[0]))
    if least is not None and int(found[1]) < least:
        old = f"{found[0]}, too old for the CUDA {cuda} of torch"
        return Check("driver", "fail", old, f"install driver {least} or newer")
    return Check("driver", "ok", f"{found[0]}, CUDA {cuda} in torch {torch.__version__}")


def gpus() -> Check:
    """The GPUs that torch sees: generation, memory, and whether they are free."""
    if not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists():
            return Check("gpu", "fail", "torch sees none", "see `driver`; also unset CUDA_VISIBLE_DEVICES")
        return Check("gpu", "ok", "none: smoke presets run on the CPU")
    try:
        return _gpus()
    except RuntimeError as error:
        remedy = "look at nvidia-smi; a GPU that does not answer needs a reset or a reboot"
        return Check("gpu", "fail", _line(error), remedy)


def _gpus() -> Check:
    names, busy, old = [], [], []
    for i in range(torch.cuda.device_count()):
        properties, free = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)[0]
        names.append(f"{properties.name} {gb(properties.total_memory)}")
        if free < 0.9 * properties.total_memory:
            busy.append(f"{i} ({gb(free)} free)")
        if properties.major < 8:
            old.append(str(i))
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if old:
        return Check("gpu", "warn", found, f"GPU {', '.join(old)} is older than Ampere and has no bf16")
    if busy:
        return Check("gpu", "warn", found, f"others use GPU {', '.join(busy)}: look at nvidia-smi")
    return Check("gpu", "ok", found)


def collectives() -> Iterator[Check]:
    """gloo, and NCCL over all GPUs, in a process of their own, since a broken one hangs."""
    remedies = {
        "gloo": "make the host name resolve (/etc/hosts), or export GLOO_SOCKET_IFNAME=<interface>",
        "nccl": "run with NCCL_DEBUG=INFO; in a container --ipc=host; else try NCCL_P2P_DISABLE=1",
    }
    said: dict[str, str] = {}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("collective.py"))],
            capture_output=True, text=True, timeout=COLLECTIVE_TIMEOUT_S, check=False,
        )  # fmt: skip
        last = (done.stderr.strip().splitlines() or [""])[-1]
        lines, problem = done.stdout, f"ended with code {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        problem = f"hangs (gave up after {COLLECTIVE_TIMEOUT_S} s)"
    for line in lines.splitlines():
        if line.startswith("{"):
            said |= json.loads(line)
    for name in ("gloo", "nccl") if torch.cuda.is_available() else ("gloo",):
        result = said.get(name, problem)
        good = result.startswith("ok")
        yield Check(name, "ok" if good else "fail", result, "" if good else remedies[name])


# Kernels


def attention(device: torch.device) -> Iterator[Check]:
    """Every backend that can train on the device: output and gradients on four segments, heads grouped.

    sdpa is held against the definition, the others against sdpa on the CPU.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = partial(_attend, backend="sdpa")
    expected = _results(_spelled_out, CPU, torch.float32)
    yield _compare("attention: sdpa", plain, expected, device, torch.float32)
    expected = _results(plain, CPU, torch.float32)
    for name in sorted(set(ATTENTION) - {"sdpa"}):
        reason = unusable(name, device, dtype)
        if reason:
            yield Check(f"attention: {name}", "ok", f"not used here: {reason}")
            continue
        yield _compare(f"attention: {name}", partial(_attend, backend=name), expected, device, dtype)


def _attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, backend: str) -> Tensor:
    edges = torch.tensor([0, *LENGTHS], device=q_THD.device).cumsum(0, dtype=torch.int32)
    segments = Segments(cu_seqlens=edges, max_len=max(LENGTHS))
    return attend(q_THD, k_THD, v_THD, segments, scale=HEAD_DIM**-0.5, backend=backend)


def _spelled_out(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
    """Causal attention by its definition, in float64."""
    outs = []
    for q, k, v in zip(*(x.double().split(list(LENGTHS)) for x in (q_THD, k_THD, v_THD)), strict=True):
        k, v = (x.repeat_interleave(HEADS[0] // HEADS[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outs)


def _results(function: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of an attention function on fixed random numbers, which bf16 holds exactly."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, HEAD_DIM) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    *qkv, weight = (torch.randn(shape, generator=rng).bfloat16().to(device, dtype) for shape in shapes)
    qkv = [x.requires_grad_() for x in qkv]
    out = function(*qkv)
    return [x.detach().double().cpu() for x in (out, *torch.autograd.grad((out * weight).sum(), qkv))]


def _compare(
    name: str,
    function: Callable[..., Tensor],
    expected: list[Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Check:
    others = ", ".join(sorted(set(ATTENTION) - {name.removeprefix("attention: ")}))
    remedy = f"set model_config.attn_implementation to another ({others}), or install anew: make setup"
    try:
        found = _results(function, device, dtype)
    except Exception as error:   # whatever a broken kernel raises
        return Check(name, "fail", _line(error), remedy)
    bound, kind = BOUNDS[device.type, dtype], str(dtype).removeprefix("torch.")
    return _judge(name, found, expected, bound, kind, remedy)


def _judge(
    name: str, found: list[Tensor], expected: list[Tensor], bound: float, kind: str, remedy: str
) -> Check:
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    if all(error <= bound for error in errors):   # false for NaN
        return Check(name, "ok", f"within {max(errors):.0e} in {kind}")
    worst = max(errors, key=lambda error: (error != error, error))
    return Check(name, "fail", f"differs by {worst:.1e} in {kind} (bound {bound:g})", remedy)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def liger(device: torch.device) -> Check:
    """Liger's RMSNorm against torch's; on a CPU no Liger kernel is used."""
    version = package_version("liger-kernel")
    if version is None:
        return Check("liger", "fail", "not installed", "make setup, or trainer_args.use_liger_kernel=false")
    if device.type != "cuda":
        return Check("liger", "ok", f"{version}; the plain path is taken on the CPU")
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=rng).bfloat16() for shape in ((64, 256), (256,)))
    expected = F.rms_norm(x.double(), (256,), weight.double(), 1e-6)
    remedy = "install a C compiler (apt-get install gcc python3-dev): Triton needs one; else `make setup`"
    try:
        norm = SimpleNamespace(weight=nn.Parameter(weight.to(device)), variance_epsilon=1e-6)
        found = FusedRMSNorm(norm)(x.to(device)).detach().double().cpu()
    except Exception as error:   # whatever Triton raises
        return Check("liger", "fail", f"{version}: {_line(error)}", remedy)
    return _judge("liger", [found], [expected], BOUNDS["cuda", torch.bfloat16], "bfloat16", remedy)
