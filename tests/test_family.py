"""A new model family needs one file and one registration; everything else works unchanged."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe import models
from nnxmoe.cli.parser import main
from nnxmoe.convert import maxtext
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.numpy_decoder import reference_logits
from tests.support.tiny import TINY, Weights, random_tokens, stacking_of, tiny_weights, write_checkpoint
from tests.support.toy_family import Toy

FIELDS = TINY["llama"] | {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False}
del FIELDS["mlp_bias"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    monkeypatch.setattr(models, "PRESETS", dict(models.PRESETS))
    models.register(Toy)
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
    with pytest.raises(ValueError, match="no table of MaxText's names for 'qwen3' models"):
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
