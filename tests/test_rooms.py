"""The rooms of ARCHITECTURE.md: each imports only from those above it."""

import ast
import pathlib

import keras_distribute as kd

PACKAGE = pathlib.Path(kd.__file__).parent
ROOMS = [
    "errors",
    "checks",
    "encoding",
    "types",
    "timing",
    "dropped",
    "_compat",
    "launches",
    "config",
    "mesh",
    "placement",
    "cluster",
    "tpu",
    "structures",
    "told",
    "values",
    "context",
    "input",
    "cross_device",
    "collectives",
    "replica_context",
    "variables",
    "summary",
    "checkpoint",
    "call",
    "replication",
    "expressions",
    "ragged",
    "tracing",
    "program",
    "strategies.extended",
    "strategies.base",
    "strategies",
    "training",
    "dry_run",
    "preemption",
    "callbacks",
    "nn",
    "testing",
    "notebook",
    "launch",
    "cluster_resolver",
    "experimental",
    "_install",
    "",
]


def room_of(module: str) -> int:
    """The place of the room that a module of the package belongs to."""
    names = [
        name
        for name in ROOMS
        if name and (module == name or module.startswith(f"{name}."))
    ]
    assert names or not module, f"{module} is in no room"
    return ROOMS.index(max(names, key=len)) if module else len(ROOMS) - 1


def imports_of(path: pathlib.Path) -> set[str]:
    """The package's modules that a file imports when it runs; imports for type checking
    alone do not count.
    """
    tree = ast.parse(path.read_text())
    checked_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.ImportFrom)
            or node in checked_only
            or not node.module
        ):
            continue
        parts = node.module.split(".")
        if parts[0] != "keras_distribute":
            continue
        base = ".".join(parts[1:])
        for alias in node.names:
            inner = f"{base}.{alias.name}".strip(".")
            is_module = (PACKAGE / (inner.replace(".", "/") + ".py")).exists() or (
                PACKAGE / inner.replace(".", "/")
            ).is_dir()
            found.add(inner if is_module else base)
    return found


def test_rooms_import_from_rooms_above():
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        module = (
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            .removesuffix("__init__")
            .strip(".")
        )
        own = room_of(module)
        offenders += [
            f"{module} imports {other}"
            for other in imports_of(path)
            if room_of(other) > own
        ]
    assert offenders == []


def test_the_page_names_every_room():
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    table = page[page.index("| room | owns |") :]
    missing = [name for name in ROOMS if name and f"`{name.split('.')[0]}" not in table]
    assert missing == []
