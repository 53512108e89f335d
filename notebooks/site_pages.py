"""Generated pages of the documentation site.

- ``index.md`` and ``guides/``: the READMEs
- ``families/``: one page per model family, from its configs, presets and table of weight names, and one page with the
  decoder types of transformers
- ``reference/``: the public names, for autosummary
- ``llms.txt`` and a Markdown file beside every page
"""

import dataclasses
import importlib
import inspect
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import decoder_types

from nnxmoe import api, models
from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W

ROOT = Path(__file__).resolve().parent.parent
GUIDES = {  # page -> README
    "generation": "nnxmoe/generation/README.md",
    "tokenizer": "nnxmoe/tokenizer/README.md",
    "serve": "nnxmoe/apps/serve/README.md",
    "evaluation": "nnxmoe/apps/evaluation/README.md",
    "training": "nnxmoe/train/README.md",
    "training-data": "nnxmoe/train/data/README.md",
    "training-loop": "nnxmoe/train/loop/README.md",
    "lora": "nnxmoe/train/lora/README.md",
    "conversion": "nnxmoe/convert/README.md",
    "quantization": "nnxmoe/model/quantization/README.md",
    "strategies": "nnxmoe/model/README.md",
    "moe": "nnxmoe/moe/README.md",
    "layers": "nnxmoe/layers/README.md",
    "attention": "nnxmoe/layers/attention/README.md",
    "linen": "nnxmoe/linen/README.md",
    "parity": "nnxmoe/testing/README.md",
    "planning": "nnxmoe/apps/planning/README.md",
    "processes": "nnxmoe/runtime/README.md",
    "families": "models/README.md",
    "adding-a-family": "models/adding_a_family.md",
    "package": "nnxmoe/README.md",
    "tests": "tests/README.md",
    "benchmarks": "tests/benchmarks/README.md",
    "beside-maxtext": "tests/benchmarks/maxtext/README.md",
    "contributing": ".github/CONTRIBUTING.md",
    "security": ".github/SECURITY.md",
    "changelog": "CHANGELOG.md",
}
INDEX = ("how-to/index", "tutorials", "guides/index", "families/index", "reference/index")
# Pages of the reference for attributes of `nnxmoe`: title, and the first folders or modules that define the names.
REFERENCE = {
    "models": ("Models and checkpoints", ("config", "convert", "model.causal_lm", "model.output", "models")),
    "generation": ("Generation and scoring", ("generation", "tokenizer")),
    "strategies": ("Strategies", ("layers", "mesh", "model", "moe", "sharding_rules")),
    "planning": ("Planning and processes", ("apps", "runtime")),
}
MODULES = ("models", "train", "train.lora", "testing", "linen", "convert.maxtext", "plot")


def write_pages(folder: Path) -> None:
    """Write all generated pages into the folder of the site's sources."""
    for name in ("guides", "families", "reference"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    (folder / "index.md").write_text(_guide("README.md", "") + _toctree(INDEX, hidden=True), encoding="utf-8")
    for page, readme in GUIDES.items():
        (folder / "guides" / f"{page}.md").write_text(_guide(readme, "../"), encoding="utf-8")
    _write(folder / "guides" / "index.md", "# Guides", "One guide per folder of the package.", _toctree(GUIDES))
    _write_families(folder / "families")
    _write_decoder_types(folder / "families" / "transformers.md")
    _write_reference(folder / "reference")


def _write(path: Path, *paragraphs: str) -> None:
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def _toctree(pages: Iterable[str], *, hidden: bool = False) -> str:
    option = ":hidden:" if hidden else ":maxdepth: 1"
    return "\n".join(("", "```{toctree}", option, "", *pages, "```", ""))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _guide(readme: str, up: str) -> str:
    """Return the text of a README with links to pages of the site. Links to other files become plain text.

    Args:
        readme: Path of the README from the root of the repository.
        up: Relative path from the page to the root of the site.
    """
    pages = {(ROOT / path).resolve(): f"{up}guides/{page}.md" for page, path in GUIDES.items()}
    pages |= {ROOT / "README.md": f"{up}index.md", ROOT / "notebooks": f"{up}tutorials.md"}
    pages |= {path.resolve(): f"{up}how-to/{path.name}" for path in (ROOT / "notebooks" / "how-to").glob("*.md")}

    def replace(match: re.Match[str]) -> str:
        path = (ROOT / readme).parent.joinpath(match["path"]).resolve()
        page = pages.get(path) or pages.get(path / "README.md")
        if path.suffix in (".ipynb", ".png"):
            page = f"{up}{path.relative_to(ROOT / 'notebooks')}"
        return f"[{match['text']}]({page}{match['anchor'] or ''})" if page else match["text"]

    link = r"\[(?P<text>[^\]]+)\]\((?!https?:|#)(?P<path>[^)#]+)(?P<anchor>#[^)]*)?\)"
    return re.sub(link, replace, (ROOT / readme).read_text(encoding="utf-8"))


def _write_families(folder: Path) -> None:
    rows, listing = _difference_table(), []
    for model_type, family in models.FAMILIES.items():
        config = next(each for each in family.configs if each.model_type == model_type)
        presets = {name: preset for name, preset in models.PRESETS.items() if preset.model_type == model_type}
        _write(folder / f"{model_type}.md", *_family_page(family, config, presets, rows.get(model_type)))
        names = ", ".join(f"`{name}`" for name in presets)
        listing.append((f"[`{model_type}`]({model_type}.md)", f"`{family.model.__name__}`", names))
    table = _table(("`model_type`", "class", "presets"), listing)
    text = f"Checkpoints of {len(listing)} values of `model_type` load."
    pages = ("transformers", *models.FAMILIES)
    text += " [Decoders of transformers](transformers.md) lists all types, with the reason why a type does not load."
    _write(folder / "index.md", "# Model families", text, table, _toctree(pages, hidden=True))


def _write_decoder_types(path: Path) -> None:
    rows = decoder_types.decoder_rows()
    listing = [(f"`{name}`", f"[`{ours}`]({ours}.md)" if ours else "", reason) for name, ours, reason in rows]
    loaded = sum(bool(ours) for _, ours, _ in rows)
    text = (
        f"The values of `model_type` that `AutoModelForCausalLM` of transformers {decoder_types.version()} knows, and "
        f"those that nnxmoe names itself: {loaded} of {len(rows)} load. For a multimodal checkpoint, look up the "
        "`model_type` of its `text_config`."
    )
    _write(path, "# Decoders of transformers", text, _table(("`model_type`", "loads as", "reason"), listing))


def _difference_table() -> dict[str, list[str]]:
    """Return the rows of the table in ``models/README.md`` by ``model_type``: parts, presets, difference, refused."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "models" / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            rows |= {name: cells[1:] for name in re.findall(r"`(\w+)`", cells[0])}
    return rows


def _family_page(
    family: Family, config: type[DecoderConfig], presets: dict[str, DecoderConfig], row: list[str] | None
) -> list[str]:
    module = inspect.getmodule(family.model)
    text = [f"# {config.model_type}", re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(module) or "")]
    if row is not None:
        parts, _, difference, refused = row
        text.append(f"**Parts**: {parts}.")
        text.append(f"**Largest difference of logits from transformers**, in float32: {difference or 'under 2e-4'}.")
        text.append(f"**Raises an error for**: {refused or 'nothing beyond the rules for all families'}.")
    example = f'models.PRESETS["{next(iter(presets))}"]' if presets else f"models.{config.__name__}()"
    text += ["## Example", "Shapes of the parameters, without memory for their values:"]
    text.append(
        f"```python\nfrom nnxmoe import models\n\nconfig = {example}\n"
        "model = models.model_class(config)(config, rngs=None)\nprint(model)\n```"
    )
    if presets:
        header = ("preset", "checkpoint on the hub", "layers", "hidden size", "experts")
        rows = [
            (f"`{name}`", models.HUB_IDS.get(name, ""), each.num_hidden_layers, each.hidden_size, each.experts or "")
            for name, each in presets.items()
        ]
        text += ["## Presets", _table(header, rows)]
    fields = [
        (f"`{each.name}`", f"`{_annotation(each)}`", f"`{_default(each)}`") for each in dataclasses.fields(config)
    ]
    text += ["## Config", f"Fields of `{config.__name__}`, with the names in config.json."]
    text.append(_table(("field", "type", "default"), fields))
    text += ["## Names of weights", "Each parameter and its tensor in Hugging Face checkpoints."]
    text.append(
        "Tensors of parameters `layer.…` follow `model.layers.N.`. E is the index of an expert. `.T` marks a "
        "transposed tensor, and `[0/2]` the first half of a tensor's outputs."
    )
    tensors = [(f"`{key}`", _tensor(name)) for key, name in sorted(family.hf.items())]
    text.append(_table(("parameter", "tensor"), tensors))
    return text


def _annotation(field: dataclasses.Field[Any]) -> str:
    text = field.type if isinstance(field.type, str) else str(getattr(field.type, "__name__", field.type))
    return text.replace("|", "or")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else str(field.default_factory())


def _tensor(name: W | tuple[W, ...]) -> str:
    names = name if isinstance(name, tuple) else (name,)
    return " or ".join(f"`{each.label(each.under('', 'E'))}`" for each in names)


def _write_reference(folder: Path) -> None:
    for page, (title, _) in REFERENCE.items():
        _write(folder / f"{page}.md", _summary(title, "nnxmoe", [n for n in api.MODULES if _page(n) == page]))
    for name in MODULES:
        names = _defined_names(f"nnxmoe.{name}")
        _write(folder / f"nnxmoe.{name}.md", _summary(f"nnxmoe.{name}", f"nnxmoe.{name}", names))
    pages = (*REFERENCE, *(f"nnxmoe.{name}" for name in MODULES))
    text = "All public names. The first four pages list attributes of `nnxmoe`."
    _write(folder / "index.md", "# API reference", text, _toctree(pages))


def _page(name: str) -> str:
    """Return the page of the reference for a public name of `nnxmoe`."""
    module = api.MODULES[name].removeprefix("nnxmoe.")
    prefixes = {prefix: page for page, (_, folders) in REFERENCE.items() for prefix in folders}
    return prefixes[max((prefix for prefix in prefixes if module.startswith(prefix)), key=len)]


def _defined_names(module_name: str) -> list[str]:
    """Return the public classes and functions that a module defines or, if it has ``__all__``, exports."""
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in names if name not in api.MODULES}
    return [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and (hasattr(module, "__all__") or value.__module__.startswith(module_name))
    ]


def _summary(title: str, module: str, names: Sequence[str]) -> str:
    listing = "\n".join(f"   {name}" for name in names)
    options = "   :toctree: generated\n   :nosignatures:"
    return f"# {title}\n\n```{{eval-rst}}\n.. currentmodule:: {module}\n\n.. autosummary::\n{options}\n\n{listing}\n```"


def mark_code_blocks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Mark indented paragraphs of docstrings as literal blocks, before napoleon reads the sections."""
    marked: list[str] = []
    indent, ends_paragraph, is_literal = 0, False, False
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip():
            if ends_paragraph and depth > indent and not is_literal:
                marked += [" " * indent + "::", ""]
            indent, is_literal = depth, line.rstrip().endswith("::") or (is_literal and depth > indent)
        ends_paragraph = not line.strip()
        marked.append(line)
    lines[:] = marked


def write_markdown(app: Any, exception: Exception | None) -> None:
    """Write the Markdown of every page beside its HTML, and ``llms.txt``, an index of these files."""
    if exception is not None or app.builder.format != "html":
        return
    lines = ["# nnxmoe", "", "> Mixture-of-experts language models as flax.nnx modules in JAX.", "", "## Pages", ""]
    for document in sorted(app.env.found_docs):
        source = Path(app.env.doc2path(document))
        if source.suffix in (".md", ".ipynb"):
            text = source.read_text(encoding="utf-8")
            target = Path(app.outdir, f"{document}.md")
            markdown = _notebook_markdown(text) if source.suffix == ".ipynb" else text
            target.write_text(built_links(markdown), encoding="utf-8")
            lines.append(f"- [{app.env.titles[document].astext()}]({document}.md)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def built_links(text: str) -> str:
    """Replace relative links to notebooks and static files by links to their copies in the built site."""
    text = re.sub(r"(\]\((?!https?:)[^)#\s]+)\.ipynb(?=[)#])", r"\1.md", text)
    return re.sub(r"\]\(((?:\.\./)*)static/", r"](\1_static/", text)


def _notebook_markdown(text: str) -> str:
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)
