"""Who may import whom: lower layers never import higher ones, optional packages stay in their files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shipped import RECIPES, is_own

BASE = (
    "errors",
    "registry",
    "segments",
    "folders",
    "compat",
    "config",
    "plugins",
)  # config*: config.py and the files it is split into
SHARED_MODELS = ("models.spec", "models.flops", "models.hf", "models.build", "models.tiny")

# Package or module of lmms_engine -> what of lmms_engine it may import. The first match counts.
# Imports for type checkers alone are exempt: they make no dependency at run time.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((name, BASE) for name in BASE),
    ("datasets", (*BASE, "datasets")),
    ("kernels", (*BASE, "kernels")),
    ("parallel", (*BASE, "parallel")),
    ("objectives", (*BASE, "datasets", "kernels", "parallel", "objectives")),
    ("optim", (*BASE, "datasets", "kernels", "parallel", "optim")),
    *((name, (*BASE, "datasets", "kernels", "parallel", *SHARED_MODELS)) for name in SHARED_MODELS),
    ("train", (*BASE, "datasets", "kernels", "parallel", "objectives", "optim", "models", "train")),
)
FAMILY = (*BASE, "datasets", "kernels", *SHARED_MODELS)  # models/<m>, besides its own folder
TOP = ("commands", "cli", "launch", "__main__")  # these may import everything
DATA_PREP = ("errors", "registry", "segments", "datasets", "models.spec", "models.build", "config")

# Third-party packages that the lowest layer may use.
BASE_THIRD_PARTY = {"pydantic", "yaml", "torch"}

# Optional package -> the only files that may import it.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "flash_attn": ("lmms_engine/kernels/attention.py",),
    "liger_kernel": ("lmms_engine/kernels/liger.py", "lmms_engine/kernels/loss_head.py"),
    "deepspeed": ("lmms_engine/train/backend/deepspeed.py",),
    "fla": ("lmms_engine/kernels/linear_attention.py", "lmms_engine/models/linear_attention/"),
    "wandb": ("lmms_engine/train/tracker.py",),
    "datatrove": ("data_prep/executors.py",),
}
# Modules inside transformers, whose names may change with any release.
PRIVATE_TRANSFORMERS = (
    "lmms_engine/models/hf.py",
    "lmms_engine/kernels/attention.py",
    "lmms_engine/kernels/experts.py",
)


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of everything a module imports at run time, also inside functions.

    `from a import b` yields both a.b and a, since b may be a module; package: the module's own package.
    """
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name equals one of the prefixes or lies below it."""
    if module.startswith("config_"):
        module = "config"
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def allowed_for(module: str) -> tuple[str, ...] | None:
    """What a module of lmms_engine (dotted, without that name) may import of it; None: everything."""
    if module == "" or within(module, TOP):
        return None
    for prefix, allowed in LAYERS:
        if within(module, (prefix,)):
            return allowed
    if module.startswith("models."):
        return (*FAMILY, ".".join(module.split(".")[:2]))
    return BASE


def module_of(path: Path) -> str:
    """Dotted name of a file: lmms_engine/train/step.py -> lmms_engine.train.step."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def violations(path: Path, source: str) -> list[str]:
    """The imports of one file of lmms_engine or data_prep that its layer does not allow."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    inside = module.removeprefix("lmms_engine").lstrip(".")
    allowed = DATA_PREP if path.parts[0] == "data_prep" else allowed_for(inside)
    found = []
    for line, name in imports(source, package):
        if name.startswith("data_prep") and path.parts[0] == "lmms_engine":
            found.append(f"{path}:{line}: the engine imports {name}")
        if not name.startswith("lmms_engine.") or allowed is None:
            continue
        target = name.removeprefix("lmms_engine.")
        if target == "__version__":
            continue
        if not within(target, allowed):
            found.append(f"{path}:{line}: imports lmms_engine.{target} (allowed: {', '.join(allowed)})")
    return found


def python_files(repo: Path, *folders: str) -> list[Path]:
    found = (path.relative_to(repo) for folder in folders for path in (repo / folder).rglob("*.py"))
    return sorted(path for path in found if not is_own(path))


def test_layers(repo: Path) -> None:
    found = []
    for path in python_files(repo, "lmms_engine", "data_prep"):
        found += violations(path, (repo / path).read_text())
    assert not found, "\n".join(found)


def test_base_uses_few_packages(repo: Path) -> None:
    import sys

    for path in sorted((repo / "lmms_engine").glob("*.py")):
        if within(path.stem, BASE):
            used = {module.split(".")[0] for _, module in imports(path.read_text(), "lmms_engine")}
            foreign = used - set(sys.stdlib_module_names) - {"lmms_engine"} - BASE_THIRD_PARTY
            assert not foreign, f"{path}: imports {foreign}"


def test_schema_needs_no_torch(repo: Path) -> None:
    """`data-prep convert` starts at once: the row format and the package's front door import no torch."""
    import subprocess
    import sys

    code = "import sys, lmms_engine.datasets.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo, check=False).returncode == 0


def test_optional_packages_stay_in_their_files(repo: Path) -> None:
    found = []
    for path in python_files(repo, "lmms_engine", "data_prep", "recipes"):
        package = module_of(path).rpartition(".")[0]
        for line, name in imports((repo / path).read_text(), package):
            homes = OPTIONAL.get(name.split(".")[0])
            if homes is not None and not str(path).startswith(homes):
                found.append(f"{path}:{line}: imports {name} (only in {', '.join(homes)})")
    assert not found, "\n".join(found)


def test_private_transformers_modules_stay_in_their_files(repo: Path) -> None:
    found = []
    for path in python_files(repo, "lmms_engine", "data_prep", "recipes"):
        if str(path) in PRIVATE_TRANSFORMERS:
            continue
        for line, name in imports((repo / path).read_text(), module_of(path).rpartition(".")[0]):
            if name.startswith("transformers.") and name.count(".") > 1:
                found.append(f"{path}:{line}: imports {name} (only in {', '.join(PRIVATE_TRANSFORMERS)})")
    assert not found, "\n".join(found)


def test_prepare_builds_on_data_prep_alone() -> None:
    for path in (recipe / "prepare.py" for recipe in RECIPES):
        used = {name for _, name in imports(path.read_text(), "")}
        assert not [name for name in used if name.startswith("lmms_engine")], f"{path}: imports the engine"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lmms_engine/datasets/pack.py", "from lmms_engine.train import runner"),
        ("lmms_engine/datasets/pack.py", "from ..kernels.attention import attend"),
        ("lmms_engine/kernels/liger.py", "import lmms_engine.parallel.mesh"),
        ("lmms_engine/models/a/__init__.py", "def load():\n    from lmms_engine.models.b import SPEC"),
        ("lmms_engine/models/a/__init__.py", "from ..b import SPEC"),
        ("lmms_engine/train/step.py", "from lmms_engine import cli"),
        ("lmms_engine/config.py", "from lmms_engine.datasets.schema import Row"),
        ("lmms_engine/train/step.py", "import data_prep.cli"),
        ("data_prep/cli.py", "from lmms_engine.kernels.attention import attend"),
    ],
)
def test_planted_violations_are_seen(path: str, source: str) -> None:
    assert violations(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "lmms_engine/models/a/__init__.py",
            "from .processor import P\nfrom lmms_engine.models.spec import ModelSpec",
        ),
        (
            "lmms_engine/kernels/liger.py",
            "if TYPE_CHECKING:\n    from lmms_engine.models.spec import ModelSpec",
        ),
        ("lmms_engine/cli.py", "from lmms_engine.train.runner import TrainRunner"),
    ],
)
def test_allowed_imports_pass(path: str, source: str) -> None:
    assert not violations(Path(path), source)
