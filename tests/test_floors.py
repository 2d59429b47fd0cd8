"""Which modules may import which: never upward, never in a circle; the ground needs no JAX."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Packages, and modules beside them, lowest first: each may import those below it and itself.
ORDER = (
    "mtx", "mtx.errors", "mtx.fields", "mtx.sizes", "mtx.paths", "mtx.files", "mtx.schedules",
    "mtx.sharding", "mtx.strand", "mtx.vjp", "mtx.layers", "mtx.huggingface", "mtx.optimizers",
    "mtx.families", "mtx.config", "mtx.costs", "mtx.presets", "mtx.data", "mtx.plan",
    "mtx.pipeline", "mtx.step", "mtx.launch", "mtx.checkpoint", "mtx.compile",
    "mtx.conversion", "mtx.evaluation", "mtx.certify", "mtx.train", "mtx.api", "mtx.view",
    "mtx.cli", "mtx.__main__", "experiments",
)  # fmt: skip
# These do not know each other, whatever their order.
STRANGERS = [
    ("mtx.pipeline", "mtx.layers"), ("mtx.pipeline", "mtx.families"),
    ("mtx.launch", "mtx.pipeline"), ("mtx.launch", "mtx.step"), ("mtx.launch", "mtx.layers"),
    ("mtx.checkpoint", "mtx.layers"),
]  # fmt: skip
JAX = ("jax", "jaxlib", "flax", "optax", "orbax")
NEEDS_NO_JAX = (
    "mtx.errors", "mtx.fields", "mtx.sizes", "mtx.paths", "mtx.files", "mtx.schedules",
    "mtx.optimizers", "mtx.families", "mtx.config", "mtx.presets", "mtx.data", "mtx.plan",
    "mtx.sharding.axes", "mtx.layers.kernels", "mtx.huggingface", "mtx.costs.cost",
    "mtx.costs.ask",
)  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    name_of(path): path
    for folder in ("mtx", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(source: str, module: str, *, package: bool = False, lazy: bool = True) -> set[str]:
    """Names that `source` of `module` imports, "module.name" for `from module import name`.

    Without `lazy`, only imports that run when the module is imported.
    """
    found = set()
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not lazy:
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: (1 if package else 0) - node.level or None]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))
    return found


def imports_of(module: str, *, lazy: bool = True) -> set[str]:
    path = FILES[module]
    return imports(path.read_text(), module, package=path.name == "__init__.py", lazy=lazy)


def own_modules(imported: set[str]) -> set[str]:
    """The files of this project among the imported names."""
    own = set()
    for name in imported:
        while name and name not in FILES:
            name = name.rpartition(".")[0]
        if name:
            own.add(name)
    return own


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def package_of(module: str) -> str | None:
    """The longest name of `ORDER` that contains the module."""
    return max((name for name in ORDER if within(module, name)), key=len, default=None)


GROUND = [name for name in FILES if any(within(name, prefix) for prefix in NEEDS_NO_JAX)]


def test_imports_are_found():
    source = (
        "import jax.numpy as jnp\nfrom . import near\nfrom ..far import thing\n"
        "from mtx.plan import time\ntry:\n    import grain\nexcept ImportError:\n    pass\n"
        "if TYPE_CHECKING:\n    import typed\ndef f():\n    import lazy.inner\n"
    )
    now = {"jax.numpy", "mtx.data.near", "mtx.far.thing", "mtx.plan.time", "grain"}
    assert imports(source, "mtx.data.loader", lazy=False) == now
    assert imports(source, "mtx.data.loader") == now | {"typed", "lazy.inner"}
    assert "mtx.data.loader.near" in imports(source, "mtx.data.loader", package=True)
    assert "mtx.errors" in own_modules(imports_of("mtx.presets"))


def test_every_package_has_its_place():
    packages = {".".join(name.split(".")[:2]) for name in FILES if name.startswith("mtx.")}
    assert packages | {"mtx", "experiments"} == set(ORDER) & (packages | {"mtx", "experiments"})


@pytest.mark.parametrize("module", FILES)
def test_no_import_runs_upward(module):
    """Lazy imports count. A family's `stack` is made of layers, which are below it."""
    for other in own_modules(imports_of(module)):
        one, two = ORDER.index(package_of(module)), ORDER.index(package_of(other))
        assert two <= one, f"{module} imports {other}, which stands above"


@pytest.mark.parametrize("module", FILES)
def test_strangers_stay_strangers(module):
    for one, other in STRANGERS:
        if within(module, one):
            known = [name for name in own_modules(imports_of(module)) if within(name, other)]
            assert not known, f"{module} imports {known}: {one} is to know nothing of {other}"


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_imports_no_jax(module):
    heavy = [name for name in imports_of(module, lazy=False) if name.split(".")[0] in JAX]
    assert not heavy, f"{module} imports {heavy} when it is imported"


def test_there_are_no_circles():
    graph = {module: own_modules(imports_of(module)) - {module} for module in FILES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("imports run in a circle: " + " <- ".join(error.args[1]))


def test_the_ground_can_be_imported_without_loading_jax():
    """Nothing that the ground imports from elsewhere loads JAX either."""
    code = "import sys\n" + "\n".join(f"import {module}" for module in GROUND)
    code += f"\nprint(*sorted({set(JAX)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "loaded with the ground"
