"""Decide whether a recipe runs as `full` or as `smoke` on this machine, and with how many processes.

Used by `launch.sh`:

    python -m lmms_engine.launch.preset --preset auto --ngpu 0 recipes/<name> [key=value ...]

prints `<preset> <processes>` on standard output and the reason on standard error. The
memory that the real model needs is stated in the recipe's `config.yaml` by one comment line, any
alternative of which is enough: `# GPU memory: 1 x 96 GB, or 2 x 80 GB`. A config without such a line
needs no GPU.
It refuses (exit 2, one line) `full` where the GPUs or the weights are not to be had.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmms_engine.errors import UserError
from lmms_engine.folders import missing_folder

if TYPE_CHECKING:
    from lmms_engine.config import Job

PRESETS = ("auto", "smoke", "full")
HUB_TIMEOUT_S = 5.0
SAMPLE_MARKER = "sample.json"  # `data-prep sample` leaves it in the folder that it writes


@dataclass(frozen=True)
class Need:
    """So many GPUs with so much memory each are enough; GB are 10^9 bytes, as printed on the box."""

    gpus: int
    gb: float

    def __str__(self) -> str:
        return f"{self.gpus} x {self.gb:g} GB"


@dataclass(frozen=True)
class Choice:
    """What launch.sh acts on."""

    preset: str
    processes: int
    reason: str


def read_needs(config: Path) -> tuple[Need, ...]:
    """The alternatives on the `# GPU memory:` line of a recipe's config; empty if there is no such line."""
    line = re.search(r"^# GPU memory:(.*)$", config.read_text(), flags=re.MULTILINE)
    if line is None:
        return ()
    needs = tuple(Need(int(n), float(gb)) for n, gb in re.findall(r"(\d+) x (\d+(?:\.\d+)?) GB", line[1]))
    if not needs:
        raise UserError(f"{config}: cannot read '{line[0]}' (legal: '# GPU memory: 1 x 96 GB, or 2 x 80 GB')")
    return needs


def gpu_shortage(needs: tuple[Need, ...], memory_gb: list[float]) -> str | None:
    """Why GPUs of these sizes are too few or too small, or None if one alternative is met."""
    if not needs:
        return None
    if any(sum(gb >= need.gb for gb in memory_gb) >= need.gpus for need in needs):
        return None
    have = ", ".join(f"{gb:.0f} GB" for gb in memory_gb) or "no GPU"
    return f"the real model needs GPU memory of {' or '.join(map(str, needs))}; here: {have}"


def weights_shortage(name: str | None) -> str | None:
    """Why weights cannot be had, or None: a folder holds them, the cache does, or the hub answers."""
    if name is None:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return (
            None if weights_complete(folder) else f"the folder {folder.resolve()} holds no complete weights"
        )
    if (missing := missing_folder(name)) is not None:
        return f"load_from_pretrained_path={name}: {missing}"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return f"load_from_pretrained_path={name} is neither a folder here nor a name on the hub"

    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        if weights_complete(Path(snapshot_download(name, local_files_only=True))):
            return None
    except (OSError, HFValidationError):  # not in the cache
        pass
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except OfflineModeIsEnabled:
        return f"the weights of {name} are not on disk, and the hub is switched off (HF_HUB_OFFLINE)"
    except HfHubHTTPError as error:
        return (
            f"the weights of {name} are not on disk, and the hub refuses them ({error.response.status_code})"
        )
    except Exception as error:  # whatever the HTTP client raises without a network: the hub does not answer
        return f"the weights of {name} are not on disk, and the hub does not answer ({type(error).__name__})"
    return None


def weights_complete(folder: Path) -> bool:
    """Whether a folder holds a config and all safetensors files that its index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all(
            (folder / file).is_file() for file in set(json.loads(index.read_text())["weight_map"].values())
        )
    return (folder / "model.safetensors").is_file()


def choose(wanted: str, shortage: str | None, ngpu: int, num_gpus: int) -> Choice:
    """The preset and the number of processes; `shortage` is why `full` cannot run here, ngpu 0 means unset.

    Raises UserError for an unknown preset, a `full` that cannot run, and more processes than GPUs.
    """
    if wanted not in PRESETS:
        raise UserError(f"PRESET={wanted}: unknown preset (legal: {', '.join(PRESETS)})")
    if num_gpus and ngpu > num_gpus:
        raise UserError(f"NGPU={ngpu}: this machine has {num_gpus} GPUs (legal: 1 to {num_gpus}, or unset)")
    if wanted == "full" and shortage:
        raise UserError(f"PRESET=full cannot run: {shortage}")
    if wanted == "smoke":
        return Choice("smoke", ngpu or 1, "asked for")
    if shortage:
        return Choice("smoke", ngpu or 1, shortage)
    reason = "asked for" if wanted == "full" else "the GPU memory and the weights are there"
    return Choice("full", ngpu or max(num_gpus, 1), reason)


def split_arguments(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Extra `--config` files and `key=value` overrides among the arguments meant for the training command."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", action="append", default=[], type=Path)
    known, rest = parser.parse_known_args(arguments)
    return known.config, [argument for argument in rest if not argument.startswith("-")]


def only_sample_data(job: Job) -> bool:
    """Whether every training source of a job lies in a generated sample folder."""
    return all((Path(entry.path).parent / SAMPLE_MARKER).is_file() for entry in job.dataset.datasets)


def gpu_memory_gb() -> list[float]:
    """Memory of each visible GPU in 10^9 bytes."""
    import torch

    return [torch.cuda.get_device_properties(i).total_memory / 1e9 for i in range(torch.cuda.device_count())]


def decide(recipe: Path, wanted: str, ngpu: int, arguments: list[str]) -> Choice:
    """The choice for a recipe folder; its configuration has been read, and is good."""
    from lmms_engine.config import load_job

    extra, overrides = split_arguments(arguments)

    def job(preset: str) -> Job:
        overlay = [recipe / "smoke.yaml"] if preset == "smoke" else []
        return load_job([recipe / "config.yaml", *overlay, *extra], overrides)

    memory = gpu_memory_gb()
    shortage = None
    if wanted in ("auto", "full"):
        shortage = gpu_shortage(read_needs(recipe / "config.yaml"), memory[: ngpu or None])
        shortage = shortage or weights_shortage(job("full").model.load_from_pretrained_path)
    choice = choose(wanted, shortage, ngpu, len(memory))
    chosen = job(choice.preset)
    if choice.preset == "full" and only_sample_data(chosen):
        note = "; the config names no data of yours, so it trains on the sample data"
        choice = replace(choice, reason=choice.reason + note)
    return choice


def main(argv: list[str] | None = None) -> int:
    """Print `<preset> <processes>`; the reason, or what is wrong, goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m lmms_engine.launch.preset")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--ngpu", default="0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    try:
        if not given.ngpu.isdecimal():
            raise UserError(f"NGPU={given.ngpu}: give a number of processes, or leave it unset")
        choice = decide(given.recipe, given.preset, int(given.ngpu), given.arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"preset {choice.preset}: {choice.reason}", file=sys.stderr)
    print(choice.preset, choice.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
