"""TrainRunner: a run from config to last checkpoint. There is one, and it has two methods: build and run.

TrainRunner(job).build().run()
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader, merge_states
from lmms_engine.errors import Terminated, UserError
from lmms_engine.models.build import check_tokens
from lmms_engine.models.flops import Flops
from lmms_engine.models.hf import read_config
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.plugins import load_plugins
from lmms_engine.train import checkpoint, rundir
from lmms_engine.train.backend import build_backend
from lmms_engine.train.claim import Claim
from lmms_engine.train.crash import CrashReport
from lmms_engine.train.data import build_loader, eval_loaders
from lmms_engine.train.drawings import write_drawings
from lmms_engine.train.evaluate import evaluate
from lmms_engine.train.log import TrainProgress, describe
from lmms_engine.train.manifest import build_manifest, write_manifest
from lmms_engine.train.metrics import (
    METRICS_FILE,
    SKIPPED_FILE,
    Recorder,
    StepClock,
    StepRecord,
    append_lines,
    count_refused,
    cut_back,
    make_row,
    peak_memory_gb,
    read_lines,
)
from lmms_engine.train.packing import PACKING_FILE, PACKING_KEYS, Packing
from lmms_engine.train.packing import describe as packing_figures
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.report import NUM_SAMPLES, write_report
from lmms_engine.train.samples import Shown, show
from lmms_engine.train.seed import derive, generator
from lmms_engine.train.step import train_step
from lmms_engine.train.tracker import RunInfo, Trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Window:
    """The micro-batches of one step: this rank's own, and those filled up so that all ranks have as many."""

    own: list[PackedBatch]
    micros: list[PackedBatch]  # empty: the epoch is over on all ranks
    data_s: float  # how long this rank waited for them
    stop: bool  # some rank was asked to stop: do this step, save, leave


class TrainRunner:
    """One training run over the ranks of `mesh`.

    mesh: None joins the process group that torchrun describes, or makes one of a single process.
    output_dir: None takes the job's, else `runs/<run name>`.
    fresh: begin anew; once everything is built, an old run folder is moved aside.
    """

    def __init__(
        self,
        job: Job | dict[str, Any],
        mesh: Mesh | None = None,
        output_dir: Path | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.job = job if isinstance(job, Job) else Job.from_dict(job)
        self.mesh = mesh or build_mesh(self.job.trainer)
        folder = output_dir or self.job.trainer.output_dir or f"runs/{self.job.trainer.run_name or 'run'}"
        self.run_dir = Path(folder).absolute()
        self.fresh = fresh
        self.step = 0
        self._saved_step = 0
        self._stop_asked = False
        self._idle_epochs = 0
        self._shown: list[Shown] | None = None
        self._claims = ExitStack()

    def build(self) -> TrainRunner:
        """Makes everything a run needs; after it `run` can start. Builds nothing for a finished run."""
        with self._claims:
            self._build()
            self._claims = self._claims.pop_all()   # kept to the end of the run
        return self

    def _build(self) -> None:
        job, mesh = self.job, self.mesh
        plugins = load_plugins(job)
        self.start = rundir.on_main(mesh, self._claim_folder)
        self.step = self._saved_step = self.start.step
        if self.start.finished:
            return
        self.loader = build_loader(job, mesh.dp_rank, mesh.dp_size, pin_memory=mesh.device.type == "cuda")
        check_tokens(self.loader.processor, read_config(job.model))   # a wrong one stops before the model
        self.eval_loaders = eval_loaders(job, mesh.dp_rank, mesh.dp_size)
        self._resume_data()
        fresh = self.start.checkpoint is None
        self.objective, self.spec, self.model_config = build_model(job, mesh, load_weights=fresh)
        self.backend = build_backend(self.objective, job, mesh)
        self._resume_model()
        self._open_run_folder(plugins)

    def run(self) -> None:
        """Trains to the end and writes the last checkpoint and the report. Raises Terminated on SIGTERM."""
        if self.start.finished:
            self._claims.close()
            log.info("finished at step %d: nothing to do (%s)", self.step, self.run_dir)
            return
        crash = CrashReport(self.run_dir, self.mesh.rank, self.job.trainer.ddp_timeout)
        with self._claims, self._catch_sigterm(), self._trackers(), self._progress_bar(), crash:
            done = False
            while not done:
                clock = StepClock(self.mesh.device)
                window = self._next_window()
                crash.note(self.step + 1, window.micros)
                done = self._train(window, clock) if window.micros else not self._next_epoch()
                if self._shown is None and window.own and self.mesh.is_main:
                    self._shown = show(self.loader, window.own, NUM_SAMPLES)   # for the report
                if window.stop and not done:
                    self._leave()
            self._save()
        write_drawings(
            self.objective, self.loader.processor, self.mesh, self.job.trainer.seed, self.run_dir
        )
        if self.mesh.is_main:
            write_report(self.run_dir, self._shown)
            for name, words in packing_figures(read_lines(self.run_dir / PACKING_FILE, PACKING_KEYS)).items():
                log.info("%s: %s", name, words)
        for loader in (self.loader, *self.eval_loaders.values()):
            loader.close()
        self.mesh.barrier()
        log.info("finished at step %d (%s)", self.step, self.run_dir)

    # One step and what follows it

    def _train(self, window: Window, clock: StepClock) -> bool:
        """One step, then log, validation and checkpoint where they are due. True if it was the last."""
        trainer, mesh = self.job.trainer, self.mesh
        self.step += 1
        self._idle_epochs = 0
        self.fraction = self._fraction_done()
        last = self.fraction >= 1
        self.backend.set_progress(self.fraction, self.step)
        torch.manual_seed(derive(trainer.seed, "step", mesh.dp_rank, self.step))
        rng = generator(trainer.seed, "draw", mesh.dp_rank, self.step)
        stats = train_step(self.objective, self.backend, window.micros, mesh, rng)
        clock.stop()
        self.recorder.add(
            StepRecord(
                step=self.step,
                epoch=self.loader.progress(),
                stats=stats,
                lr=self.backend.lrs(),
                clock=clock,
                data_s=window.data_s,
                micros=window.own,
                flops=self._flops(window.own),
                skipped=self._skipped(self.loader),
                peak_gb=peak_memory_gb(mesh.device),
            )
        )
        validates = bool(self.eval_loaders) and (last or due(self.step, trainer.eval_steps))
        saves = last or due(self.step, trainer.save_steps)
        if validates or saves or self.step == 1 or due(self.step, trainer.logging_steps):
            self._log()
        if validates:
            try:
                self._validate()
            except UserError:   # on all ranks: what was trained is not lost to rows that were only read
                self._save()
                raise
        if saves:
            self._save()
        return last

    def _next_window(self) -> Window:
        """The next micro-batches, as many on every rank. Collective."""
        began = time.perf_counter()
        own = self.loader.next_step()
        data_s = time.perf_counter() - began
        most, stop = self.mesh.host_max([len(own), self._stop_asked])
        padding = [self.loader.empty() for _ in range(int(most) - len(own))]
        return Window(own, own + padding, data_s, bool(stop))

    def _next_epoch(self) -> bool:
        """Begins the next pass over the data; False if the job asks for no more."""
        epochs = self.job.trainer.num_train_epochs
        self._idle_epochs += 1
        if self.step == 0 or self._idle_epochs > 1:
            skipped = self._skipped(self.loader)
            kinds = Counter(row["kind"] for rank in self.mesh.gather(skipped) for row in rank)
            self._name_skipped(skipped)
            why = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
            raise UserError(
                f"dataset_config.datasets: a whole pass gave no usable row{why and f' ({why})'}; see "
                f"{self.run_dir / SKIPPED_FILE} and `lmms-engine inspect`"
            )
        if epochs is not None and self.loader.epoch + 1 >= epochs:
            return False
        self.loader.next_epoch()
        return True

    def _fraction_done(self) -> float:
        """How much of the run is done after this step, up to 1: what the schedule goes by."""
        trainer = self.job.trainer
        if trainer.num_train_epochs is None:
            return min(self.step / trainer.max_steps, 1.0)
        return min(self._epoch() / trainer.num_train_epochs, 1.0)

    def _epoch(self) -> float:
        """Passes over the data done, mean over the ranks. Collective."""
        (total,) = self.mesh.host_sum([self.loader.progress()])
        return total / self.mesh.world_size

    def _flops(self, micros: list[PackedBatch]) -> Flops:
        each = [self.spec.flops(self.model_config, micro, self._frozen) for micro in micros]
        return Flops(sum(f.strict for f in each), sum(f.conventional for f in each))

    def _skipped(self, loader: Loader) -> list[dict[str, Any]]:
        """Rows skipped since the last call; ranks of one sequence read the same ones, and the first tells."""
        records = loader.take_skipped()
        return [] if self.mesh.sp_rank else [{"step": self.step, **record._asdict()} for record in records]

    def _name_skipped(self, skipped: list[dict[str, Any]]) -> int:
        """Writes rows that no step will report to skipped.jsonl; their number on all ranks. Collective."""
        everywhere = [row for rank in self.mesh.gather(skipped) for row in rank]
        if self.mesh.is_main:
            append_lines(self.run_dir / SKIPPED_FILE, everywhere)
        return count_refused(everywhere)

    # Logging, validation, checkpoints

    def _log(self) -> None:
        """Writes the rows of the steps since the last time; stops the run on a loss that is no number."""
        rows = self.recorder.flush()
        for row in rows:
            self.trackers.log(row)
            if not row["supervised_tokens"]:
                log.warning("step %d: 0 supervised tokens, nothing was learned", row["step"])
        self.progress.show(rows, self.fraction)
        self.backend.check_finite()  # after the rows are written: they show where it began

    def _validate(self) -> None:
        """Appends one row of held-out loss; the rows it had to skip are named each time."""
        began, loaders = time.perf_counter(), self.eval_loaders.values()
        result = evaluate(self.objective, self.eval_loaders, self.mesh, self.job.trainer.seed)
        seconds = time.perf_counter() - began
        row = make_row(
            step=self.step,
            split="eval",
            step_s=seconds,
            tokens_per_s=result.tokens / seconds,
            epoch=self._epoch(),
            skipped=self._name_skipped([row for each in loaders for row in self._skipped(each)]),
            **asdict(result),
        )
        if self.mesh.is_main:
            append_lines(self.run_dir / METRICS_FILE, [row])
        self.trackers.log(row)
        self.progress.note(describe(row, self.job.trainer.max_steps))

    def _save(self) -> None:
        """Writes the rows up to this step and its checkpoint, unless they are there. Collective."""
        if self._saved_step == self.step:
            return
        if self.recorder.pending:
            self._log()
        states = self.mesh.gather(self.loader.state_dict())
        extra = {
            "epoch": self._epoch(),
            "dp_size": self.mesh.dp_size,
            "seed": self.job.trainer.seed,
            "loader": merge_states(states),
        }
        keep = self.job.trainer.save_total_limit
        checkpoint.save(self.run_dir, self.step, self.backend.state(), self.mesh, extra, keep=keep)
        self._saved_step = self.step

    def _leave(self) -> None:
        """Saves and ends the process as SIGTERM asks."""
        self.loader.close()   # its workers got the signal too and live on only for a while: none is needed
        self._save()
        log.info("terminated: saved step %d, run again to go on", self.step)
        raise Terminated

    # Beginning

    def _claim_folder(self) -> rundir.Start:
        """Keeps other processes out of the run folder and says where the run in it begins. Rank 0 only."""
        rundir.require_writable(self.run_dir)
        self._claims.callback(Claim(self.run_dir).close)
        return rundir.prepare(self.job, self.run_dir, self.mesh.dp_size, fresh=self.fresh)

    def _move_aside(self) -> None:
        """Begins in an empty folder. Rank 0 only."""
        self._claims.close()   # its file would go with the old folder
        rundir.move_aside(self.run_dir)
        self._claims.callback(Claim(self.run_dir).close)

    def _resume_data(self) -> None:
        """Puts the loader where the checkpoint was; other data are refused before a model is built."""
        if self.start.checkpoint is not None:
            self.loader.load_state_dict(checkpoint.read_state(self.start.checkpoint)["loader"])

    def _resume_model(self) -> None:
        """Weights and optimiser of the checkpoint, in place of the initial ones."""
        self.fraction = 0.0
        if self.start.checkpoint is None:
            return
        checkpoint.load(self.start.checkpoint, self.backend.state(), self.mesh)
        self.fraction = self._fraction_done()
        log.info("resumed from step %d (%s)", self.step, self.start.checkpoint)
        for note in self.start.notes:
            log.warning("%s", note)

    def _open_run_folder(self, plugins: dict[str, str]) -> None:
        """Cuts the logs back to where the run begins and writes down what it is. Collective."""
        job, mesh = self.job, self.mesh
        config_yaml = job.to_yaml()
        manifest = build_manifest(
            mesh=mesh,
            config_yaml=config_yaml,
            seed=job.trainer.seed,
            plugins=plugins,
            data_fingerprint=self.loader.fingerprint(),
            processor_fingerprint=self.loader.processor.fingerprint,
            weights=job.model.load_from_pretrained_path,
        )
        if self.fresh:
            rundir.on_main(mesh, self._move_aside)

        def begin() -> None:
            write_manifest(self.run_dir, manifest, resumed_from=self.step)
            if discarded := cut_back(self.run_dir, self.step):
                log.info("%d metrics rows after step %d moved to *.discarded", discarded, self.step)
            (self.run_dir / rundir.CONFIG_FILE).write_text(config_yaml, encoding="utf-8")

        rundir.on_main(mesh, begin)   # no rank appends rows before the cut
        coefficients, log_rows = self.objective.coefficients, job.trainer.log_rows
        self.recorder = Recorder(
            self.run_dir, mesh, coefficients, log_rows=log_rows, packing=Packing.of(job)
        )
        self._frozen = frozen_names(self.objective.model)
        self._log_global_batch()

    def _log_global_batch(self) -> None:
        trainer, ranks = self.job.trainer, self.mesh.dp_size
        each, accumulated = trainer.per_device_train_batch_size, trainer.gradient_accumulation_steps
        tokens = ranks * accumulated * each * self.job.dataset.packing_length
        log.info(
            f"global batch: {ranks} data ranks x {accumulated} micro-batches x {each} packs of "
            f"{self.job.dataset.packing_length:,} tokens = {tokens:,} tokens at most"
        )

    @contextmanager
    def _catch_sigterm(self) -> Iterator[None]:
        """SIGTERM asks for a stop after the step; every rank hears of it in the next window."""

        def ask(*_: object) -> None:
            self._stop_asked = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def _trackers(self) -> Iterator[None]:
        names = self.job.trainer.report_to if self.mesh.is_main else ()
        name = self.job.trainer.run_name or self.run_dir.name
        self.trackers = Trackers(names, RunInfo(self.run_dir, name, self.step, self.job.to_dict()))
        try:
            yield
        finally:
            self.trackers.finish()

    @contextmanager
    def _progress_bar(self) -> Iterator[None]:
        epochs = self.job.trainer.num_train_epochs is not None
        max_steps = None if epochs else self.job.trainer.max_steps
        with TrainProgress(
            enabled=self.mesh.is_main, max_steps=max_steps, fraction=self.fraction
        ) as self.progress:
            yield


def due(step: int, every: int | None) -> bool:
    """Whether something done every so many steps is due after this one; None: never."""
    return bool(every) and step % every == 0


def frozen_names(model: torch.nn.Module) -> frozenset[str]:
    """Names of the untrained parameters, as flops.py wants them."""
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
