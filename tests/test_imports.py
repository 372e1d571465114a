"""The direction of imports: headrace -> {ingress, workers, controller} -> shared, and what else keeps the parts apart."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["headrace", "ingress", "workers", "controller", "shared"]
MAY_IMPORT = {
    "shared": {"shared"},
    "ingress": {"ingress", "shared"},
    "workers": {"workers", "shared"},
    "controller": {"controller", "shared"},
    "headrace": set(PACKAGES),
}
LINES_MAX = 600  # of a module; most stay under 250

# A library, and the only modules that may know it. The rest of the system goes through those.
ONLY = {
    "nats": {"shared/bus.py"},
    "nkeys": {"shared/nkey.py"},
    "minio": {"shared/objects.py"},
    "kubernetes_asyncio": {"controller/scalers/kubernetes_api.py"},
}
# Policy stays free of the libraries that would tie it to one process or machine.
NEVER = {
    "workers/engine/": {"nats", "shared.bus", "shared.pull", "shared.keyvalue", "shared.streams"},
    "workers/engine/scheduler.py": {"torch", "transformers"},
    "workers/engine/blocks.py": {"torch", "transformers"},
    "workers/engine/sim.py": {"torch", "transformers"},
    "shared/requester.py": {"shared.bus", "asyncio", "fastapi", "starlette"},
    "shared/received.py": {"shared.bus", "asyncio"},
    "workers/claims.py": {"shared.bus", "asyncio"},
    "workers/jobs.py": {"shared.bus", "asyncio"},
    "controller/autoscaler.py": {"shared.bus", "asyncio"},
    "shared/router.py": {"shared.bus", "asyncio"},
    "shared/": {"torch", "fastapi"},
    "ingress/": {"torch", "transformers"},
    "controller/": {"torch", "transformers"},
}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function, with `from a import b` as a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_downwards(package: str) -> None:
    files = files_of(package)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports_of(path)
        if (top := name.split(".")[0]) in PACKAGES and top not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_known_to_its_own_module_only(library: str) -> None:
    known = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in files_of(package)
        for name in imports_of(path)
        if name.split(".")[0] == library
    }
    assert known == ONLY[library]


@pytest.mark.parametrize("where", NEVER)
def test_what_must_stay_free_of_a_library_is(where: str) -> None:
    target = ROOT / where
    files = [target] if where.endswith(".py") else sorted(target.rglob("*.py"))
    assert files
    assert all(path.exists() for path in files), f"{where} has moved: correct this test"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports_of(path)
        if any(name == banned or name.startswith(banned + ".") for banned in NEVER[where])
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_stay_small(package: str) -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files_of(package)}
    assert {path: lines for path, lines in lengths.items() if lines > LINES_MAX} == {}
