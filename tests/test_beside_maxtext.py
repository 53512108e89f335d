"""The comparison with MaxText: cases, figures of a program, tables and messages. The tests do not need MaxText."""

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import nnxmoe
from nnxmoe.apps.planning.hlo import Collective, collectives
from nnxmoe.mesh import abstract_mesh
from nnxmoe.models import model_class
from nnxmoe.sharding_rules import check_mesh
from tests.benchmarks.maxtext import __main__ as command
from tests.benchmarks.maxtext import ours, program, report
from tests.benchmarks.maxtext.cases import COMPILED, STEPS, TOPOLOGY

FOLDER = Path(command.__file__).parent
KERNELS = """ENTRY %main (a: f32[8]) -> f32[8] {
  %gmm.1 = bf16[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"tiling":"512"
}}, metadata={op_name="jit(step)/gmm/pallas_call"}, backend_config={"cost_estimate":{"bytes_accessed":"300"}}
  %layers = (s32[], f32[8]) while(%x), condition=%condition, body=%body, config={"known_trip_count":{"n":"4"}}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %tgmm.1 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="a/tgmm"}, backend_config={"bytes_accessed":20}
  %splash.1 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="a/splash"}, backend_config={"bytes_accessed":7}
}
"""  # noqa: E501
ASSIGNMENT = """
allocation 0: size 400, page 4096, parameter 0, shape |f32[100]| at ShapeIndex {}:
allocation 1: size 100, color 2, page 4096, parameter 1, shape |f32[25]| at ShapeIndex {}:
allocation 2: size 64, page 4096, parameter 2, shape |f32[16]| at ShapeIndex {}:
allocation 3: size 5000, page 4096, preallocated-temp:
allocation 4: size 600, color 1, page 4096, preallocated-temp:
"""


def moved_bytes() -> tuple[float, dict[str, list[int]]]:
    """Return the bytes that a device receives in a program with three collectives over four of eight devices."""
    mesh = nnxmoe.make_mesh(fsdp=2, expert=4)

    def body(x: jax.Array) -> jax.Array:
        gathered = jax.lax.all_gather(x, "expert", tiled=True)  # [32, 16] float32: 2048 bytes
        added = jax.lax.psum(x, "expert")  # [8, 16]: 512 bytes
        return added + jax.lax.psum_scatter(gathered, "expert", tiled=True)

    run = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(("fsdp", "expert")), out_specs=PartitionSpec("fsdp"), check_vma=False)  # fmt: skip  # noqa: E501
    text = jax.jit(run).lower(jnp.ones((64, 16))).compile().as_text() or ""
    found = collectives(text, dict(mesh.shape))
    return program.received(found, dict(mesh.shape)), {one.kind: [one.times, one.bytes] for one in found}


def test_received_bytes_of_a_compiled_program(eight: Callable[..., Any]) -> None:
    """In a ring of four, a device receives three quarters of the array, and twice as much for an all-reduce."""
    received, found = eight(moved_bytes)
    assert found == {"all-gather": [1, 2048], "all-reduce": [1, 512], "reduce-scatter": [1, 2048]}
    assert received == 0.75 * (2048 + 2 * 512 + 2048)
    permuted = Collective("collective-permute", ("fsdp",), 100, 3)
    assert program.received([permuted], {"fsdp": 2}) == 300


def test_figures_of_a_dumped_program(tmp_path: Path) -> None:
    """Expert kernels count once per loop iteration. Attention kernels do not count. HBM buffers have no color."""
    name = "module_0000.jit_step.after_optimizations"
    (tmp_path / f"{name}.txt").write_text(KERNELS)
    (tmp_path / f"{name}-buffer-assignment.txt").write_text(ASSIGNMENT)
    expected = {"arguments": 464, "temporary": 5000, "received": 0.0, "kernels": 380, "collectives": {}}
    assert program.figures(tmp_path, {"fsdp": 8}) == expected


@pytest.mark.parametrize("name", COMPILED)
def test_models_of_compiled_cases(name: str) -> None:
    """The mesh divides the abstract model. Both sides have the same mesh and batch."""
    case = COMPILED[name]
    model = model_class(case.config)(case.config, ours.strategy(case, None, "cpu"), rngs=None)
    check_mesh(model, abstract_mesh(case.mesh), model.strategy.rules)
    assert case.devices == 64 and TOPOLOGY == "v5p:4x4x4" and "compile_topology=v5p-128" in case.maxtext_flags
    assert "per_device_batch_size=1" in case.maxtext_flags and case.rows == 64
    assert {f"ici_{axis}_parallelism={size}" for axis, size in case.mesh.items()} <= set(case.maxtext_flags)


def lowered_step(name: str) -> str:
    """Return the text of a step's lowered program."""
    case = STEPS[name]
    step, batch = ours.abstract_step(case, ours.mesh_of(case), "cpu")
    return step.lower(batch).as_text()


@pytest.mark.parametrize("name", ["sparse ring EP8, bfloat16", "capacity 1.5 EP8, float32"])
def test_steps_on_eight_devices_lower(name: str, eight: Callable[..., Any]) -> None:
    text = eight(functools.partial(lowered_step, name))
    assert f"8x128x256x{'bf16' if 'bfloat16' in name else 'f32'}" in text


def test_a_case_states_each_value_once() -> None:
    """Replaced config fields are passed to MaxText as flags."""
    flags = STEPS["Llama, one device, no remat, float32"].maxtext_flags
    assert {"base_mlp_dim=1408", "base_emb_dim=512", "remat_policy=none", "matmul_precision=highest"} <= set(flags)
    assert STEPS["Llama, one device, no remat, float32"].config.rope_scaling is None


def test_tables_of_results() -> None:
    figures = {"arguments": 2e9, "temporary": 4e9, "received": 3e9, "kernels": 5e9, "lower_cpu": 2.0}
    table = report.compiled_table({"a": {"ours": figures, "theirs": figures | {"temporary": 8e9}}})
    assert table.splitlines()[2:] == [
        "| a | 2.00 / 2.00 = **1.00** | 4.00 / 8.00 = **0.50** | 6.00 / 10.00 = **0.60** | 3.00 / 3.00 = **1.00** "
        "| 5.00 / 5.00 = **1.00** | 2.0 / 2.0 = **1.00** |"
    ]
    steps = {"cpu": [9.0, 1.0, 2.0, 3.0], "loss": [9.5, 9.0], "temporary": 4e7}
    sides = {"ours": steps, "theirs": {"error": "does not compile"}}
    assert report.steps_table({"b": sides}).splitlines()[2:] == [
        "| b | 2.00 / - | 40 / - | 9.500000 / - | 9.000000 / - |"
    ]


def test_readme_has_the_tables_of_the_results() -> None:
    results, text = json.loads((FOLDER / "results.json").read_text()), (FOLDER / "README.md").read_text()
    assert set(results["compiled"]) <= set(COMPILED) and set(results["steps"]) <= set(STEPS)
    assert report.compiled_table(results["compiled"]) in text
    assert report.steps_table(results["steps"]) in text


def test_without_maxtext_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main(["compiled", "--out", str(tmp_path / "out.json")])
    assert "pip install 'maxtext[tpu]==0.2.5'" in capsys.readouterr().err
