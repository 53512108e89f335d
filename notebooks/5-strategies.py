# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 · One model, every execution strategy
#
# **What you learn**
#
# - that a *strategy* says how a model is computed, and never what it computes: loss and gradients stay the same;
# - how experts and tokens meet on a mesh of devices: who holds what, and what travels;
# - how to count collectives and memory in what the compiler made, before renting a single accelerator;
# - what a capacity factor costs.
#
# All of it on 8 virtual devices of one CPU. Times would mean nothing here, so there are none; collectives and bytes are
# those of the compiled programs.

# %%
# Needs `pip install -e '.[notebooks]'`. Where that is missing (Colab, Kaggle, a new environment), this cell installs
# the wheel that `pip wheel --no-deps .` makes in a checkout of nnxmoe: upload it beside this notebook first.
import glob
import importlib.util
import shutil
import subprocess
import sys

if wanted := [name for name in ("nnxmoe", "matplotlib") if importlib.util.find_spec(name) is None]:
    if "nnxmoe" in wanted:
        wheels = glob.glob("nnxmoe-*.whl") + glob.glob("/kaggle/input/**/nnxmoe-*.whl", recursive=True)
        assert wheels, "nnxmoe is not installed, and no nnxmoe-*.whl lies beside this notebook"
        wanted[0] = wheels[0] + ("[cuda12]" if shutil.which("nvidia-smi") else "")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    importlib.invalidate_caches()

# %%
import re
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe import models, plot
from nnxmoe.convert import maxtext

jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device; JAX_NUM_CPU_DEVICES=8 does it too
jax.config.update("jax_default_matmul_precision", "highest")
plt.rcParams["figure.dpi"] = 110
nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
print(jax.device_count(), "devices")

# %% [markdown]
# ## Six ways
#
# Two decisions make a way to compute a mixture of experts on many devices. *Where do the experts' weights lie?* Either
# each kernel is cut into slices (`fsdp`) that are gathered when they are needed, or each device keeps some experts
# whole (`expert`). *And how do tokens and experts meet?* That is the dispatch:
#
# | | the weights travel (`fsdp=8`) | the tokens travel (`expert=8`) |
# |---|---|---|
# | exactly what was routed | `Sorted()` | `ExpertParallel(Sorted(), RaggedAllToAll())` or `RingOfExperts()` |
# | fixed slots, some may be dropped | | `Capacity(factor)` |
# | every expert on every token | `Dense()` | |
#
# `Dense()` on one device is the oracle: slow, obvious, and what all others are held against.

# %%
fsdp, expert = nnxmoe.make_mesh(fsdp=8), nnxmoe.make_mesh(expert=8)
ragged, ring = nnxmoe.RaggedAllToAll(), nnxmoe.RingOfExperts()
ways = {
    "Dense, one device": nnxmoe.Strategy(dispatch=nnxmoe.Dense()),
    "Dense, fsdp": nnxmoe.Strategy(dispatch=nnxmoe.Dense(), mesh=fsdp),
    "Sorted, fsdp": nnxmoe.Strategy(dispatch=nnxmoe.Sorted(), mesh=fsdp),
    "Capacity, expert": nnxmoe.Strategy(dispatch=nnxmoe.Capacity(4.0), mesh=expert),
    "ragged all-to-all, expert": nnxmoe.Strategy(dispatch=nnxmoe.ExpertParallel(nnxmoe.Sorted(), ragged), mesh=expert),
    "ring of experts, expert": nnxmoe.Strategy(dispatch=nnxmoe.ExpertParallel(nnxmoe.Sorted(), ring), mesh=expert),
}

# %% [markdown]
# One checkpoint, loaded in six ways. (A random one, and of one layer: the next ones would repeat it.) `from_pretrained`
# puts every array where it lies; no device ever sees more than it holds.

# %%
config = models.MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    nnxmoe.save_pretrained(models.Mixtral(config, rngs=nnx.Rngs(0)), folder)
    made = {name: nnxmoe.from_pretrained(folder, strategy=strategy) for name, strategy in ways.items()}

for name in ("Dense, one device", "Sorted, fsdp", "ring of experts, expert"):
    kernel = made[name].stacks[0].layers[0].moe.experts.gate[...]
    shard = kernel.addressable_shards[0].data
    print(f"{name:24} experts' kernel {kernel.shape}: the first device holds {shard.shape}")

# %% [markdown]
# ## Compile once, look twice
#
# One function gives the loss and the gradients of all parameters. Compiled, it can be run, and it can be read: its text
# has the collectives, its analysis the bytes. A batch of 16 rows is spread over the devices, two rows each.

# %%
tokens = np.random.default_rng(0).integers(0, config.vocab_size, (16, 64))
ROWS = PartitionSpec(("data", "fsdp", "expert"))  # the mesh axes that the rows of a batch are divided over
objective = nnxmoe.train.Objective()


def compiled(model):
    """The program, and its arguments."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    batch, mesh = jnp.asarray(tokens), model.strategy.mesh
    if mesh is not None:
        batch = jax.device_put(batch, NamedSharding(mesh, ROWS))

    def loss(params, batch):
        return objective(nnx.merge(graph, params, rest), {"tokens": batch})[0]

    places = jax.tree.map(lambda array: array.sharding, params)  # a gradient lies where its parameter does
    program = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
    return program.lower(params, batch).compile(), (params, batch)


programs, results = {}, {}
for name, model in made.items():
    programs[name], arguments = compiled(model)
    loss, gradients = programs[name](*arguments)
    results[name] = float(loss), jax.device_get(nnx.to_pure_dict(gradients))
    print(f"{name:26} loss {results[name][0]:.5f}")

# %% [markdown]
# ## The numbers are the same
#
# Held against the oracle, the largest difference in any gradient of any parameter, divided by the largest value of that
# gradient. What is left is float32's rounding: sums are taken in another order.


# %%
def apart(one, other):
    return max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


oracle = results["Dense, one device"][1]
plot.errors({name: apart(gradients, oracle) for name, (_, gradients) in results.items()}, tolerance=1e-5)
plt.show()

# %% [markdown]
# ## What travels
#
# Every collective of the forward and backward pass is in the compiled text, with the shape of its result on one device.

# %%
KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


def collectives(program):
    """Kind and kB of every collective in which a device meets another one."""
    for shapes, kind, rest in re.findall(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)", program.as_text()):
        if not re.search(r"replica_groups=(\{\{0\},|\[\d+,1\]<=)", rest):  # those are each device by itself
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
            yield kind, sum(BYTES[t] * np.prod([int(d) for d in dims.split(",") if d]) for t, dims in arrays) / 1e3


counts, sizes = {}, {}
for name, program in programs.items():
    found = list(collectives(program))
    counts[name] = {kind: sum(kind == other for other, _ in found) for kind in KINDS}
    sizes[name] = {kind: sum(size for other, size in found if kind == other) for kind in KINDS}
plot.bars(counts, "collectives")
plot.bars(sizes, "kB of their results on one device", form="{:,.0f}")
plt.show()

# %% [markdown]
# Read it like this:
#
# - **fsdp** gathers weights (`all-gather`), every kernel of every layer, and scatters or sums their gradients. That
#   grows with the model, whatever the batch.
# - **ragged all-to-all** sends each row to the device of its expert and the result back, and the same for the
#   gradients: four exchanges. That grows with the tokens; the experts' weights and their gradients never leave home.
#   CPUs have no ragged exchange: here it is padded for the worst case, all rows to one device, so its bytes are an
#   upper bound.
# - **the ring of experts** shows all tokens to all devices (`all-gather`), and each adds what its experts have to say
#   (`reduce-scatter`). That grows with tokens times devices, whatever the routing is.
# - **Capacity** needs no more than sharding constraints: the compiler makes the exchange of them. Its bytes are those
#   of the slots, full or empty.
#
# What every device has a copy of has its gradients summed over all of them (`all-reduce`).

# %% [markdown]
# ## Memory
#
# What one device must hold: its share of the parameters, of the gradients, and the temporaries, of which most are
# activations kept for the backward pass.

# %%
memory = {}
for name, program in programs.items():
    analysis = program.memory_analysis()
    memory[name] = {
        "parameters": analysis.argument_size_in_bytes / 1e6,
        "gradients": analysis.output_size_in_bytes / 1e6,
        "temporaries": analysis.temp_size_in_bytes / 1e6,
    }
plot.bars(memory, "MB a device", form="{:.1f}")
plt.show()

# %% [markdown]
# One device alone has all parameters and the whole batch. With `fsdp=8` the parameters are divided by eight; with
# `expert=8` the experts are, and the rest is where the rules say (`nnxmoe.RULES`, one table). The temporaries can be
# made smaller still: `remat=nnxmoe.Remat()` computes activations again, `Chunked(dispatch, n)` takes a slice of the
# sequence at a time. Both are strategies: again, the numbers stay.
#
# ## The price of fixed slots
#
# Of these, `Capacity` alone may change the result: an expert has `factor` times its even share of slots in each row,
# and what finds no room is dropped, and counted. Above, a factor of 4 left room for everything (8 experts, 2 choices).
# With less:

# %%
tree, dropped = maxtext.to_tree(made["Dense, one device"]), {}
for factor in (1.0, 1.5, 2.0, 4.0):
    model = maxtext.from_tree(tree, config, nnxmoe.Strategy(dispatch=nnxmoe.Capacity(factor)))
    info = model(tokens, return_routing=True).dispatch[0]
    dropped[f"factor {factor:g}"] = 100 * int(info.dropped) / int(info.load.sum())
plot.bars(dropped, "% of the assignments that found no room", form="{:.1f}%")
plt.show()

# %% [markdown]
# And this router is random, hence fairly even. Notebook 3 has routers that are not.
#
# On real devices the choice is a line: `nnxmoe.from_pretrained(path, mesh=nnxmoe.make_mesh(fsdp=2, expert=4),
# strategy=…)`, and `fit(…, mesh=…)` for training. `nnxmoe inspect mixtral-8x7b --mesh fsdp=4,expert=8` says beforehand
# what each device would hold.
