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
# # 4 · Parity with Linen and MaxText, layer by layer
#
# **What you learn**
#
# - how a model becomes MaxText's tree of parameters and comes back, and what changes on the way;
# - how to use our models inside a Linen code base;
# - how to prove that a Linen module and an NNX module are the same function: parameters, outputs *and* gradients;
# - how to find the first layer where they differ if they are not.

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
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

import nnxmoe
from nnxmoe import linen, models, plot, testing
from nnxmoe.convert import maxtext

plt.rcParams["figure.dpi"] = 110
nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
jax.config.update("jax_default_matmul_precision", "highest")  # on accelerators float32 products are rounded otherwise

# %% [markdown]
# ## MaxText's tree
#
# MaxText keeps its parameters as a nested dict with names of its own. `maxtext.to_tree` makes it of any model of ours,
# with a list of layers or with layers stacked on axis 1, as MaxText does for `nn.scan`.

# %%
config = models.MixtralConfig(
    vocab_size=96, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip
quick = nnxmoe.Strategy(dispatch=nnxmoe.Dense())  # computes the same, and compiles in half the time
model = models.Mixtral(config, quick, rngs=nnx.Rngs(0))

tree = maxtext.to_tree(model, scan_layers=True)
for name, array in flatten_dict(tree, sep="/").items():
    print(f"{name:62} {array.shape}")

# %% [markdown]
# One kind of numbers is not ours: **MaxText stores queries divided by sqrt(head width)**, and leaves that division out
# of the attention. A model made of such a tree keeps them so and does not divide again: the tree comes back to the bit.
# All other parameters are the same on both sides.

# %%
again = maxtext.from_tree(tree, config, quick)
ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (model, again))
for path, parameter in ours.items():
    a, b = parameter.get_value(), theirs[path].get_value()
    if not jnp.array_equal(a, b):
        print(f"{'/'.join(map(str, path))}: ours / theirs = {float(jnp.mean(a / b)):.4f} = sqrt({config.head_dim})")

back = jax.tree.map(np.array_equal, maxtext.to_tree(again, scan_layers=True), tree)
print(f"{len(ours)} parameters; the tree comes back to the bit: {all(jax.tree.leaves(back))}")

# %% [markdown]
# ## Our model as a Linen module
#
# `linen.LinenCausalLM` is an `nn.Module` whose variables are this very tree, while the NNX modules do the computing. It
# fits where Linen is expected: `init`, `apply`, `jit`, `grad`, a Linen training loop.

# %%
tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 12)))
bridge = linen.LinenCausalLM(config, quick, scan_layers=True)
made = jax.eval_shape(bridge.init, jax.random.key(0), tokens)
shapes = jax.tree.map(lambda a: a.shape, nn.meta.unbox(made))
print("the names and shapes are those of the tree above:", shapes == jax.tree.map(lambda a: a.shape, tree))

logits = bridge.apply(tree, tokens).logits
print("logits within 1e-5:", bool(jnp.abs(logits - model(tokens).logits).max() < 1e-5))

# %% [markdown]
# ## A Linen model of somebody else
#
# Now the real case. Your team has a Linen Mixtral; is ours the same? Here is one, written from the paper with nothing
# of nnxmoe in it. It is dense: every expert computes every token. `faulty` names a layer that forgets to rescale the
# router's two weights to a sum of 1, a bug that loads, runs, trains, and is easily overlooked.


# %%
def project(module, name, shape, x, rule):
    """`x` times a parameter, by an einsum rule."""
    return jnp.einsum(rule, x, module.param(name, nn.initializers.normal(0.1), shape))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


class Project(nn.Module):
    shape: tuple
    rule: str

    @nn.compact
    def __call__(self, x):
        return project(self, "kernel", self.shape, x, self.rule)


def rotate(x, theta):
    """Rotary positions for `[B, T, N, H]`: feature i turns with feature i + H/2."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


class Attention(nn.Module):
    config: models.MixtralConfig

    @nn.compact
    def __call__(self, x):
        c, dim, width = self.config, x.shape[-1], self.config.head_dim
        q = Project((dim, c.num_attention_heads, width), "btd,dnh->btnh", name="query")(x)
        k = Project((dim, c.num_key_value_heads, width), "btd,dnh->btnh", name="key")(x)
        v = Project((dim, c.num_key_value_heads, width), "btd,dnh->btnh", name="value")(x)
        q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        k, v = (jnp.repeat(a, c.num_attention_heads // c.num_key_value_heads, axis=2) for a in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)  # queries are stored divided by sqrt(H)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return Project((c.num_attention_heads, width, dim), "btnh,nhd->btd", name="out")(mixed)


class Experts(nn.Module):
    config: models.MixtralConfig
    rescale: bool

    @nn.compact
    def __call__(self, x):
        c, dim = self.config, x.shape[-1]
        scores = jax.nn.softmax(Project((dim, c.num_local_experts), "btd,de->bte", name="gate")(x))
        best, chosen = jax.lax.top_k(scores, c.num_experts_per_tok)
        best = best / best.sum(axis=-1, keepdims=True) if self.rescale else best
        weights = jnp.sum(best[..., None] * jax.nn.one_hot(chosen, c.num_local_experts), axis=-2)
        into = (c.num_local_experts, dim, c.intermediate_size)
        gate, up = (project(self, name, into, x, "btd,edf->btef") for name in ("wi_0", "wi_1"))
        out = project(self, "wo", (into[0], into[2], dim), nn.silu(gate) * up, "btef,efd->bted")
        return jnp.einsum("bted,bte->btd", out, weights)


class Layer(nn.Module):
    config: models.MixtralConfig
    rescale: bool

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.config, name="self_attention")(Norm(name="pre_self_attention_layer_norm")(x))
        normed = Norm(name="post_self_attention_layer_norm")(x)
        return x + Experts(self.config, self.rescale, name="MoeBlock_0")(normed)


class Decoder(nn.Module):
    config: models.MixtralConfig
    faulty: int | None

    @nn.compact
    def __call__(self, x):
        for i in range(self.config.num_hidden_layers):
            x = Layer(self.config, i != self.faulty, name=f"layers_{i}")(x)
        x = Norm(name="decoder_norm")(x)
        return Project((x.shape[-1], self.config.vocab_size), "btd,dv->btv", name="logits_dense")(x)


class TheirMixtral(nn.Module):
    config: models.MixtralConfig
    faulty: int | None = None

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        table = nn.Embed(c.vocab_size, c.hidden_size, name="token_embedder")
        return Decoder(c, self.faulty, name="decoder")(table(tokens))


# %% [markdown]
# ## The proof
#
# `testing.assert_module_parity` gives the Linen module the NNX module's parameters, runs both, and compares all of it:
# names and shapes, outputs, and the gradients of every parameter. Parameters need not have the same names: a mapping
# says which is which, and `None` stands for MaxText's names, which this module uses.

# %%
report = testing.assert_module_parity(
    model, TheirMixtral(config), None, (tokens,), nnx_call=lambda model, tokens: model(tokens).logits
)
print(f"{report.parameters} parameters, {report.submodules} calls of submodules compared on the way")
print("outputs and gradients within the tolerance:", max(report.output, report.gradient) <= report.tolerance)

# %% [markdown]
# The same for the module with a fault in layer 1. The report names the first submodule that differs, in order of
# execution, and says whether its inputs were still right:

# %%
try:
    testing.assert_module_parity(
        model, TheirMixtral(config, faulty=1), None, (tokens,), nnx_call=lambda model, tokens: model(tokens).logits
    )
except AssertionError as error:
    print(error)

# %% [markdown]
# ## The same as a picture
#
# Our models return their hidden states when asked. Linen can capture those of its modules. Held against each other,
# layer by layer:

# %%
unscanned = maxtext.to_tree(model, scan_layers=False)
hidden = model(tokens, return_hidden=True).hidden  # the embedding, every layer, the last norm


def differences_by_layer(module):
    _, seen = module.apply(unscanned, tokens, capture_intermediates=lambda m, _: isinstance(m, nn.Embed | Layer | Norm))
    seen = seen["intermediates"]
    layers = [seen["decoder"][f"layers_{i}"]["__call__"] for i in range(config.num_hidden_layers)]
    outputs = [seen["token_embedder"]["__call__"], *layers, seen["decoder"]["decoder_norm"]["__call__"]]
    names = ["embedding", *(f"layer {i}" for i in range(len(layers))), "last norm"]
    return {name: float(jnp.abs(a - b[0]).max()) for name, a, b in zip(names, hidden, outputs, strict=True)}


fig, axes = plt.subplots(1, 2, figsize=(10, 2.6), sharey=True, sharex=True, layout="constrained")
plot.errors(differences_by_layer(TheirMixtral(config)), 1e-5, axes[0]).set_title("the same function")
plot.errors(differences_by_layer(TheirMixtral(config, faulty=1)), 1e-5, axes[1]).set_title("a fault in layer 1")
plt.show()

# %% [markdown]
# Rounding grows a little from layer to layer; a bug is a jump of some orders of magnitude, and stays.
#
# ## Single parts
#
# The same function compares single modules, which is quicker than a whole model and points closer. Here only the block
# of experts, ours taken out of the model. The mapping goes from our names to theirs; a row may also hold a function
# from our array to theirs, for whoever stores matrices the other way round.

# %%
block = model.stacks[0].layers[0].moe
mapping = {
    "router/kernel": "gate/kernel",
    "experts/gate": "wi_0",
    "experts/up": "wi_1",
    "experts/down": "wo",
}
x = jax.random.normal(jax.random.key(1), (2, 12, config.hidden_size))
report = testing.assert_module_parity(
    block, Experts(config, rescale=True), mapping, (x,), nnx_call=lambda block, x: block(x)[0]
)
print(f"{report.parameters} parameters; within the tolerance of {report.tolerance:.0e}")

# %% [markdown]
# It finds its way through scanned layers, `nn.remat` and `nn.vmap` as well, and says of a scan which layer is to blame.
# Put a line of it into the tests of your port: it is an assertion.
