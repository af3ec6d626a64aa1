"""The recipes that come with the repository; other folders of recipes/ are a user's, and held to no rule."""

from __future__ import annotations

from pathlib import Path

from lmms_engine.models.spec import MODELS

REPO = Path(__file__).resolve().parents[1]
# A recipe that is shipped has the name of its model family.
RECIPES = sorted(path for path in (REPO / "recipes").iterdir() if path.is_dir() and path.name in MODELS)
PAGES = [REPO / "recipes/README.md", *sorted(page for recipe in RECIPES for page in recipe.rglob("*.md"))]


def is_own(path: Path) -> bool:
    """Whether a path, relative to the repository, lies in a recipe of the user's."""
    in_recipe = len(path.parts) > 2 and path.parts[0] == "recipes"
    return in_recipe and not path.parts[1].startswith("_") and path.parts[1] not in MODELS


def not_shipped(folder: str, names: list[str]) -> set[str]:
    """What shutil.copytree of recipes/ is to leave out: the user's recipes, and caches."""
    inside = Path(folder).resolve().relative_to(REPO)
    return {name for name in names if name == "__pycache__" or is_own(inside / name / "file")}
