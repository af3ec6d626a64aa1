"""Every recipe that is shipped is complete, names no recipe, and starts the same way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmms_engine.launch.preset import read_needs
from lmms_engine.models.spec import MODELS
from tests.shipped import RECIPES, is_own, not_shipped

REPO = Path(__file__).resolve().parents[2]
FILES = ("README.md", "config.yaml", "smoke.yaml", "prepare.py", "launch.sh", "expected.json")
HEADINGS = ("## Machine", "## Data", "## Run", "## Expected numbers", "## Time and cost")


def test_every_model_family_has_a_recipe() -> None:
    assert {path.name for path in RECIPES} == set(MODELS)


def test_a_recipe_of_the_users_is_told_from_a_shipped_one() -> None:
    assert is_own(Path("recipes/mine/config.yaml"))
    assert not is_own(Path("recipes/qwen3_vl/config.yaml"))
    assert not is_own(Path("recipes/_launch/slurm.sbatch"))
    assert not is_own(Path("recipes/README.md"))
    assert not is_own(Path("docs/mine/config.yaml"))
    names = ["mine", "sit", "_launch"]
    assert not_shipped(str(REPO / "recipes"), names) == {"mine"}
    assert not_shipped(str(REPO / "recipes/sit"), ["__pycache__", "config.yaml"]) == {"__pycache__"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
class TestRecipe:
    def test_has_every_file(self, recipe: Path) -> None:
        missing = [name for name in FILES if not (recipe / name).is_file()]
        assert not missing, f"{recipe.name} lacks {missing}"

    def test_readme_headings(self, recipe: Path) -> None:
        lines = (recipe / "README.md").read_text().splitlines()
        assert [line for line in lines if line.startswith("## ")][: len(HEADINGS)] == list(HEADINGS)

    def test_states_its_gpu_memory(self, recipe: Path) -> None:
        assert read_needs(recipe / "config.yaml")

    def test_launcher(self, recipe: Path) -> None:
        """One text for all recipes, so that a mended launcher is mended everywhere."""
        text = (recipe / "launch.sh").read_text()
        assert text == (RECIPES[0] / "launch.sh").read_text(), f"differs from {RECIPES[0].name}/launch.sh"
        lines = text.splitlines()
        assert len(lines) <= 30
        assert "set -euo pipefail" in lines
        code = [line for line in lines if line and not line.lstrip().startswith("#")]
        last = next(number for number, line in enumerate(code) if line.startswith("exec torchrun "))
        assert all(line.endswith("\\") for line in code[last:-1]), "something follows exec torchrun"
        for name in ("PRESET", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM", "NGPU", "FRESH"):
            assert name in text
        assert 'prepare.py" --if-missing' in text
        assert "flock" in text

    def test_names_no_recipe(self, recipe: Path) -> None:
        """A copy works unedited: no file refers to the folder that it lies in."""
        for name in ("config.yaml", "smoke.yaml", "prepare.py", "launch.sh"):
            text = (recipe / name).read_text()
            for other in RECIPES:
                found = re.findall(rf"(?:recipes|runs)/{re.escape(other.name)}\b", text)
                assert not found, f"{recipe.name}/{name} names {found}"


def test_the_table_lists_every_recipe() -> None:
    for page in ("README.md", "recipes/README.md"):
        text = (REPO / page).read_text()
        for recipe in RECIPES:
            assert re.search(rf"\|[^|\n]*\b{recipe.name}\b[^\n]*\|", text), (
                f"{page} has no row for {recipe.name}"
            )
