"""Names in back-ticks exist: in READMEs, in guides of the site and in docstrings."""

import ast
import builtins
import functools
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [
    path
    for path in (*ROOT.glob("**/*.md"), *(ROOT / ".github").glob("*.md"))
    if not {".venv", "guides", "families", "reference", "node_modules"} & set(path.relative_to(ROOT).parts[:2])
    and path.name != "CHANGELOG.md"  # names from before a change
]
SOURCES = [path for folder in ("nnxmoe", "models", "tests") for path in (ROOT / folder).glob("**/*.py")]
MODULES = [path for path in SOURCES if not path.is_relative_to(ROOT / "tests") and "models" not in path.parts[-3:-1]]
MODULES += list((ROOT / "models").glob("**/*.py"))
# Names of other projects, and of examples.
OTHER = {
    "families/palmoe.py",
    *("PretrainedConfig", "SamplingParams", "dense_matmul", "gmm", "param_scan_axis", "fused_qkv", "fused_mlp"),
    *("padding_idx", "ShardByJaxProcess", "einops", "rearrange", "switch", "jax_num_cpu_devices", "m3"),
    *("PeftTrainer", "DPOTrainer", "GRPOLearner", "rollout_engine", "with_loss_fn", "logical_axis_rules"),
    *("apply_lora_to_model", "role_to_logical_axis_rule"),
}


@functools.cache
def words() -> frozenset[str]:
    """Identifiers and words of string constants in the code, without docstrings and comments."""
    found = set(dir(builtins))
    for path in SOURCES:
        if path.name == Path(__file__).name:
            continue
        text = path.read_text(encoding="utf-8")
        docstrings = {node.value.lineno for node in ast.walk(ast.parse(text)) if is_docstring(node)}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_text = token.type == tokenize.STRING and token.start[0] not in docstrings
            if token.type == tokenize.NAME or is_text:
                found.update(re.findall(r"\w+", token.string))
    for path in ("pyproject.toml", ".ci/run", ".gitignore"):
        found.update(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))
    found.update(word for path in SOURCES for word in re.findall(r"\w+", str(path.relative_to(ROOT))))
    return frozenset(found)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def unknown(texts: Iterator[str]) -> list[str]:
    """Names in back-ticks with a word that no code has, paths that do not exist, and attributes that modules lack."""
    faults = []
    for text in texts:
        if re.fullmatch(r"[\w./-]+/[\w./-]*|[\w-]+\.(py|md|json)", text):
            continue  # `test_paths_exist`
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", text):
            name = text.partition("(")[0]
            if any(part not in words() and part not in OTHER for part in name.rstrip(".").split(".")):
                faults.append(text)
            elif name.startswith("nnxmoe."):
                faults += [] if resolves(name) else [text]
    return faults


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or an attribute of a module or class."""
    parts = name.split(".")
    if (ROOT / "/".join(parts)).with_suffix(".py").exists():  # it may import an optional dependency
        return True
    for i in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
                return False
            value = getattr(value, part, None)
        return True
    return False


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_guides_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    names = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    assert not unknown(iter(names)), path
    for name in names:
        if re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|md|json|toml)", name) and "<" not in name:
            places = (ROOT, ROOT / "nnxmoe", path.parent)
            assert name in OTHER or any((place / name).exists() for place in places), (path, name)


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in MODULES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_names_in_docstrings_exist(folder: Path) -> None:
    """Names of this project have single back-ticks, code has double ones."""
    faults = {}
    for path in (path for path in MODULES if path.parent == folder):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        docstrings = [node.value.value for node in nodes if is_docstring(node)]
        names = (name for text in docstrings for name in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))
        faults |= {str(path): found} if (found := unknown(names)) else {}
    assert not faults
