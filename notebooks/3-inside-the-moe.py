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
# # 3 · Inside the mixture of experts
#
# **What you learn**
#
# - which expert reads which token, and how to see it: routing is returned, not hidden in a hook;
# - how evenly the experts of a trained model are used, layer by layer and text by text;
# - what goes wrong without balancing: a router that always picks the same experts;
# - the two cures, the balance loss (Switch, Mixtral) and DeepSeek's correction bias, at work in small trainings.

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
from collections import Counter

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe import models, plot

nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
plt.rcParams["figure.dpi"] = 110

# %% [markdown]
# ## Who reads what
#
# The embedded demo is a Mixtral of 3 layers with 8 experts each. In every layer a router, one small matrix, scores the
# experts for each token; the two best compute, and their results are added with the router's weights. Five kinds of
# text that the model knows, padded to one batch (padding counts in no statistics):

# %%
model, tokenizer = nnxmoe.from_pretrained("demo"), nnxmoe.Tokenizer.from_pretrained("demo")

texts = {
    "sums": "47 + 38 = 85. 52 + 6 = 58. 90 + 9 = 99. 13 + 24 = 37.",
    "counting": "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
    "facts": "The capital of Italy is Rome. The capital of Germany is Berlin.",
    "story": "Once upon a time there was a little rabbit named Leo. He lived in an old barn. One day Leo ran a race.",
    "code": "def add(a, b):\n    return a + b\n\ndef double(x):\n    return x * 2",
}
encoded = [tokenizer.encode(text) for text in texts.values()]
tokens = np.full((len(texts), max(map(len, encoded))), tokenizer.pad_token_id)
mask = np.zeros_like(tokens)
for row, ids in enumerate(encoded):
    tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1

out = model(tokens, attention_mask=mask, return_routing=True)
for layer, routing in out.routing.items():
    print(f"layer {layer}: experts {routing.experts.shape}, scores {routing.scores.shape}")

# %% [markdown]
# `experts [B, T, X]` are the choices, best first; `weights` what they count; `scores` the router's probabilities over
# all eight. Token by token, the first choice in each layer:

# %%
pieces = [[tokenizer.decode([i]) for i in ids] for ids in encoded]
for kind in ("sums", "story"):
    row = list(texts).index(kind)
    plot.strip(pieces[row][:32], out.routing, row).set_title(kind)
    plt.show()

# %% [markdown]
# Look down a column: the layers choose independently, expert 3 of one layer has nothing to do with expert 3 of the
# next. Look along a row: the same piece often goes to the same expert, and yet it is not a dictionary: what stands
# before counts as well. Compare the digits of summands and of results, in the first and in the last layer.
#
# Both choices of the last layer, for the sums:

# %%
plot.strip(pieces[0][:32], out.routing[2])
plt.show()

# %% [markdown]
# And the other way round: what are the commonest pieces that each expert of the middle layer reads?

# %%
read = [Counter() for _ in range(8)]
for row, row_pieces in enumerate(pieces):
    for piece, experts in zip(row_pieces, np.asarray(out.routing[1].experts)[row], strict=False):
        for expert in experts:
            read[expert][piece] += 1
for expert, counts in enumerate(read):
    print(f"expert {expert}:", "  ".join(f"{piece!r} {count}" for piece, count in counts.most_common(7)))

# %% [markdown]
# ## How evenly
#
# `plot.load` shows each expert's load over the mean of its layer: 1 is even, 0 an expert that no token needs, and 4 the
# most there can be here (8 experts, 2 choices): an expert that every token chooses.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 2), width_ratios=(2, 1), layout="constrained")
plot.load(out.routing, ax=left)
plot.entropy(out.routing, ax=right)
plt.show()

# %% [markdown]
# Over all texts together the load is fairly even: the demo was trained with a balance loss. (Entropy over log(experts)
# is the same in one number: 1 is even.) A single kind of text is another matter. This is the middle layer:


# %%
def routing_of(row):
    """Of one text; a Routing is a pytree, so that its arrays can be cut all at once."""
    return jax.tree.map(lambda array: array[row], out.routing)


kinds = [plot.shares(routing_of(row)) for row in range(len(texts))]
plot.load(np.stack(kinds)[:, 1], names=list(texts)).set_title("load of layer 1")
plt.show()

# %% [markdown]
# Each kind of text has its favourites. That is what one hopes for, and a practical problem: in a batch of nothing but
# sums, the devices that hold a few of the experts do most of the work.
#
# ## Without balancing
#
# Where do even loads come from? Not by themselves. An expert that is chosen often learns more, so it is chosen more
# often. To watch it, train a tiny Mixtral on a language whose words are as unequal as real ones: in a random table of
# what follows what, the n-th word is about `n ** -1.3` as common as the first.

# %%
WORDS, STEPS = 64, 80
draw = np.random.default_rng(0)
table = np.arange(1, WORDS + 1) ** -1.3 * draw.gamma(0.3, size=(WORDS, WORDS))
follows = (table / table.sum(axis=1, keepdims=True)).cumsum(axis=1)


def sentences(seed=1, batch=16, length=32):
    """Batches without end, a dict of arrays `[B, T]` each: that is all that `fit` asks of data."""
    draw = np.random.default_rng(seed)
    while True:
        tokens = draw.integers(0, WORDS, (batch, length), dtype=np.int32)
        for t in range(1, length):
            tokens[:, t] = (draw.random((batch, 1)) > follows[tokens[:, t - 1]]).sum(axis=1).clip(max=WORDS - 1)
        yield {"tokens": tokens}


def train(model, **options):
    """The fitted model, and the load of its experts after every step, `[S, L, E]`."""
    loads = []
    told = [lambda progress: loads.append(progress.load)]
    fitted = nnxmoe.train.fit(model, sentences(), optimizer=optax.adam(5e-3), steps=STEPS, callbacks=told, **options)
    return fitted, np.array(loads)


shape = {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
quick = nnxmoe.Strategy(dispatch=nnxmoe.Dense())  # computes the same, and compiles in half the time
mixtral = models.MixtralConfig(**shape, num_hidden_layers=2, head_dim=16, intermediate_size=32)
alone, alone_loads = train(models.Mixtral(mixtral, quick, rngs=nnx.Rngs(0)))

# %% [markdown]
# `fit` calls a function of ours after every step and tells it the load. Each column is a step; layer 1:

# %%
plot.over_steps(alone_loads[:, 1]).set_title("no balancing")
plt.show()
busiest = alone_loads[-20:, 1].max(axis=-1).mean() * 8
print(f"busiest expert in the last 20 steps: {busiest:.1f} times the mean; 4 is the most there can be")

# %% [markdown]
# Soon nearly all tokens go to the same two experts. The others see too little to learn anything; and where experts are
# spread over devices, most devices wait for two of them.
#
# ## Cure 1: a balance loss
#
# The Switch Transformer's loss multiplies each expert's share of the tokens with its mean probability, and sums: it is
# least when both are even. It is one field of the objective. The weight is a compromise: the router serves two masters.

# %%
objective = nnxmoe.train.Objective(balance=0.1)
balanced, balanced_loads = train(models.Mixtral(mixtral, quick, rngs=nnx.Rngs(0)), objective=objective)

fig, axes = plt.subplots(1, 2, figsize=(11, 2.5), layout="constrained")
plot.over_steps(balanced_loads[:, 1], ax=axes[0]).set_title("balance loss 0.1")
plot.history({"no balancing": alone.history, "balance loss": balanced.history}, "busiest_expert", axes[1])
plt.show()

# %% [markdown]
# `busiest_expert` is among the metrics of every MoE model that `fit` trains, as are `balance` (the loss itself, without
# its weight) and `idle_experts`: worth a look in every training. A batch here has 512 tokens, hence the flicker.
#
# ## Cure 2: DeepSeek's correction bias
#
# DeepSeek-V3 adds a bias to each expert's score, *for the choice only*: what an expert counts is still its own score.
# After each step the bias of overloaded experts goes down by a fixed rate, and that of the others up. There is no
# gradient in it, so that nothing pulls on the loss; the bias is no `nnx.Param` and no optimizer sees it. The option is
# `bias_rate`.

# %%
deepseek = models.DeepSeekV3Config(
    **shape, num_hidden_layers=1, first_k_dense_replace=0, intermediate_size=32, moe_intermediate_size=32,
    n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=2, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
still, still_loads = train(models.DeepSeekV3(deepseek, quick, rngs=nnx.Rngs(0)))
moving, moving_loads = train(models.DeepSeekV3(deepseek, quick, rngs=nnx.Rngs(0)), bias_rate=0.01)

fig, axes = plt.subplots(1, 2, figsize=(11, 2.5), layout="constrained")
plot.over_steps(still_loads[:, 0], ax=axes[0]).set_title("bias fixed at 0")
plot.over_steps(moving_loads[:, 0], ax=axes[1]).set_title("bias_rate=0.01")
plt.show()

# %% [markdown]
# What the rule has made of the bias: those below 0 would be chosen too often without it, those above 0 too seldom.

# %%
bias = moving.model.stacks[0].layers[0].moe.router.bias[...]
plot.bars({f"expert {i}": value for i, value in enumerate(np.asarray(bias).tolist())}, "correction bias", form="{:.2f}")
plt.show()

# %% [markdown]
# Did balancing cost anything? Cross-entropy, without the balance term, in all four trainings:

# %%
runs = {
    "Mixtral": alone,
    "Mixtral, balance loss": balanced,
    "DeepSeek-V3": still,
    "DeepSeek-V3, moving bias": moving,
}
plot.history({name: run.history for name, run in runs.items()}, "cross_entropy")
plt.show()
for name, run in runs.items():
    last = run.history[-20:]
    loss, busiest = (np.mean([step[metric] for step in last]) for metric in ("cross_entropy", "busiest_expert"))
    print(f"{name:26} cross-entropy {loss:.2f}, busiest expert {busiest:.1f} times the mean")

# %% [markdown]
# In a task this small every cure is free. What it buys is capacity: all eight experts learn, and all devices work.
#
# `nnxmoe.moe.balance` has more losses of the kind (DeepSeek's within a sequence, MaxText's): pass one as
# `Objective(balance_loss=…)`. Notebook 5 shows what happens when the experts live on different devices.
