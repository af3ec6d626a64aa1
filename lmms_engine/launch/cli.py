"""The training command, one process of it.

usage: torchrun --nproc-per-node N -m lmms_engine.launch.cli --config a.yaml [--config b.yaml …] [key=value …]
   or: torchrun --nproc-per-node N -m lmms_engine.launch.cli config_yaml=a.yaml [key=value …]
   or: python -m lmms_engine.launch.cli …, which trains in one process

Later beats earlier: defaults, files left to right, command line. Exit codes: 0 trained to the end; 1 the run
failed; 2 the command or the configuration is wrong; 130 interrupted; 143 stopped by SIGTERM, after saving.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from lmms_engine.config import Job, load_job
from lmms_engine.config_rules import BUILT_IN
from lmms_engine.errors import Terminated, UserError
from lmms_engine.launch.once import another_has_spoken, is_to_say
from lmms_engine.plugins import load_plugins
from lmms_engine.registry import nearest

USAGE, FAILED, INTERRUPTED = 2, 1, 130
LOOK = "crash-rank*.json in the run folder tell what each was doing"
NO_ROOM = "make room on the disk of %s, then a new start goes on from the last checkpoint"
DESCRIPTION = "Train the model that a configuration describes. Finished runs say so; unfinished ones resume."
EPILOG = """\
Mappings merge, lists replace, null resets a key to its default; later beats earlier.
  --config recipes/qwen3_vl/config.yaml --config recipes/qwen3_vl/smoke.yaml trainer_args.max_steps=20
  config_yaml=my.yaml trainer_args.learning_rate=1e-5 dataset_config.datasets.0.path=data/mine.jsonl
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one process of a training job; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        rank = check_ranks()
    except UserError as error:
        return _fail(f"error: {error}", USAGE, debug)
    try:
        configs, overrides = parse(arguments)
        job = load_job(configs, overrides)
        if job.trainer.output_dir is None:
            job = job.with_output_dir(default_output_dir(configs))
        load_plugins(job)
        check_names(job)
    except (UserError, OSError) as error:
        return _fail(f"error: {error}", USAGE, debug, quiet=rank != 0)
    except Exception as error:
        return _fail(_internal(error), FAILED, debug, quiet=rank != 0)
    # From here on a rank may fail alone, and then only it can say why.
    try:
        with _terminated_by_sigterm():
            train(job, is_main=rank == 0, rank=rank, debug=debug, fresh="--fresh" in arguments)
    except (UserError, OSError) as error:
        remedy = f"; {NO_ROOM % job.trainer.output_dir}" if _is_about_room(error) else ""
        return _fail_together(f"error: {_one_line(error)}{remedy}", FAILED, debug, rank)
    except Terminated as stop:
        return int(stop.code)
    except KeyboardInterrupt:
        message = "interrupted: a new start goes on from the last checkpoint, if there is one"
        return _fail_together(message, INTERRUPTED, debug, rank)
    except Exception as error:
        if not _is_about_others(error):
            return _fail_together(_internal(error), FAILED, debug, rank)
        message = f"error: another rank is gone or does not answer ({_one_line(error)}); {LOOK}"
        return _fail_together(message, FAILED, debug, rank, quiet=another_has_spoken())
    return 0


def parse(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """(configuration files, overrides) of a command line; SystemExit 2 with the usage if there is no file."""
    parser = argparse.ArgumentParser(
        prog="python -m lmms_engine.launch.cli",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; repeatable")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and more messages")
    parser.add_argument("--fresh", action="store_true", help="move an old run folder aside first")
    parser.add_argument("rest", nargs="*", metavar="key=value", help="override, or config_yaml=FILE")
    given = parser.parse_intermixed_args(arguments)
    prefix = "config_yaml="
    named = [word.removeprefix(prefix) for word in given.rest if word.startswith(prefix)]
    configs = [Path(name) for name in (*given.config, *named)]
    if not configs:
        parser.error("no configuration: give --config FILE or config_yaml=FILE")
    return configs, [word for word in given.rest if not word.startswith(prefix)]


def check_ranks() -> int:
    """This process's rank. Stops on variables as torchrun never sets them: another program left them."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    values = {name: os.environ.get(name, default) for name, default in names.items()}
    told = ", ".join(f"{name}={value}" for name, value in values.items())
    remedy = "start the ranks with torchrun or launch.sh, or unset these variables to train in one process"
    if not all(value.isdigit() for value in values.values()):
        raise UserError(f"{told} in the environment: not whole numbers; {remedy}")
    if int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        raise UserError(f"{told} in the environment: there is no such rank; {remedy}")
    return int(values["RANK"])


def default_output_dir(configs: list[Path]) -> str:
    """The run folder where none is given: runs/<recipe>-<preset>, or runs/<file name> outside a recipe."""
    first = configs[0].absolute()
    if first.stem != "config":
        return f"runs/{first.stem}"
    preset = "smoke" if any(path.stem == "smoke" for path in configs) else "full"
    return f"runs/{first.parent.name}-{preset}"


def check_names(job: Job) -> None:
    """Stops on a dataset or processor that nobody has registered. Plugins have been loaded."""
    from lmms_engine.datasets import DATASETS
    from lmms_engine.datasets.processor import PROCESSORS

    data, processor = job.dataset, job.dataset.processor_config.processor_type
    _check_name("dataset_type", data.dataset_type, [BUILT_IN, *DATASETS.names()])
    if processor is not None:
        _check_name("processor_config.processor_type", processor, PROCESSORS.names())


def _check_name(key: str, name: str, legal: list[str]) -> None:
    if name not in legal:
        hint = nearest(name, legal)
        raise UserError(f"dataset_config.{key}={name}: not legal (legal: {', '.join(legal)}){hint}")


def train(job: Job, *, is_main: bool, rank: int, debug: bool, fresh: bool = False) -> None:
    """Joins the other ranks and trains. Everything heavy is imported here: the configuration is good."""
    from lmms_engine.parallel.flight import RECORDS, RECORDS_VARIABLE
    from lmms_engine.parallel.mesh import build_mesh, leave_mesh
    from lmms_engine.train.log import setup_logging
    from lmms_engine.train.runner import TrainRunner

    os.environ.setdefault(RECORDS_VARIABLE, str(RECORDS))
    setup_logging(is_main=is_main, rank=rank, debug=debug)
    if is_main:
        print(job.to_yaml(), flush=True)
    TrainRunner(job, build_mesh(job.trainer), fresh=fresh).build().run()
    leave_mesh()   # not after a failure: the other ranks may never come, and torchrun ends them


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """Until the runner listens to SIGTERM itself, it ends the process as it should: with 143, cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _internal(error: Exception) -> str:
    what = f"{type(error).__name__}: {_one_line(error)}"
    return f"internal error: {what} (run again with --debug for the traceback)"


def _is_about_room(error: Exception) -> bool:
    """Whether a disk is full; the system often names no file then."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_about_others(error: Exception) -> bool:
    """Whether a collective failed: gloo's errors are RuntimeErrors that name its source file."""
    from torch.distributed import DistBackendError

    return isinstance(error, DistBackendError) or "third_party/gloo" in str(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _fail(message: str, code: int, debug: bool, *, quiet: bool = False) -> int:
    """Says why on stderr. Called inside an `except` block."""
    if not quiet:
        if debug:
            traceback.print_exc()
        print(message, file=sys.stderr, flush=True)
    return code


def _fail_together(message: str, code: int, debug: bool, rank: int, *, quiet: bool = False) -> int:
    """Says why a rank failed, unless another has said the same. Called inside an `except` block."""
    who = f"[rank {rank}] " if rank else ""
    return _fail(who + message, code, debug, quiet=quiet or not is_to_say(message, rank))


def _leave(code: int) -> NoReturn:
    """Ends the process. After a failure at once: the collectives' threads are still waiting for other ranks,
    and to take them down in order would hang or abort, with another exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    _leave(main())
