"""Imports run downwards, kernels stand alone, and nobody but one module asks the device or the environment."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Units of jattn from the bottom up: a unit may import those before it, and itself.
UNITS: Sequence[str] = (
    "features modes spec plan cache platforms kernel_sets backends dispatch resolve attend draft sampling combinators "
    "models training loaders serving explain console cli"
).split()
KERNEL_LIBRARIES = {"jax", "numpy"}
CORE_LIBRARIES = KERNEL_LIBRARIES | {"flax"}  # what is installed without extras
DEVICE_QUESTIONS = {"devices", "local_devices", "device_count", "local_device_count", "default_backend", "get_backend"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def sources(package):
    """(dotted name, syntax tree) of each module of a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text(), str(path))


def imports(tree):
    """Dotted name of everything that a module imports, at its top or inside of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            # what the package itself offers comes from above everything
            yield from ("jattn" if node.module == "jattn" else f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree):
    """(names in front, last name) of each attribute access such as jax.lib.devices, and of each name imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
    for name in imports(tree):
        front, _, last = name.rpartition(".")
        yield front, last


JATTN = dict(sources("jattn"))
KERNELS = dict(sources("pallas_kernels"))
EVERY = JATTN | KERNELS


def unit_of(module):
    """The unit of `jattn.unit.part`, "" for the package itself. A package's `cli` is a part of the command."""
    parts = module.split(".")
    return "cli" if parts[-1] == "cli" else "".join(parts[1:2])


def test_the_walk_sees_both_packages_and_every_unit_has_its_place():
    assert len(JATTN) > 50 and len(KERNELS) > 10
    assert {unit_of(module) for module in JATTN} - {""} == set(UNITS)


@pytest.mark.parametrize("module", [module for module in JATTN if unit_of(module)])
def test_imports_of_jattn_run_downwards(module):
    below = set(UNITS[: UNITS.index(unit_of(module))]) | {unit_of(module)}
    for name in imports(JATTN[module]):
        if name.split(".")[0] == "jattn":
            assert unit_of(name) in below, f"{module} imports {name}, which stands above it"


@pytest.mark.parametrize("module", KERNELS)
def test_kernels_import_jax_numpy_and_each_other_only(module):
    roots = {name.split(".")[0] for name in imports(KERNELS[module])}
    if module.endswith(".reference"):
        roots -= {"ml_dtypes"}  # NumPy's narrow types, which come with jax; references serve the tests only
    assert roots <= {"pallas_kernels"} | KERNEL_LIBRARIES | sys.stdlib_module_names


def test_loaders_know_nothing_of_the_rest():
    for module, tree in JATTN.items():
        if unit_of(module) == "loaders":
            ours = {unit_of(name) for name in imports(tree) if name.split(".")[0] in ("jattn", "pallas_kernels")}
            assert ours <= {"loaders"}, module


@pytest.mark.parametrize(
    "module", [m for m in JATTN if unit_of(m) not in ("training", "loaders", "serving", "console", "cli")]
)
def test_attention_alone_needs_no_extra(module):
    roots = {name.split(".")[0] for name in imports(JATTN[module])}
    assert roots <= {"jattn", "pallas_kernels"} | CORE_LIBRARIES | sys.stdlib_module_names


def test_only_detection_asks_which_device_this_is():
    asking = {
        module
        for module, tree in EVERY.items()
        for front, name in attributes(tree)
        if name in DEVICE_QUESTIONS and front.split(".")[0] == "jax"
    }
    assert asking == {"jattn.platforms.detect"}


def test_nothing_reads_the_environment():
    for module, tree in EVERY.items():
        read = {name for front, name in attributes(tree) if name in ENVIRONMENT and front == "os"}
        assert not read, f"{module} reads {read}"


@pytest.mark.parametrize(
    ("source", "front", "name"),
    [
        ("import jax\njax.devices()", "jax", "devices"),
        ("from jax import default_backend", "jax", "default_backend"),
        ("def f():\n    import os\n    return os.environ['X']", "os", "environ"),
        ("from os import getenv as g", "os", "getenv"),
    ],
)
def test_the_walk_would_see_it(source, front, name):
    assert (front, name) in set(attributes(ast.parse(source)))
