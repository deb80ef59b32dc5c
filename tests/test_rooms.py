"""The rooms of ARCHITECTURE.md: each imports only from those above it."""

import ast
import pathlib

import keras_distribute as kd

PACKAGE = pathlib.Path(kd.__file__).parent
ROOMS = [
    "errors",
    "threads",
    "checks",
    "types",
    "_compat",
    "devices",
    "config",
    "context",
    "values",
    "cluster",
    "remote",
    "variables",
    "run",
    "consistency",
    "checkpoint",
    "input",
    "summary",
    "tpu",
    "launch",
    "servers",
    "scheduling",
    "strategies",
    "coordinator",
    "testing",
    "training",
    "dry_run",
    "batch_size",
    "callbacks",
    "nn",
    "cluster_resolver",
    "experimental",
    "compat",
    "commands",
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


def name_of(path: pathlib.Path) -> str:
    """The name of a module in the package, such as `values.reductions`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__main__",):  # As `__init__.py`, in no room of its own.
        return ""
    return ".".join(parts).removesuffix("__init__").strip(".")


def imports_of(path: pathlib.Path) -> set[str]:
    """The package's modules that a file imports, also those for type checking alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        package, _, base = node.module.partition(".")
        if package != "keras_distribute":
            continue
        for alias in node.names:
            inner = f"{base}.{alias.name}".strip(".")
            place = PACKAGE / inner.replace(".", "/")
            is_module = place.with_suffix(".py").exists() or place.is_dir()
            found.add(inner if is_module else base)
    return found


def test_rooms_import_from_rooms_above():
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        module = name_of(path)
        own = room_of(module)
        offenders += [
            f"{module} imports {other}"
            for other in imports_of(path)
            if room_of(other) > own
        ]
    assert offenders == []


def test_no_files_import_each_other():
    graph = {name_of(path): imports_of(path) for path in PACKAGE.rglob("*.py")}
    graph = {name: others - {name, ""} for name, others in graph.items() if name}
    left = dict(graph)
    while True:  # Files all of whose imports are out of the way are in no circle.
        done = [name for name, others in left.items() if not others & left.keys()]
        if not done:
            break
        for name in done:
            del left[name]
    assert sorted(left) == []


def test_few_files_are_in_no_room():
    assert len(list(PACKAGE.glob("*.py"))) <= 10


def test_the_page_names_every_room():
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    table = page[page.index("| room | owns |") :]
    missing = [name for name in ROOMS if name and f"`{name.split('.')[0]}" not in table]
    assert missing == []


def test_functions_fit_on_a_screen():
    """60 lines at most, without those of the docstring."""
    long = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                own = 0 if text is None else text.count("\n") + 1
                lines = node.end_lineno - node.lineno + 1 - own
                if lines > 60:
                    long.append(f"{path.relative_to(PACKAGE)} {node.name}: {lines}")
    assert not long, long
