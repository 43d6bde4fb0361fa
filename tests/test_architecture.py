"""Imports go downward, heavy packages stay in their rooms, and ``import simpar`` is light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "simpar"

# From the bottom to the top: a module may import from its own level and from those before it.
LEVELS = [
    ("simpar.units", "simpar.errors", "simpar.problems", "simpar.reading"),
    ("simpar.description",),
    ("simpar.model.work",),
    ("simpar.trace.trace",),
    ("simpar.model", "simpar.hardware", "simpar.schedule", "simpar.trace", "simpar.framework"),
    ("simpar.cost",),
    ("simpar.faults",),
    ("simpar.plan",),
    ("simpar.program",),
    ("simpar.engine",),
    ("simpar.economics",),
    ("simpar.job", "simpar.result", "simpar.simulation"),
    ("simpar.sensitivity",),
    ("simpar.uncertainty",),
    ("simpar.whatif",),
    ("simpar.search", "simpar.validation"),
    ("simpar.reliability", "simpar.convergence"),
    ("simpar.view", "simpar.cli", "simpar.__main__"),
]
# Readers and views, which a result offers as methods: imported inside those, so that nobody pays who does not ask.
OFFERED = {
    ("simpar.result", "simpar.view.compare"),
    ("simpar.result", "simpar.view.timeline"),
    ("simpar.result", "simpar.view.views"),
    ("simpar.result", "simpar.uncertainty"),
    ("simpar.trace.trace", "simpar.trace.export"),
}

TRACING = {"simpar.model.tracing", "simpar.model.operators", "simpar.model.fused"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """What a module imports, and whether only when a function runs; type checkers' imports count as such."""

    def visit(node: ast.AST, *, lazy: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                assert child.level == 0, "imports are absolute"
                yield child.module, lazy
                yield from ((f"{child.module}.{alias.name}", lazy) for alias in child.names)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from visit(child, lazy=lazy or inside or for_types)

    yield from visit(tree, lazy=False)


MODULES = dict(modules())


def level(name: str) -> int:
    """The level of a module: that of the longest prefix that is listed."""
    found = [
        (len(room), number)
        for number, rooms in enumerate(LEVELS)
        for room in rooms
        if name == room or name.startswith(f"{room}.")
    ]
    assert found, f"{name} is in no level; put it into LEVELS"
    return max(found)[1]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "simpar"])
def test_imports_go_downward(name):
    for imported, lazy in imports(MODULES[name]):
        if imported in MODULES and imported != "simpar" and not (lazy and (name, imported) in OFFERED):
            assert level(imported) <= level(name), f"{name} imports {imported}, which lies above it"


def test_no_two_rooms_of_a_level_import_each_other():
    rooms = {
        name: next(r for r in sorted(LEVELS[level(name)], key=len, reverse=True) if name.startswith(r))
        for name in MODULES
        if name != "simpar"
    }
    edges = {
        (rooms[name], rooms[imported])
        for name in rooms
        for imported, lazy in imports(MODULES[name])
        if imported in rooms and rooms[name] != rooms[imported] and not lazy
    }
    assert not [edge for edge in edges if edge[::-1] in edges]


def users(package: str, *, lazy: bool | None = None) -> set[str]:
    return {
        name
        for name, tree in MODULES.items()
        for imported, later in imports(tree)
        if imported.split(".")[0] == package and lazy in (None, later)
    }


def test_torch_is_imported_by_the_tracing_of_modules_only():
    assert users("torch", lazy=False) <= TRACING
    assert users("torch") <= TRACING | {"simpar.model.module"}


def test_tracing_is_imported_when_a_module_is_traced_only():
    eager = {
        name for name, tree in MODULES.items() for imported, lazy in imports(tree) if imported in TRACING and not lazy
    }
    assert eager <= TRACING


def test_simpy_is_the_engine_s_and_that_of_runs_of_days():
    assert {name.rpartition(".")[0] for name in users("simpy")} == {"simpar.engine", "simpar.reliability"}


def test_plotly_is_the_view_s():
    assert {name for name in users("plotly", lazy=False) if not name.startswith("simpar.view.")} == set()
    assert {name for name in users("plotly") if not name.startswith("simpar.view.")} <= {"simpar.result"}


def test_pandas_is_imported_for_tables_that_somebody_asks_for_only():
    assert users("pandas", lazy=False) == set()
    assert users("pandas") <= {"simpar.search.records", "simpar.search.found", "simpar.search.sweep"}  # two for types


def test_dask_is_imported_where_an_address_is_given_only():
    assert users("distributed", lazy=False) == set()
    assert users("distributed") == {"simpar.search.dask"}


def test_scipy_is_imported_by_the_search_for_placements_only():
    assert users("scipy", lazy=False) == set()
    assert users("scipy") <= {"simpar.search.placement"}


def test_networkx_is_imported_for_custom_graphs_only():
    assert users("networkx", lazy=False) == set()


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "plotly", "pandas", "networkx", "scipy"}


def test_import_simpar_is_light():
    assert not loaded_after("import simpar") & (HEAVY | {"numpy", "pydantic", "simpy"})


def test_simulating_needs_nothing_heavy():
    statement = "import simpar; simpar.simulate({'model': 'gpt2', 'cluster': 'h100-sxm:8'})"
    assert not loaded_after(statement) & HEAVY
