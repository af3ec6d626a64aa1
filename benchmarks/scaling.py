"""Runs on all GPUs of one host: weak scaling, mixed modalities, a killed rank, and `verify`; then one table.

    python benchmarks/scaling.py all --out scaling.json
    python benchmarks/scaling.py throughput --out scaling.json --ranks 1,2,4,8 --model qwen3_vl_8b
        --layout fsdp,hsdp,sp2,sp4 --packing first_fit,balanced
    torchrun --nproc-per-node 2 benchmarks/scaling.py throughput --out two.json     (one size alone)
    python benchmarks/scaling.py all --tiny --ranks 1,2 --out dry.json              (gloo, on a CPU)

Started by itself it starts torchrun for each number of ranks. A case that fails (out of memory, say) is named
in the table and the next ones go on with fresh ranks. Weights are random and made on the device; pictures are
JPEG files read by the real loader. Exit code 1 if something hung, differed or failed, memory apart.

efficiency: tokens/s of a rank, over that of the smallest number of ranks that ran the same case (base_ranks).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from scaling_ranks import (
    DEFAULT_MODELS,
    LAYOUTS,
    PACKINGS,
    PARTS,
    REAL,
    TINY,
    TINY_MODEL,
    Case,
    Work,
    checkpointing,
    write_data,
)
from scaling_runs import end_all, kill, last_line, tail, verify
from vlm import table

from lmms_engine.config import Job
from lmms_engine.models.spec import MODELS
from lmms_engine.parallel.mesh import build_mesh, leave_mesh

WHATS = (*PARTS, "kill", "verify")
COLUMNS = {
    "throughput": (
        "model", "layout", "packing", "ranks", "step_s", "tokens_per_s", "efficiency", "base_ranks", "mfu",
        "tflops", "peak_gb", "data_s", "data_share", "loss",
    ),
    "mixed": ("model", "layout", "ranks", "steps", "seconds", "first_loss", "last_loss", "finite"),
    "kill": (
        "ranks", "killed", "at_step", "ranks_ended_s", "all_ended_s", "code", "crash_reports", "resumed_on",
        "resumed_from", "steps", "ok",
    ),
    "verify": ("case", "ranks", "status", "loss_difference", "norm_difference", "gradient_difference"),
}  # fmt: skip
# Asked for of a host with several GPUs, and not to be had yet: what, and the family that it waits for.
NO_FAMILY = {"Qwen3-VL-30B-A3B with shared experts": "qwen3_vl_moe", "Wan-14B, with and without SP": "wan"}


def main(words: list[str]) -> int:
    """A rank under torchrun, else the process that starts them."""
    given = parse(words)
    logging.basicConfig(level=logging.WARNING)
    if given.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")   # NVLink multicast
    return as_rank(given) if "RANK" in os.environ else start(given, words)


def parse(words: list[str]) -> argparse.Namespace:
    """The options, with defaults that depend on --tiny filled in; exits with 2 on what is not legal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=(*WHATS, "all"))
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--tiny", action="store_true", help="dry run: gloo on the CPU, a tiny model")
    parser.add_argument("--ranks", type=numbers, default=None, help="default 1,2,4,8; with --tiny 1,2")
    parser.add_argument("--model", default=None, help=f"default {','.join(DEFAULT_MODELS)}")
    parser.add_argument("--layout", default="fsdp", help=f"of {','.join(LAYOUTS)}")
    parser.add_argument("--packing", default="first_fit,balanced", help=f"of {','.join(PACKINGS)}")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of throughput (4)")
    parser.add_argument("--warmup", type=int, default=None, help="steps before them (2)")
    parser.add_argument("--mixed-steps", type=int, default=None, help="steps of mixed (200)")
    parser.add_argument("--kill-steps", type=int, default=None, help="length of the run that is killed (200)")
    parser.add_argument("--pack", type=int, default=None, help="tokens of a pack (16384)")
    parser.add_argument("--long-pack", type=int, default=None, help="where a sequence is shared (131072)")
    parser.add_argument("--accumulation", type=int, default=None, help="packs of a step and rank (2)")
    parser.add_argument("--recompute", default="full", help="full, selective, none, or decoder layers fully")
    parser.add_argument("--keep-gathered", action="store_true", help="reshard_after_forward: false")
    parser.add_argument("--timeout", type=int, default=300, help="of a collective, seconds")
    parser.add_argument("--limit", type=int, default=3600, help="of one torchrun, seconds: then it hangs")
    parser.add_argument("--only", action="append", default=None, help="a case of verify; repeatable (all)")
    for hidden in ("--data", "--done"):   # what the starting process tells its ranks
        parser.add_argument(hidden, action="append", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.what = WHATS if "all" in given.what else tuple(dict.fromkeys(given.what))
    given.ranks = given.ranks or ([1, 2] if given.tiny else [1, 2, 4, 8])
    given.steps = given.steps or (2 if given.tiny else 4)
    given.warmup = given.warmup if given.warmup is not None else (1 if given.tiny else 2)
    given.mixed_steps = given.mixed_steps or (20 if given.tiny else 200)
    given.only = given.only or (["packed", "fsdp-2"] if given.tiny else [])
    given.kill_steps = given.kill_steps or (16 if given.tiny else 200)
    models = (given.model or (TINY_MODEL if given.tiny else ",".join(DEFAULT_MODELS))).split(",")
    try:
        checkpointing(given.recompute)
        given.case = [
            Case.parse(f"{model}/{layout}/{packing}")
            for model in models for layout in given.layout.split(",") for packing in given.packing.split(",")
        ]  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    return given


def numbers(word: str) -> list[int]:
    """`1,2,4` as a list."""
    return [int(part) for part in word.split(",")]


def planned(given: argparse.Namespace) -> list[tuple[str, Case]]:
    """(part, case) in order. Mixed modalities take one model and one packing, in every layout."""
    first = given.case[0]
    alike = [case for case in given.case if (case.model, case.packing) == (first.model, first.packing)]
    cases = {"throughput": given.case, "mixed": alike}
    return [(part, case) for part in PARTS if part in given.what for case in cases[part]]


# ---- one rank, under torchrun ------------------------------------------------------------------------


def as_rank(given: argparse.Namespace) -> int:
    """Runs the cases one after another; rank 0 keeps the report up to date. A failure ends the process."""
    if not given.data and not set(given.what) <= set(PARTS):
        raise SystemExit("error: kill and verify start processes themselves: run them without torchrun")
    mesh = build_mesh(waiting(given.timeout))
    report: dict[str, Any] = {"machine": machine(given.tiny), "not_run": [], **{part: [] for part in PARTS}}
    with tempfile.TemporaryDirectory() as scratch:
        work = work_of(given, Path(mesh.broadcast(given.data[-1] if given.data else scratch)))
        if mesh.is_main:
            write_data(work, given.case, [part for part, _ in planned(given)])
        mesh.barrier()
        for part, case in planned(given):
            if f"{part}:{case}" in given.done:
                continue
            if reason := case.shortage(mesh.world_size):
                report["not_run"].append({"what": name_of(part, case, mesh.world_size), "reason": reason})
                continue
            try:
                report[part].append(PARTS[part](case, work, mesh.world_size))
            except Exception as error:
                traceback.print_exc()
                note_failure(given.out, mesh.rank, f"{part}:{case}", error)
                os._exit(1)   # the other ranks may never come
            if mesh.is_main:
                write(given.out, report)
        mesh.barrier()   # nobody removes the data before
    if mesh.is_main and not given.data:
        print(text_of(report))
    leave_mesh()
    return 0


def waiting(seconds: int) -> Any:
    """A trainer section with this timeout of collectives: the first mesh of a process sets it."""
    job = {
        "model_config": {"load_from_pretrained_path": "none"},
        "dataset_config": {"datasets": [{"path": "none"}]},
        "trainer_args": {"max_steps": 1, "ddp_timeout": seconds},
    }
    return Job.from_dict(job).trainer


def work_of(given: argparse.Namespace, folder: Path) -> Work:
    """What the options say about every case."""
    changes = {"pack": given.pack, "long_pack": given.long_pack, "accumulation": given.accumulation}
    changes = {key: value for key, value in changes.items() if value is not None}
    return Work(
        folder=folder, scale=replace(TINY if given.tiny else REAL, **changes), steps=given.steps,
        warmup=given.warmup, mixed_steps=given.mixed_steps, recomputed=given.recompute,
        keep_gathered=given.keep_gathered, timeout=given.timeout,
    )  # fmt: skip


def note_failure(out: Path, rank: int, what: str, error: Exception) -> None:
    """Leaves word for the process that started the ranks; one that fails makes others fail after it."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    body = {"at": time.time(), "rank": rank, "what": what, "reason": said}
    out.with_name(f"{out.name}.failed-{rank}").write_text(json.dumps(body), encoding="utf-8")


# ---- the process that starts them --------------------------------------------------------------------


def start(given: argparse.Namespace, words: list[str]) -> int:
    """All parts at all sizes, then the table."""
    gpus = machine(given.tiny)["gpus"]
    if not gpus and not given.tiny:
        raise SystemExit("error: no GPU here; --tiny runs every part on the CPU")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(given.ranks))))
    report: dict[str, Any] = {
        "machine": machine(given.tiny), "tiny": given.tiny, **{what: [] for what in given.what},
        "not_run": not_here(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in given.ranks:
            if gpus and ranks > gpus:
                report["not_run"].append({"what": f"{ranks} ranks", "reason": f"the machine has {gpus} GPUs"})
                continue
            for part, rows in run_ranks(given, words, ranks, folder).items():
                report[part] += rows
            if "kill" in given.what:
                add_kill(report, given, ranks, folder)
            write(given.out, report)
        if "verify" in given.what:
            rows, left_out = verify(folder, given.only)
            report["verify"] += rows
            report["not_run"] += left_out
    write(given.out, report)
    print(text_of(report))
    return 0 if all(passed(row) for what in given.what for row in report[what]) else 1


def run_ranks(
    given: argparse.Namespace, words: list[str], ranks: int, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """torchrun on so many ranks until every case has a row; after a failure it goes on with those left."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    left: dict[str, tuple[str, Case]] = {}
    done: list[str] = []
    for part, case in planned(given):
        if reason := case.shortage(ranks):
            found["not_run"].append({"what": name_of(part, case, ranks), "reason": reason})
            done.append(f"{part}:{case}")
        else:
            left[f"{part}:{case}"] = (part, case)
    while left:
        out = folder / f"{ranks}-ranks-{len(left)}-left.json"
        problem = torchrun(given, words, ranks, out, folder, done)
        report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        for part in PARTS:
            for row in report.get(part, []):
                found[part].append(row)
                done.append(f"{part}:{Case(row['model'], row['layout'], row['packing'])}")
        left = {name: each for name, each in left.items() if name not in done}
        if left:
            problem = problem or {"reason": "torchrun ended without a word"}
            failed = problem.get("what") or next(iter(left))
            part, case = left.pop(failed)
            done.append(failed)
            found[part].append({**vars(case), "ranks": ranks, "problem": problem["reason"]})
    return found


def torchrun(
    given: argparse.Namespace, words: list[str], ranks: int, out: Path, folder: Path, done: list[str]
) -> dict[str, str] | None:
    """Runs the ranks; why they failed, and in which case where that is known, or None."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        __file__, *words, "--out", str(out), "--data", str(folder / "data"),
        *(word for name in done for word in ("--done", name)),
    ]  # fmt: skip
    print(f"{ranks} ranks: {len(planned(given)) - len(done)} cases", flush=True)
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        code = process.wait(timeout=given.limit)
    except subprocess.TimeoutExpired:
        end_all(process)
        print(tail(log), file=sys.stderr)
        return {"reason": f"hung: not done within --limit {given.limit} s"}
    if code == 0:
        return None
    print(tail(log), file=sys.stderr)
    notes = [json.loads(path.read_text()) for path in out.parent.glob(f"{out.name}.failed-*")]
    if not notes:
        return {"reason": f"torchrun ended with {code}: {last_line(log)}"}
    first = min(notes, key=lambda note: note["at"])
    return {"what": first["what"], "reason": f"rank {first['rank']}: {first['reason']}"}


def add_kill(report: dict[str, Any], given: argparse.Namespace, ranks: int, folder: Path) -> None:
    """The row of a killed and resumed run."""
    if ranks < 2:
        report["not_run"].append({"what": f"kill on {ranks} ranks", "reason": "nobody is left"})
        return
    try:
        row = kill(ranks, folder, steps=given.kill_steps, packing_length=256 if given.tiny else 1024)
    except RuntimeError as error:
        row = {"ranks": ranks, "problem": str(error), "ok": False}
    report["kill"].append(row)


# ---- what is written ---------------------------------------------------------------------------------


def write(out: Path, report: dict[str, Any]) -> None:
    """The report as a file, efficiencies included."""
    add_efficiency(report.get("throughput", []))
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """Tokens/s of a rank over that of the same case on the fewest ranks that it ran on; 1 for that itself."""
    groups = defaultdict(list)
    for row in rows:
        if "problem" not in row:
            groups[row["model"], row["layout"], row["packing"]].append(row)
    for group in groups.values():
        base = min(group, key=lambda row: row["ranks"])
        for row in group:
            row["base_ranks"] = base["ranks"]
            row["efficiency"] = row["tokens_per_s"] / row["ranks"] / (base["tokens_per_s"] / base["ranks"])


def passed(row: dict[str, Any]) -> bool:
    """Whether a row found nothing wrong; a case that does not fit into memory is no fault."""
    if "problem" in row:
        return "OutOfMemory" in row["problem"]
    return row.get("ok", True) and row.get("finite", True)


def text_of(report: dict[str, Any]) -> str:
    """The tables, what failed, and what was not run."""
    blocks = []
    for what, columns in COLUMNS.items():
        rows = [row for row in report.get(what, []) if "problem" not in row]
        if rows:
            blocks.append(f"{what}\n" + table([{key: row.get(key) for key in columns} for row in rows]))
    failed = [(what, row) for what in COLUMNS for row in report.get(what, []) if "problem" in row]
    blocks += [
        f"failed: {what}: {' '.join(str(v) for k, v in row.items() if k not in ('problem', 'ok'))} ranks: "
        f"{row['problem']}"
        for what, row in failed
    ]
    blocks.append("\n".join(f"not run: {each['what']}: {each['reason']}" for each in report["not_run"]))
    return "\n\n".join(blocks)


def name_of(part: str, case: Case, ranks: int) -> str:
    """A case as it is listed."""
    return f"{part}: {case} on {ranks} ranks"


def not_here() -> list[dict[str, str]]:
    """What a host with several GPUs is to show and this script cannot run."""
    reasons = {
        what: "benchmarks/common.py has no such size" if name in MODELS.names() else f"no family {name} yet"
        for what, name in NO_FAMILY.items()
    }
    reasons["Muon"] = "this script takes AdamW only"
    return [{"what": what, "reason": reason} for what, reason in reasons.items()]


def machine(tiny: bool) -> dict[str, Any]:
    """What the figures were measured on; GPUs are left alone by a dry run."""
    gpus = 0 if tiny else torch.cuda.device_count()
    return {
        "gpu": torch.cuda.get_device_name() if gpus else "none",
        "gpus": gpus,
        "backend": "nccl" if gpus else "gloo",
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
