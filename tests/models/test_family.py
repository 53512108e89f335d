"""A new model family needs one file and one registration; everything else works unchanged."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe import models
from nnxmoe.apps.cli import main
from nnxmoe.convert import maxtext
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models import registry
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.numpy_decoder import reference_logits
from tests.support.tiny import TINY, Weights, random_tokens, stacking_of, tiny_weights, write_checkpoint
from tests.support.toy_family import TOY, Toy, ToyConfig

FIELDS = TINY["llama"] | {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False}
del FIELDS["mlp_bias"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "REGISTERED", {})
    models.register(TOY)
    yield


def weights() -> Weights:
    rng, found = np.random.default_rng(7), tiny_weights(FIELDS)
    for i in range(FIELDS["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            norm = 1 + 0.3 * rng.standard_normal(FIELDS["head_dim"])
            found[f"model.layers.{i}.self_attn.{name}.weight"] = norm.astype(np.float32)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("toy"), FIELDS, weights())


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_new_family_logits_and_saving(checkpoint: Path, scan: bool, tmp_path: Path) -> None:
    model = nnxmoe.from_pretrained(checkpoint, strategy=nnxmoe.Strategy(stacking=stacking_of(scan)))
    tokens = random_tokens(2, 12)
    assert isinstance(model, Toy)
    assert max_error(model(tokens).logits, reference_logits(FIELDS, weights(), tokens)) < 1e-4
    nnxmoe.save_pretrained(model, tmp_path / "hf")
    written, wanted = load_file(tmp_path / "hf" / "model.safetensors"), weights()
    assert written.keys() == wanted.keys() and all((written[name] == wanted[name]).all() for name in wanted)
    nnxmoe.save(model, tmp_path / "ours")
    assert (nnxmoe.load(tmp_path / "ours")(tokens).logits == model(tokens).logits).all()


@pytest.mark.slow
def test_new_family_generation_adapters_and_inspect(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nnxmoe.from_pretrained(checkpoint)
    tokens = jnp.asarray(random_tokens(2, 12))
    ids = nnxmoe.generate(model, tokens, max_new_tokens=3, eos_token_id=None)
    assert (ids[:, 12] == jnp.argmax(model(tokens).logits[:, -1], axis=-1)).all()
    lora.add(model, 2, rngs=nnx.Rngs(0))
    assert max_error(model(tokens).logits[:, -1:], nnxmoe.from_pretrained(checkpoint)(tokens).logits[:, -1:]) == 0
    assert main(["inspect", str(checkpoint)]) == 0 and "qwen3" in capsys.readouterr().out


def test_new_family_mismatches_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    broken = weights()
    del broken["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(nnxmoe.LoadError, match=r"layers.1.self_attn.k_norm.weight is missing"):
        nnxmoe.from_pretrained(write_checkpoint(tmp_path, FIELDS, broken))
    with pytest.raises(nnxmoe.ConfigError, match="use_sliding_window"):
        models.config_from_hf(FIELDS | {"use_sliding_window": True})
    with pytest.raises(ValueError, match="the MaxText format does not support 'qwen3' models"):
        maxtext.to_tree(nnxmoe.from_pretrained(checkpoint))


@pytest.mark.oracle
def test_new_family_logits_match_transformers(checkpoint: Path) -> None:
    import torch
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert max_error(nnxmoe.from_pretrained(checkpoint)(tokens).logits, wanted) < 2e-4


README = (Path(nnxmoe.__file__).parents[1] / "models" / "README.md").read_text(encoding="utf-8")
EXAMPLE = next(code for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S) if "Palmoe" in code)


def test_family_of_the_guide_in_a_user_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's example runs. ``--import`` takes its module by name or by path, before or after the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "palmoe.py").write_text(EXAMPLE.partition("models.register(FAMILY)")[0] + "models.register(FAMILY)\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "palmoe.py").write_text("")
    try:
        assert main(["--import", "palmoe", "inspect", "nosuch/folder/"]) == 1 and "palmoe" in models.MODELS
        exec(compile(EXAMPLE, "palmoe_example", "exec"), {"__name__": "palmoe"})
        assert main(["inspect", "tiny-palmoe", "--import", str(tmp_path / "palmoe.py")]) == 0
        assert "palmoe of" in capsys.readouterr().out
        assert main(["inspect", "tiny-palmoe", "--import", "elsewhere/palmoe.py"]) == 1
        assert "another module is already named palmoe" in capsys.readouterr().err
    finally:
        sys.modules.pop("palmoe", None)


def test_failed_imports_name_the_module_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken_family.py").write_text("raise KeyError('x')")
    for name, wanted in {
        "no_such_family": "--import no_such_family: ModuleNotFoundError: No module named 'no_such_family'",
        "no_such_family.py": "--import no_such_family.py: file not found",
        "broken_family": "--import broken_family: KeyError: 'x'",
        "broken_family.py": "--import broken_family.py: KeyError: 'x'",
    }.items():
        for line in (["--import", name, "inspect", "demo"], ["inspect", "demo", "--import", name]):
            assert main(line) == 1
            assert capsys.readouterr().err == f"nnxmoe: error: {wanted}\n"


def variant(**changes: Any) -> Family:
    """A Toy family with changed rows in its table. None removes a row."""
    table = {key: row for key, row in (dict(TOY.hf) | changes).items() if row is not None}
    return dataclasses.replace(TOY, hf=table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer.mlp.up.kernel": None}, r"Toy: the parameter layer\.mlp\.up\.kernel has no row in hf"),
        ({"layer.attention.q.bias": None}, r"the parameter layer\.attention\.q\.bias has no row"),
        ({"layer.mlp.up.kernel": W("mlp.gate_proj.weight")}, r"maps layer\.mlp\.(gate|up)\.kernel.*the same tensor"),
        ({"layer.mlp.up.kernel": W("mlp.up").rows(1, 2)}, r"no row of hf covers part 0 of the 2 of .*mlp\.up"),
        ({"layer.mlp.up.kernel": W("mlp").each("up")}, r"layer\.mlp\.up\.kernel has no expert axis"),
    ],
    ids=["no row", "no row for a bias that a config field adds", "two rows, one tensor", "half a tensor", "experts"],
)
def test_register_refuses_a_faulty_table(changes: dict[str, Any], message: str) -> None:
    registered = dict(registry.REGISTERED)
    with pytest.raises(nnxmoe.ConfigError, match=message):
        models.register(variant(**changes))
    assert registry.REGISTERED == registered


@pytest.mark.slow
def test_saving_names_a_parameter_without_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row was removed after registration."""
    config = ToyConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model = Toy(config, rngs=nnx.Rngs(0))
    monkeypatch.setattr(registry, "REGISTERED", {"qwen3": variant(**{"norm.scale": None})})
    with pytest.raises(nnxmoe.ConfigError, match=r"Toy: the parameter norm\.scale has no row in hf"):
        nnxmoe.save_pretrained(model, tmp_path / "model")


def test_unregistered_family_computes_logits() -> None:
    class Variant(Toy):
        """A class without a family."""

    config = ToyConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    assert Variant(config, rngs=nnx.Rngs(0))(np.arange(4)[None]).logits.shape == (1, 4, 40)
