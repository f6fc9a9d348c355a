"""The package as a whole: imports point one way, importing it is quick, nothing prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import csl_hf

PACKAGE = Path(csl_hf.__file__).parent
# Leaves hold formulas and plain types: they may use each other's types and nothing above them.
LEAVES = {"configuration", "losses", "virtual_augmentation", "distributed", "arguments", "modeling", "objectives"}
LEAF_IMPORTS = LEAVES | {"augmentation"}
# What each layer may not import, from the bottom up.
FORBIDDEN = {
    "data": {"trainer", "recipe", "export", "evaluation", "model_card", "modeling"},
    "evaluation": {"trainer", "recipe", "export", "model_card", "modeling"},
    "export": {"trainer", "recipe", "evaluation", "model_card"},
    "checkpoints": {"trainer", "recipe"},
    "model_card": {"trainer"},
    "trainer": {"recipe", "model_card", "output_folder"},
    "output_folder": {"recipe", "model_card", "trainer"},
}


def modules() -> dict[str, set[str]]:
    """Module (without `csl_hf.`) -> modules of csl_hf that it imports outside `if TYPE_CHECKING`."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing_only = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in ast.walk(node)
        }
        imports = {
            node.module.removeprefix("csl_hf.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("csl_hf.")
            if id(node) not in typing_only
        }
        found[name] = imports
    return found


def test_leaves_import_only_leaves():
    found = modules()
    assert found.keys() >= LEAVES
    for leaf in LEAVES:
        assert {name.split(".")[0] for name in found[leaf]} <= LEAF_IMPORTS, leaf


def test_imports_point_one_way():
    for name, imports in modules().items():
        forbidden = FORBIDDEN.get(name.split(".")[0], set())
        assert not {imported.split(".")[0] for imported in imports} & forbidden, name


def test_importing_the_package_loads_nothing_heavy():
    heavy = ["torch", "transformers", "datasets", "spacy", "sklearn", "matplotlib", "sentence_transformers"]
    code = f"import csl_hf, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_losses_need_no_optional_library():
    code = (
        "import csl_hf.losses, csl_hf.virtual_augmentation, sys; "
        "print([n for n in ('transformers', 'datasets', 'sentence_transformers') if n in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_public_names_exist():
    for name in csl_hf.__all__:
        assert getattr(csl_hf, name).__doc__, name
    assert set(csl_hf.__all__) <= set(dir(csl_hf))


def test_the_package_does_not_print():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), path
