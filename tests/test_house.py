"""Code structure: import direction, what each layer may depend on, and the cost of importing the package."""

import ast
import collections
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from nnxmoe.api import MODULES as MODULES_OF_NAMES
from nnxmoe.models import MODELS
from tests.support.import_graph import sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nnxmoe"

# Packages and modules from the lowest to the highest: each imports lower ones only. A module belongs to the longest
# name that it begins with. No two share a level.
ORDER = (
    "nnxmoe.config",
    "nnxmoe.runtime",
    "nnxmoe.axes",
    "nnxmoe.sharding_rules",
    "nnxmoe.sharding",
    "nnxmoe.mesh",
    "nnxmoe.layers.linear",
    "nnxmoe.layers",
    "nnxmoe.layers.attention",
    "nnxmoe.layers.recurrent",
    "nnxmoe.moe",
    "nnxmoe.model",
    "nnxmoe.models.shared",
    "nnxmoe.models",
    "nnxmoe.convert.files",
    "nnxmoe.convert.gguf",
    "nnxmoe.convert.storage",
    "nnxmoe.model.quantization",
    "nnxmoe.convert.arrays",
    "nnxmoe.convert.formats",
    "nnxmoe.convert.hf",
    "nnxmoe.convert.maxtext",
    "nnxmoe.convert.peft",
    "nnxmoe.convert",
    "nnxmoe.tokenizer",
    "nnxmoe.generation",
    "nnxmoe.train",
    "nnxmoe.linen",
    "nnxmoe.testing",
    "nnxmoe.plot",
    "nnxmoe.apps.serve",
    "nnxmoe.apps.evaluation",
    "nnxmoe.apps.planning",
    "nnxmoe.api",
    "nnxmoe",
    "nnxmoe.apps.cli",
    "nnxmoe.apps",
    "nnxmoe.__main__",
)
LEVELS = {package: level for level, package in enumerate(ORDER)}
MODELS_KNOW = {f"nnxmoe.{name}" for name in ("axes", "config", "layers", "moe", "model", "models")}
# Kernels for accelerators, imported on first use.
ACCELERATOR_KERNELS = {
    "nnxmoe.layers.attention.splash_attention",
    "nnxmoe.layers.recurrent.tokamax_delta",
    "nnxmoe.moe.tokamax",
    "nnxmoe.moe.triton",
}
# Remaining imports of higher packages; do not add any.
UPWARDS: set[tuple[str, str]] = set()


SOURCES = {module: path for module, path in sources().items() if not module.startswith("tests")}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()}


def package_of(module: str) -> str:
    """The entry of `ORDER` that a module belongs to."""
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Modules of the package that a file imports, also inside functions and under TYPE_CHECKING."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in SOURCES else str(node.module))
    return {name for name in found if name == "nnxmoe" or name.startswith("nnxmoe.")}


IMPORTS = {module: imports(path) - {module} for module, path in SOURCES.items()}


def test_packages_import_lower_packages_only() -> None:
    for module, other in {(name, other) for name in SOURCES for other in IMPORTS[name]} - UPWARDS:
        upper, lower = package_of(module), package_of(other)
        assert upper == lower or LEVELS[lower] < LEVELS[upper], f"{module} imports {other}"


def test_every_package_has_a_level_and_no_exception_is_stale() -> None:
    assert set(map(package_of, SOURCES)) <= set(ORDER) and len(LEVELS) == len(ORDER)
    for module, other in UPWARDS:
        assert other in IMPORTS.get(module, ()), f"{module} no longer imports {other}: remove the exception"
        assert LEVELS[package_of(other)] > LEVELS[package_of(module)]


def test_model_families_import_only_building_blocks() -> None:
    for module in SOURCES:
        if module.startswith("nnxmoe.models."):
            assert {".".join(name.split(".")[:2]) for name in IMPORTS[module]} <= MODELS_KNOW, module


def test_no_circular_imports() -> None:
    graph = {name: {other for other in found if (name, other) not in UPWARDS} for name, found in IMPORTS.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done and name in graph:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_kernels_are_not_imported_at_module_level() -> None:
    for module, path in SOURCES.items():
        if module not in {*ACCELERATOR_KERNELS, "nnxmoe.api"}:
            assert not imports(path, top_only=True) & ACCELERATOR_KERNELS, module


def test_layers_do_not_read_the_config() -> None:
    """Layers take plain values; only the model class reads the config."""
    for module in SOURCES:
        for node in ast.walk(TREES[module]) if module.startswith(("nnxmoe.layers", "nnxmoe.moe")) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                assert ast.unparse(node) != "self.config", f"{module}:{node.lineno}"


def test_no_branches_on_model_type() -> None:
    """No branch on ``model_type`` outside ``models/registry.py``."""
    for module, node in ((m, node) for m in SOURCES if m != "nnxmoe.models.registry" for node in ast.walk(TREES[m])):
        if isinstance(node, ast.Compare):
            compared = [
                part for part in (node.left, *node.comparators) if not isinstance(part, ast.Tuple | ast.Constant)
            ]
            assert not any("model_type" in ast.unparse(part) for part in compared), f"{module}:{node.lineno}"
        if isinstance(node, ast.Match):
            assert "model_type" not in ast.unparse(node.subject), f"{module}:{node.lineno}"


def test_files_have_a_docstring() -> None:
    for module, tree in TREES.items():
        assert ast.get_docstring(tree), module


# Names that still occur twice; remove those that become unique, do not add any.
REPEATED_CLASSES: set[str] = set()
REPEATED_FILES: set[str] = set()
MAX_PARAMETERS, MAX_LINES = 10, 60


def test_literals_in_docstrings_are_closed() -> None:
    """A letter directly after the closing backticks makes the build of the site fail."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, tree in TREES.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, documented)):
            rest = re.sub(r"``[^`]+``(?!\w)", "", ast.get_docstring(node) or "")
            assert "``" not in rest, f"{module}, line {node.body[0].lineno}"


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in collections.Counter(names).items() if count > 1}


def test_class_and_file_names_are_unique() -> None:
    """A stack trace or a search leads to one definition."""
    classes = (node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert repeated(classes) == REPEATED_CLASSES
    files = (path.stem for path in SOURCES.values() if path.stem != "__init__")
    assert repeated(files) == REPEATED_FILES


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods, the latter as Class.method."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        yield from functions(node, f"{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def test_functions_are_short_and_take_few_parameters() -> None:
    many, long = set[str](), set[str]()
    for name, node in (found for tree in TREES.values() for found in functions(tree)):
        args = node.args
        count = len(args.posonlyargs + args.args + args.kwonlyargs) + bool(args.vararg) + bool(args.kwarg)
        count -= bool(args.args) and args.args[0].arg in ("self", "cls")
        many |= {name} if count > MAX_PARAMETERS else set()
        long |= {name} if (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES else set()
    assert not many and not long, (many, long)


SMALL = {"nnxmoe", "jax", "jaxtyping", "jinja2", "markupsafe", "safetensors", "tokenizers", "tqdm"}
SMALL |= {"wadler_lindig", "typeguard"}  # imported by jaxtyping, typeguard only if it is installed, as with tokamax
OPTIONAL = {"torch", "transformers", "peft", "compressed_tensors", "xllamacpp", "gguf", "tokamax", "grain", "starlette"}
OPTIONAL |= {
    "uvicorn",
    "msgspec",
    "llguidance",
    "lm_eval",
    "openai",
    "playwright",
    "matplotlib",
    "tensorboardX",
    "wandb",
}
IMPORT = """
import json, sys
import nnxmoe
assert "jax" not in sys.modules
import jax, flax.nnx

def added(names):
    packages = {}
    for name in names:
        before = set(sys.modules)
        getattr(nnxmoe, name)
        new = {module.partition(".")[0] for module in set(sys.modules) - before}
        packages[name] = sorted(new - set(sys.stdlib_module_names))
    return packages

print(json.dumps([added(nnxmoe.api.MODULES), added(nnxmoe._SUBMODULES), len(jax._src.xla_bridge._backends)]))
"""


def test_public_names_import_only_small_libraries() -> None:
    """JAX and Flax aside. Submodules import no optional package; the package itself does not import JAX."""
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    names, submodules, backends = json.loads(done.stdout)
    assert {name: set(added) - SMALL for name, added in names.items() if set(added) - SMALL} == {}
    assert {name: OPTIONAL & set(added) for name, added in submodules.items() if OPTIONAL & set(added)} == {}
    assert backends == 0, "importing initialized a device"


CORE = """
import sys
import nnxmoe
assert nnxmoe.Strategy and nnxmoe.models.Mixtral
print(*sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("nnxmoe.")}))
"""


@pytest.mark.slow
def test_the_core_does_not_import_satellites() -> None:
    """A public name imports its own module; the rest of the package, such as the planner, stays out."""
    done = subprocess.run([sys.executable, "-c", CORE], cwd=ROOT, capture_output=True, text=True, check=True)
    names = "api axes config layers mesh model models moe runtime sharding sharding_rules"
    core = {f"nnxmoe.{name}" for name in names.split()}
    assert set(done.stdout.split()) <= core, done.stdout


LAZY = """
import json, sys
import nnxmoe
assert "jax" not in sys.modules
import nnxmoe.apps.planning
assert nnxmoe.generation and nnxmoe.tokenizer and nnxmoe.apps.planning  # before any public name is used
assert nnxmoe.processes.initialize  # a public name that is a module
assert nnxmoe.CausalLM
before = [name for name in ("orbax", "torch", "transformers", "matplotlib", "tokamax") if name in sys.modules]
listed = dir(nnxmoe)
import pydoc
described = pydoc.render_doc(nnxmoe, renderer=pydoc.plaintext)
for name in ("apps", "convert", "generation", "linen", "plot", "testing", "tokenizer", "train"):
    assert getattr(nnxmoe, name).__name__ == "nnxmoe." + name, name
    assert name in listed, name
assert nnxmoe.runtime.processes.initialize and nnxmoe.moe.tokamax.TokamaxMatmul
assert nnxmoe.convert.maxtext.to_tree and nnxmoe.train.lora.add
assert set(listed) > set(nnxmoe.api.MODULES)
assert all(name in described for name in nnxmoe.api.MODULES)
unwanted = [name for name in ("Any", "importlib", "frozen", "bounds") if name in listed]
try:
    nnxmoe.nonsense
except AttributeError as error:
    print(json.dumps([before, unwanted, str(error)]))
"""


@pytest.mark.commands
def test_submodules_are_attributes_and_load_lazily() -> None:
    """`import nnxmoe` gives access to every public submodule without importing large dependencies."""
    done = subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], [], "module 'nnxmoe' has no attribute 'nonsense'"]


def test_lazy_names_are_those_of_type_checkers() -> None:
    """`nnxmoe.api` lists each public name twice: as an import for type checkers, and in `MODULES`."""
    imports = {}
    for node in ast.walk(ast.parse((ROOT / "nnxmoe" / "api.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nnxmoe"):
            imports |= {alias.name: node.module for alias in node.names}
    assert imports == MODULES_OF_NAMES


LOGGING = """
import logging, sys
import nnxmoe
logger = logging.getLogger("nnxmoe")
assert [type(handler).__name__ for handler in logger.handlers] == []
assert logger.propagate and logger.level == logging.NOTSET
logger.warning("no handler yet")  # reaches stderr through logging.lastResort
logging.basicConfig(filename=sys.argv[1], format="%(name)s %(message)s")
logger.warning("careful")
"""


@pytest.mark.commands
def test_importing_does_not_configure_logging(tmp_path: Path) -> None:
    """Handlers that the program sets up after the import receive the package's warnings, once."""
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", LOGGING, log], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "no handler yet\n", done.stderr
    assert log.read_text() == "nnxmoe careful\n"


POSIX_NAMES = """
import os, signal, sys
import jax, flax.nnx, optax, orbax.checkpoint, tokenizers, huggingface_hub, readline
names = "register_at_fork fork preadv pread sysconf sched_getaffinity getuid O_CLOEXEC killpg".split()
for module, name in [*((os, name) for name in names), (signal, "SIGALRM"), (signal, "setitimer")]:
    if hasattr(module, name):
        delattr(module, name)
for name in ("fcntl", "resource", "readline", "termios", "pwd", "grp"):
    sys.modules[name] = None  # importing it is an ImportError
import nnxmoe
from nnxmoe.apps import cli
from nnxmoe.runtime import launch
for name in dir(nnxmoe):
    getattr(nnxmoe, name)
assert cli.main(["inspect", "llama-3.1-8b"]) == 0
"""


@pytest.mark.commands
def test_importing_does_not_require_posix() -> None:
    """Names that Windows and in part macOS lack are used only if they exist."""
    done = subprocess.run([sys.executable, "-c", POSIX_NAMES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "llama-3.1-8b: llama" in done.stdout, done.stderr


# Tests that give the package unusual values: models and adapters with shapes only, arrays as lists, objects as dicts.
UNUSUAL = """
generation/test_engine.py::test_prompts_and_texts_may_be_arrays_of_ids
train/test_fit.py::test_batches_of_lists_and_objects_with_an_array
linen/test_linen.py::test_model_arguments_and_outputs
train/test_lora.py::test_default_targets_exclude_the_router
convert/test_maxtext.py::test_accepted_tree_formats
model/test_model.py::test_a_generation_config_may_be_a_dict
model/test_model.py::test_models_without_values_raise_when_called
convert/test_native.py::test_saving_a_model_without_values_writes_nothing
convert/test_save.py::test_models_without_values_are_refused
tokenizer/test_text.py::test_messages_of_any_type_reach_the_template_as_plain_values
"""


@pytest.mark.commands
def test_annotations_hold_for_unusual_values() -> None:
    """In every CI run, where of all tests only a part is run with annotations checked."""
    names = [f"tests/{name}" for name in UNUSUAL.split()]
    checks = ["--jaxtyping-packages=nnxmoe,tests.conftest.checked", "--sets=1", "-p", "no:cacheprovider"]
    checks += ["-m", ""]  # slow tests too
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *checks, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_models_folder_cannot_be_imported_directly() -> None:
    """In a checkout ``models/`` would be importable as a second package, with a duplicate of every class."""
    code = "import models"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: import nnxmoe.models, not models" in done.stderr


@pytest.mark.slow
def test_tests_import_only_from_support() -> None:
    """Test files do not import each other: shared helpers are in ``tests/support``."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
                assert not any(re.match(r"tests\.(\w+\.)?test_", name) for name in names), f"{path}:{node.lineno}"


def test_the_table_of_families_is_current() -> None:
    """Every registered family has a row."""
    text = (ROOT / "models" / "README.md").read_text()
    rows = [row.split(" | ") for row in text.partition("| family")[2].partition("\n\n")[0].splitlines()[2:]]
    kinds = [re.findall(r"`(\w+)`", row[0]) for row in rows]
    assert sorted(kind for row in kinds for kind in row) == sorted(MODELS)
