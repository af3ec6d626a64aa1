"""Whether every layout, backend and kernel gives the numbers of one plain process, for one recipe.

    certificate = verify(job, steps=2)
    certificate.passed

The first global batches of the recipe's own loader go through the engine in many ways. Each is compared with
a reference that shares as little as possible with them: loss, gradient norm, and every parameter's gradient.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.plugins import load_plugins
from lmms_engine.train.verify.cases import CASES, REFERENCE, UNPADDED_REFERENCE, Case, choose, plain_job
from lmms_engine.train.verify.certificate import Certificate, Result, environment, judge
from lmms_engine.train.verify.deal import Rows, read_rows
from lmms_engine.train.verify.ranks import ROWS_FILE, run_cases
from lmms_engine.train.verify.run import Outcome


def verify(
    job: Job,
    *,
    steps: int = 2,
    only: Iterable[str] = (),
    config: Iterable[str] = (),
    overrides: Iterable[str] = (),
    on_result: Callable[[Result], None] = lambda result: None,
) -> Certificate:
    """The certificate of a job. Starts processes of its own; the GPUs of this machine are used if it has any.

    config, overrides: how the job was given, for the record. on_result: called as each case ends.
    Raises UserError where there is nothing to compare with: data, model or reference fail.
    """
    chosen, plain = choose(only), plain_job(job, steps)
    load_plugins(plain)
    on_gpu = torch.cuda.is_available()
    devices = torch.cuda.device_count() if on_gpu else None
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        folder = Path(name)
        rows = read_rows(plain, steps)
        torch.save(rows, folder / ROWS_FILE)
        reference, case = _reference(plain, folder, on_gpu)
        results = {each.name: _impossible(each, devices) for each in chosen}
        for result in filter(None, results.values()):
            on_result(result)
        possible = [each for each in chosen if results[each.name] is None]
        for each, reply in run_cases(possible, plain, folder, on_gpu=on_gpu):
            result = results[each.name] = judge(each, reply, reference, on_gpu=on_gpu)
            on_result(result)
    return Certificate(
        config=tuple(config),
        overrides=tuple(overrides),
        reference=case.says,
        rows=_figures(rows),
        results=tuple(results.values()),
        environment=environment(on_gpu),
    )


def _reference(job: Job, folder: Path, on_gpu: bool) -> tuple[Outcome, Case]:
    """What everything is compared with; without padding where the family has no padded path."""
    for case in (REFERENCE, UNPADDED_REFERENCE):
        ((_, reply),) = run_cases([case], job, folder, on_gpu=on_gpu, is_reference=True)
        if reply.status == "done":
            return reply.outcome, case
        if reply.status == "failed":
            break
    raise UserError(f"the reference did not run, so there is nothing to compare with: {reply.reason}")


def _impossible(case: Case, devices: int | None) -> Result | None:
    """The result of a case that this machine cannot run."""
    reason = ""
    if case.needs_gpu and devices is None:
        reason = "needs a GPU"
    elif devices is not None and case.ranks > devices:
        reason = f"needs {case.ranks} GPUs, there are {devices}"
    return Result(case.name, case.says, case.ranks, "not run", reason) if reason else None


def _figures(rows: Rows) -> dict[str, int | str]:
    return {"steps": len(rows.steps), **rows.figures(), "fingerprint": rows.fingerprint}


__all__ = ["CASES", "Certificate", "Result", "verify"]
