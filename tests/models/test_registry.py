"""The index of the model families equals the modules, and a family is imported when it is first used."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import nnxmoe
from nnxmoe import models
from nnxmoe.config.base import DecoderConfig
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.models.index import MODULES
from nnxmoe.models.registry import ARCHITECTURES, FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_index_equals_the_modules() -> None:
    stems = {path.stem for path in (ROOT / "models").glob("*.py")} - {"__init__", "index", "registry"}
    assert MODULES.keys() == stems
    for stem, entry in MODULES.items():
        module = importlib.import_module(f"nnxmoe.models.{stem}")
        families = [value for value in vars(module).values() if isinstance(value, Family)]
        families = [family for family in families if family.model.__module__ == module.__name__]
        configs = [config for family in families for config in family.configs]
        assert entry.model_types.split() == [config.model_type for config in configs], stem
        names = {name for c in configs for name in (c.architecture, *c.published_architectures.split())}
        assert set(entry.architectures.split()) == names, stem
        classes = {family.model for family in families} | set(configs)
        assert set(entry.classes.split()) == {each.__name__ for each in classes}, stem
        for config in configs:
            assert FAMILIES[config.model_type] in families


def test_all_classes_are_names_of_the_package() -> None:
    names = {name for entry in MODULES.values() for name in entry.classes.split()}
    assert names < set(models.__all__) <= set(dir(models))
    assert all(issubclass(getattr(models, name), (CausalLM, DecoderConfig)) for name in names)
    with pytest.raises(AttributeError, match="Nonsense"):
        models.Nonsense  # type: ignore[attr-defined]  # noqa: B018
    assert all(name.endswith("ForCausalLM") for name in ARCHITECTURES)


def test_families_have_prediction_layers_if_their_tables_name_them() -> None:
    for model_type, family in FAMILIES.items():
        assert family.model.supports_mtp == ("layer.mtp.token_norm.scale" in family.hf), model_type


def test_the_family_of_models_and_configs() -> None:
    class CustomMixtral(models.Mixtral):
        """A class without a family has that of its base."""

    config = models.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    mixtral = models.family_of(config)
    assert mixtral.model is models.Mixtral
    assert all(models.family_of(model(config, rngs=None)) is mixtral for model in (models.Mixtral, CustomMixtral))

    class Unnamed(CausalLM):
        """A class without a family and without a base with one."""

    with pytest.raises(nnxmoe.ConfigError, match=r"register\(Family\(model=Unnamed"):
        models.family_of(object.__new__(Unnamed))


@pytest.mark.wrong_types
def test_register_takes_families_only() -> None:
    with pytest.raises(ValueError, match=r"register.*Family"):
        models.register(models.Mixtral)  # type: ignore[arg-type]


def test_presets_are_built_once() -> None:
    for name, config in models.PRESETS.items():
        assert models.PRESETS[name] is config and type(config) is models.MODELS[config.model_type][0]
    assert models.HUB_IDS.keys() >= models.CHECKPOINT_NOTES.keys()


ONE_FAMILY = """
import sys
import nnxmoe
model = nnxmoe.from_pretrained("demo")
families = {name.removeprefix("nnxmoe.models.") for name in sys.modules if name.startswith("nnxmoe.models.")}
print(*sorted(name for name in families if "shared" not in name))
"""


@pytest.mark.slow
def test_from_pretrained_imports_one_family() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_FAMILY], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["index", "mixtral", "registry"]
