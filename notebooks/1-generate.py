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
# # 1 · Load a model and let it write
#
# **What you learn**
#
# - how a checkpoint becomes a model, and how to see that nothing was lost on the way;
# - what a forward pass returns;
# - what a cache holds, and why decoding with one is cheap, for full attention, a sliding window and DeepSeek's latents;
# - what each knob of `nnxmoe.Sampling` does to the next token;
# - how to stream text and how to chat.
#
# Everything runs on a laptop's CPU: nnxmoe comes with a tiny Mixtral (half a million parameters) in the layout of the
# Hugging Face hub. With `"mistralai/Mixtral-8x7B-v0.1"` or a folder of yours in its place the same lines work.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe import models, plot

nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
plt.rcParams["figure.dpi"] = 110

# %% [markdown]
# ## Load
#
# `from_pretrained` reads `config.json`, builds the model's shapes, and fills every parameter from the safetensors file.
# What happened to each tensor stands in `model.load_report` (print it whole to see the speed as well). A parameter
# without a tensor is an error; nothing keeps a random value.

# %%
model = nnxmoe.from_pretrained("demo")
tokenizer = nnxmoe.Tokenizer.from_pretrained("demo")

report, config = model.load_report, model.config
print(f"{type(model).__name__}: {config.num_hidden_layers} layers of {config.num_local_experts} experts,", end=" ")
print(f"{config.num_experts_per_tok} for each token")
print(f"{len(report.loaded)} tensors, {report.bytes_read / 1e6:.1f} MB")
print(f"missing {report.missing}, unexpected {report.unexpected}, casts {dict(report.casts)}")

# %% [markdown]
# A model is a tree of `flax.nnx` modules: no registry, no hidden state. Where do the parameters sit?

# %%
sizes = {}
for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    parts = [part for part in ("embed", "attention", "router", "experts") if part in path]
    sizes[parts[0] if parts else "norms"] = sizes.get(parts[0] if parts else "norms", 0) + parameter.get_value().size
plot.bars(sizes, "parameters", form="{:,.0f}")
plt.show()

# %% [markdown]
# ## One forward pass
#
# `model(tokens)` takes ids `[B, T]`. Logits are float32 `[B, T, V]`; routing and hidden states are returned when you
# ask for them. The chat template is the checkpoint's own.

# %%
question = [{"role": "user", "content": "What is 47 + 38?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
ids = np.array([tokenizer.encode(prompt, add_special_tokens=False)])
out = model(ids, return_routing=True, return_hidden=True)

print(prompt)
print("tokens ", ids.shape)
print("logits ", out.logits.shape, out.logits.dtype)
print("hidden ", len(out.hidden), "x", out.hidden[0].shape)
print("routing", {layer: routing.experts.shape for layer, routing in out.routing.items()})

# %% [markdown]
# `generate` appends tokens, here greedily (no sampling), until the checkpoint's end token.

# %%
new = nnxmoe.generate(model, ids, max_new_tokens=16)
print(tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True))

# %% [markdown]
# How sure was it? One pass over a text gives the probability of every token after those before it. In a story most
# tokens are nearly certain; where it could go on in many ways (who, where, what) they are not.

# %%
story = nnxmoe.generate(model, [tokenizer.encode("Once upon a time")], max_new_tokens=20)
probabilities = jax.nn.softmax(model(story[:, :-1]).logits[0], axis=-1)
chosen = {}
for place in range(4, story.shape[1]):
    piece = tokenizer.decode(story[0, place : place + 1])
    chosen[f"{place}: {piece!r}"] = float(probabilities[place - 1, story[0, place]])
plot.bars(chosen, "probability of the chosen token", form="{:.2f}")
plt.show()

# %% [markdown]
# ## The cache
#
# Without memory, every new token costs a pass over the whole text. A cache keeps what later tokens attend to. It is a
# plain pytree: you pass it in, and get the next one back. `cache.layers[stack][index].buffers` are the arrays of one
# layer, here its keys and values. Let us read the prompt in two halves and compare with the pass above.

# %%
cache = model.empty_cache(batch=1, capacity=32)
first = model(ids[:, :7], cache=cache)
second = model(ids[:, 7:], cache=first.cache)
halves = jnp.concatenate([first.logits, second.logits], axis=1)

keys, values = second.cache.layers[0][0].buffers  # of stack 0, layer 0
print(f"keys of a layer {keys.shape} {keys.dtype}: batch, key heads, slots, head width")
print(f"{int(second.cache.length[0])} of {second.cache.capacity} slots are taken")
print("the same next tokens:", bool((halves.argmax(-1) == out.logits.argmax(-1)).all()))

# %% [markdown]
# What a cache costs depends on the attention. Three kinds, in models of the same width and number of heads (made
# without `rngs` they are shapes without values, which is all that sizes need):
#
# - **Mixtral**: keys and values of every token, for each of its key heads (fewer than query heads);
# - **Mixtral with a sliding window**: a *ring* with as many slots as the window is wide, however long the text: token
#   `i` overwrites slot `i % window`;
# - **DeepSeek-V3**: one *latent* a token, from which all heads make their keys and values.

# %%
shape = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
mixtral = {**shape, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 4}
full = models.Mixtral(models.MixtralConfig(**mixtral), rngs=None)
window = models.Mixtral(models.MixtralConfig(**mixtral, sliding_window=128), rngs=None)
latent = models.DeepSeekV3(
    models.DeepSeekV3Config(
        **shape, num_key_value_heads=8, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ),
    rngs=None,
)  # fmt: skip


def kilobytes(model, capacity):
    """Of the layers' caches; `eval_shape` asks for the shapes and allocates nothing."""
    layers = jax.eval_shape(lambda: model.empty_cache(1, capacity)).layers
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(layers)) / 1e3


fig, ax = plt.subplots(figsize=(6, 3))
ax.set_prop_cycle(color=plot.PALETTE)
lengths = [64, 128, 256, 512, 1024]
for name, one in {"keys and values": full, "a ring of 128": window, "latents": latent}.items():
    ax.plot(lengths, [kilobytes(one, count) for count in lengths], "o-", label=name)
ax.set(xlabel="tokens the cache can hold", ylabel="kB per row")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# And what a ring holds. Token `i` is stored in slot `i % 8`, so the token in each slot follows from `cache.length`, the
# number of tokens that each row has stored. The slots that six tokens at a time are written to, in a ring of 8:

# %%
tiny = models.MixtralConfig(**{**mixtral, "num_hidden_layers": 1}, sliding_window=8)
small = models.Mixtral(tiny, rngs=nnx.Rngs(0))
cache, tokens = small.empty_cache(batch=1, capacity=64), np.arange(18)[None]
for start in (0, 6, 12):
    old_keys, _ = cache.layers[0][0].buffers
    cache = small(tokens[:, start : start + 6], cache=cache).cache
    keys, _ = cache.layers[0][0].buffers
    written = (keys != old_keys).any(axis=(0, 1, 3))
    print(f"after {int(cache.length[0]):2} tokens: just written, slots {np.flatnonzero(written)}")

# %% [markdown]
# `generate` and `stream` do all of this themselves: one program for the prompt, one for a token, the cache written in
# place. A prompt is read in chunks of 64 or 512 tokens, and the cache has room for 512, 768, 1024, … tokens, so that
# another length seldom compiles anything.
#
# ## Sampling
#
# `nnxmoe.Sampling` is a small frozen object; `None` means greedy. To see what a knob does, let the model finish one
# beginning 400 times with one token each (a batch of 400 equal rows, each with randomness of its own) and count the
# eight tokens that the model believes in most, the likeliest on top.

# %%
start = np.array([tokenizer.encode("Once upon a time there was a little")])
samplings = {
    "temperature 1": nnxmoe.Sampling(min_p=1e-6),
    "temperature 2": nnxmoe.Sampling(temperature=2.0, min_p=1e-6),
    "top_k 3": nnxmoe.Sampling(temperature=2.0, top_k=3),
    "top_p 0.5": nnxmoe.Sampling(temperature=2.0, top_p=0.5),
    "min_p 0.5": nnxmoe.Sampling(temperature=2.0, min_p=0.5),
}
drawn = {
    name: nnxmoe.generate(model, np.repeat(start, 400, axis=0), max_new_tokens=1, sampling=sampling)[:, -1]
    for name, sampling in samplings.items()
}
likeliest = np.argsort(-model(start).logits[0, -1])[:8]
fig, axes = plt.subplots(1, len(drawn), figsize=(11, 2.6), sharey=True, sharex=True, layout="constrained")
for ax, (name, tokens) in zip(axes, drawn.items(), strict=True):
    counts = {tokenizer.decode([token]).strip(): int((tokens == token).sum()) for token in likeliest}
    plot.bars({**counts, "(others)": len(tokens) - sum(counts.values())}, ax=ax)
    ax.set_title(name, fontsize=10)
plt.show()

# %% [markdown]
# From left to right: what the model believes; flattened by a temperature of 2, which lets odd words in; and three ways
# to keep the odd words out again: only the three likeliest; the likeliest that together reach one half; those at least
# half as likely as the best, which are many here, since about ten animals are equally likely. (`repetition_penalty` is
# the fifth knob: it makes tokens seen before less likely.)
#
# The same seed gives the same text, always:

# %%
sampling = nnxmoe.Sampling(temperature=1.2, top_k=20)
for seed in (1, 1, 2):
    text = "".join(nnxmoe.stream(model, tokenizer, "Once upon a time", max_new_tokens=24, sampling=sampling, seed=seed))
    print(f"seed {seed}: Once upon a time{text} …")

# %% [markdown]
# ## Stream and chat
#
# `stream` yields pieces of text as they are made, never half a character. A chat is a list of messages; the template
# makes a prompt of it, and the answer is appended.

# %%
messages = []
for question in ["What is the capital of Italy?", "How much is 8 plus 5?", "Count from 3 to 8."]:
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages[-1:], add_generation_prompt=True, tokenize=True)
    pieces = list(nnxmoe.stream(model, tokenizer, prompt, max_new_tokens=24))
    messages.append({"role": "assistant", "content": "".join(pieces)})
    print(f"{question}\n    {' | '.join(pieces)}")

# %% [markdown]
# Two commands do the same without a line of Python: `nnxmoe generate demo "Once upon a time"` and `nnxmoe chat
# demo`.
#
# Next: notebook 2 teaches this model something new; notebook 3 looks at what its experts do.
