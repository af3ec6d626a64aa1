"""From outcomes to a certificate: what was compared, how far apart it is, on which code and machine."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lmms_engine.train.manifest import PACKAGES, ROOT, git_state, package_version, sha256_file
from lmms_engine.train.verify.cases import Case
from lmms_engine.train.verify.ranks import Reply
from lmms_engine.train.verify.run import Outcome

JSON_FILE, MARKDOWN_FILE = "verify.json", "verify.md"


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that still are equality: of the loss; of gradients (per tensor) and their norm."""

    loss: float
    gradient: float


# float32 on a CPU as the project defines equality. Kernels on a GPU add in other orders, and bfloat16 keeps
# eight bits: there the bound is what one rounding of each layer can make, and catches wrong formulas only.
FLOAT32 = Tolerance(1e-6, 1e-5)
FLOAT32_GPU = Tolerance(1e-5, 1e-4)
BFLOAT16 = Tolerance(2e-2, 2e-1)


@dataclass(frozen=True)
class Result:
    """One line of the certificate. Differences are relative and the worst of all steps."""

    case: str
    says: str
    ranks: int
    status: Literal["ok", "failed", "not run"]
    reason: str = ""
    losses: tuple[float, ...] = ()
    loss_difference: float | None = None
    norm_difference: float | None = None
    gradient_difference: float | None = None
    parameter: str = ""   # whose gradient is the furthest off
    loss_tolerance: float | None = None
    gradient_tolerance: float | None = None


@dataclass(frozen=True)
class Certificate:
    """All results, and what they hold for."""

    config: tuple[str, ...]
    overrides: tuple[str, ...]
    reference: str
    rows: dict[str, Any]
    results: tuple[Result, ...]
    environment: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        states = [result.status for result in self.results]
        return "ok" in states and "failed" not in states


def judge(case: Case, reply: Reply, reference: Outcome, *, on_gpu: bool) -> Result:
    """The result of a case."""
    about = {"case": case.name, "says": case.says, "ranks": case.ranks}
    if reply.status == "refused":
        return Result(**about, status="not run", reason=reply.reason)
    if reply.status == "failed":
        return Result(**about, status="failed", reason=reply.reason)
    got, tolerance = reply.outcome, tolerance_of(case, on_gpu)
    losses, norms = got.expected or (reference.losses, reference.norms)
    loss, norm = furthest(got.losses, losses), furthest(got.norms, norms)
    gradient = got.worst.difference if got.worst else None
    problems = []
    if loss > tolerance.loss:
        problems.append("loss")
    if norm > tolerance.gradient:
        problems.append("gradient norm")
    if gradient is not None and gradient > tolerance.gradient:
        problems.append("gradients")
    if got.worst and any(a != b for a, b in zip(got.totals, reference.totals, strict=True)):
        problems.append("denominators")
    return Result(
        **about,
        status="failed" if problems else "ok",
        reason=f"differs: {', '.join(problems)}" if problems else "",
        losses=tuple(got.losses),
        loss_difference=loss,
        norm_difference=norm,
        gradient_difference=gradient,
        parameter=got.worst.parameter if got.worst else "",
        loss_tolerance=tolerance.loss,
        gradient_tolerance=tolerance.gradient,
    )


def tolerance_of(case: Case, on_gpu: bool) -> Tolerance:
    """How close a case must come."""
    if on_gpu:
        return BFLOAT16 if case.bf16 else FLOAT32_GPU
    return FLOAT32   # a CPU computes in float32 whatever the job says


def furthest(ours: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; infinite where lengths differ or something is no number."""
    if len(ours) != len(reference) or not ours:
        return math.inf
    worst = max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, reference, strict=True))
    return worst if all(map(math.isfinite, [*ours, *reference])) else math.inf


def environment(on_gpu: bool) -> dict[str, Any]:
    """Code, packages and machine; nothing that names a place or a person."""
    count = torch.cuda.device_count() if on_gpu else 0
    return {
        "git": git_state(ROOT),
        "lock_sha256": sha256_file(ROOT / "requirements.lock"),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "cuda": torch.version.cuda if on_gpu else None,
    }


def write(certificate: Certificate, folder: Path) -> tuple[Path, Path]:
    """Writes both files and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"passed": certificate.passed, **asdict(certificate)}
    as_json, as_text = folder / JSON_FILE, folder / MARKDOWN_FILE
    text = json.dumps(_finite(body), indent=2, ensure_ascii=False, allow_nan=False)
    as_json.write_text(text + "\n", encoding="utf-8")
    as_text.write_text(markdown(certificate), encoding="utf-8")
    return as_json, as_text


def _finite(node: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(value) for value in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


HEADER = ("case", "ranks", "loss", "loss off by", "worst gradient off by", "in", "tolerance", "result")


def table_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """The cells of the table, one row a case, under HEADER."""
    return [
        (
            result.case,
            str(result.ranks),
            " ".join(f"{loss:.6f}" for loss in result.losses[:2]),
            _number(result.loss_difference),
            _number(result.gradient_difference),
            result.parameter,
            ", ".join(filter(None, map(_number, (result.loss_tolerance, result.gradient_tolerance)))),
            f"{result.status}: {result.reason}" if result.reason else result.status,
        )
        for result in results
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def markdown(certificate: Certificate) -> str:
    """The certificate for people."""
    env, rows = certificate.environment, certificate.rows
    git = env["git"] or {"commit": "unknown", "dirty": False}
    lines = [
        f"# Certificate: {'all equal' if certificate.passed else 'FAILED'}",
        "",
        f"`{' + '.join(certificate.config)}`"
        + (f" with `{' '.join(certificate.overrides)}`" if certificate.overrides else ""),
        "",
        f"- Compared: {rows['packs']} packs in {rows['steps']} steps with {rows['rows']} rows "
        f"({rows['rows_with_media']} with media), {rows['tokens']:,} tokens, {rows['supervised_tokens']:,} "
        f"supervised; data `{rows['fingerprint']}`",
        f"- Reference: {certificate.reference}",
        "- Differences are relative and the worst of all steps and ranks; a gradient's is the largest in the "
        "tensor over the tensor's largest entry. Tolerances: loss, gradients.",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{' --- |' * len(HEADER)}",
        *(_line(row) for row in table_rows(certificate.results)),
        "",
        f"- Commit `{git['commit']}`{' with changes' if git['dirty'] else ''}, lock `{env['lock_sha256']}`",
        f"- Python {env['python']}, " + ", ".join(f"{k} {v}" for k, v in env["packages"].items()),
        f"- {env['machine']}; GPUs: {', '.join(env['gpus']) or 'none'}",
        "",
        "| case | what it is |",
        "| --- | --- |",
        *(f"| {result.case} | {result.says} |" for result in certificate.results),
        "",
    ]
    return "\n".join(lines)
