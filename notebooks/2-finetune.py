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
# # 2 · Fine-tune with LoRA, and take the model back to Hugging Face
#
# **What you learn**
#
# - how lines of chat become packed rows of tokens, and which of them the loss counts;
# - how to give a model adapters, also one for every expert, and train nothing else;
# - that a run that stops, on purpose or not, goes on to the bit;
# - how to merge the adapters, or keep them as a file that `peft` reads, and load the result in `transformers`.
#
# The model is the tiny Mixtral that comes with nnxmoe. It has never been asked to write digits backwards; after some
# seconds of training it can. With a hub id in the place of `"demo"` the same lines tune a large model.

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
import importlib.util
import json
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe import plot, train

plt.rcParams["figure.dpi"] = 110
nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
WORK = Path(tempfile.mkdtemp())  # what this notebook writes
DATA = WORK / "backwards.jsonl"

# %% [markdown]
# ## A task, and how well the model does it now
#
# Ten thousand questions can be asked; the file that we will train on has a fifth of them. The exam draws others.

# %%
strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), compute_dtype="float32")  # one stacked layer: compiles fast
model = nnxmoe.from_pretrained("demo", strategy=strategy)
tokenizer = nnxmoe.Tokenizer.from_pretrained("demo")


def chat(digits):
    asked = {"role": "user", "content": f"Reverse {' '.join(digits)}."}
    return [asked, {"role": "assistant", "content": " ".join(reversed(digits))}]


rng = random.Random(0)
drawn = rng.sample(range(10_000), 2_050)
questions = [f"{number:04d}" for number in drawn]
with DATA.open("w") as file:
    file.writelines(json.dumps({"messages": chat(digits)}) + "\n" for digits in questions[50:])
print(DATA.read_text().splitlines()[0])


# %%
def exam(model, asked=tuple(questions[:50])):
    """The share of right answers, and the first few as they were written."""
    prompts = [tokenizer.apply_chat_template(chat(digits)[:1], add_generation_prompt=True) for digits in asked]
    ids = np.array([tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts])
    written = nnxmoe.generate(model, ids, max_new_tokens=10)[:, ids.shape[1] :]
    answers = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in written]
    right = [answer == chat(digits)[1]["content"] for answer, digits in zip(answers, asked, strict=True)]
    return np.mean(right), dict(zip(asked[:3], answers[:3], strict=True))


before, said = exam(model)
print(f"{before:.0%} right, such as {said}")

# %% [markdown]
# ## Data
#
# `train.batches` renders each chat with the tokenizer's own template, packs several into a row, and marks what the loss
# counts: what the assistant says, and the token that ends it. `segment_ids` keep the chats of a row apart in attention;
# loss and gradients are those of the same chats one by one.

# %%
data = train.batches(DATA, tokenizer, batch_size=8, seq_len=128, seed=0)
batch = next(train.batches(DATA, tokenizer, batch_size=8, seq_len=128, seed=0))
print({name: (array.shape, str(array.dtype)) for name, array in batch.items()})

shown = zip(batch["tokens"][0, :44].tolist(), batch["loss_mask"][0, :44], strict=True)
print("".join(f"[{tokenizer.decode([token])}]" if learnt else tokenizer.decode([token]) for token, learnt in shown))

# %% [markdown]
# ## Adapters
#
# [LoRA](https://arxiv.org/abs/2106.09685) adds to a matrix the product of two thin ones and trains only these.
# `lora.add` puts them on attention, on feed-forward networks and **on every expert**, and leaves the router alone. At
# first the product is zero: the model computes what it did.

# %%
train.lora.add(model, rank=8, rngs=nnx.Rngs(0))

adapters = nnx.to_flat_state(nnx.state(model, train.lora.LoRAParam))
for path, variable in adapters[:6]:
    print(".".join(map(str, path)), variable.shape)
trained = sum(variable.size for _, variable in adapters)
whole = sum(variable.size for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)))
print(f"{trained:,} of {whole:,} parameters are trained")

# %% [markdown]
# ## Train, stop, go on
#
# `fit` takes any iterable of batches and any optax optimizer. With `checkpoint=` it saves what a run needs to go on:
# the adapters, the optimizer's moments, the step, random keys, and the position in the data. Here a callback ends the
# run after 40 steps, as a kill would; the same call then continues with step 41.

# %%
run = {
    "optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(5e-3, 80))),
    "steps": 80,
    "checkpoint": train.Checkpoints(WORK / "run", every=20),
}
first = train.fit(model, data, callbacks=[lambda progress: progress.step == 40], **run)
print(f"stopped after step {first.history[-1]['step']}")

again = train.batches(DATA, tokenizer, batch_size=8, seq_len=128, seed=0)
second = train.fit(model, again, **run)
print(f"went on with step {second.history[0]['step']}")

# %%
history = first.history + second.history
_, axes = plt.subplots(1, 2, figsize=(10, 3))
plot.history(history, "cross_entropy", ax=axes[0]).set_yscale("log")
plot.history(history, "gradient_norm", ax=axes[1])
plt.show()

# %% [markdown]
# ## After

# %%
tuned = second.model
after, said = exam(tuned)
print(f"{before:.0%} -> {after:.0%} right, such as {said}")

# %% [markdown]
# Did it change which experts are used? The router was not trained, but what it reads was.

# %%
probe = batch["tokens"][:, :64], batch["segment_ids"][:, :64]
loads = {
    name: one(probe[0], attention_mask=probe[1] > 0, segment_ids=probe[1], return_routing=True).routing
    for name, one in (("before", nnxmoe.from_pretrained("demo")), ("after", tuned))
}
_, axes = plt.subplots(1, 2, figsize=(10, 2.4))
for ax, (name, routing) in zip(axes, loads.items(), strict=True):
    plot.load(routing, ax=ax).set_title(name)
plt.show()

# %% [markdown]
# ## Back to Hugging Face
#
# Two ways. The adapter alone, in PEFT's format, a fraction of the model; or merged into the weights, as a folder that
# `transformers` loads: the sum is made in float32 and rounded once to the dtype of the weights.

# %%
train.lora.save(tuned, WORK / "adapter")
train.lora.merge(tuned)
nnxmoe.save_pretrained(tuned, WORK / "merged")
for folder in ("adapter", "merged"):
    print(folder, {path.name: path.stat().st_size for path in sorted((WORK / folder).iterdir())})

merged = nnxmoe.from_pretrained(WORK / "merged")
print(f"merged, saved and loaded: {exam(merged)[0]:.0%} right")

# %%
reloaded = nnxmoe.from_pretrained("demo")
train.lora.load(reloaded, WORK / "adapter")
print(f"the demo with the adapter's file: {exam(reloaded)[0]:.0%} right")

# %% [markdown]
# And in `transformers`, where that is installed:

# %%
if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(WORK / "merged")
    their_tokenizer = AutoTokenizer.from_pretrained(WORK / "merged")
    asked = chat(questions[0])[:1]
    prompt = their_tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        written = theirs.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"transformers: {questions[0]} -> {their_tokenizer.decode(written, skip_special_tokens=True)}")
    assert their_tokenizer.decode(written, skip_special_tokens=True) == chat(questions[0])[1]["content"]
else:
    print("transformers and torch are not installed here")

# %% [markdown]
# ## On four bits
#
# [QLoRA](https://arxiv.org/abs/2305.14314) puts the same adapters on a base whose weights are int4 codes, with a scale
# for every 16 of them. Only the adapters are trained; merging them gives floats.

# %%
base = nnxmoe.from_pretrained("demo", strategy=strategy, quantize=nnxmoe.Int4(group=16))
print({kind: f"{size / 1e3:.0f} kB" for kind, size in base.load_report.weights.items()})
train.lora.add(base, rank=8, rngs=nnx.Rngs(0))
again = train.batches(DATA, tokenizer, batch_size=8, seq_len=128, seed=0)
on_codes = train.fit(base, again, optimizer=run["optimizer"], steps=80)
print(f"trained on int4: {exam(on_codes.model)[0]:.0%} right")

# %% [markdown]
# ## The same from the command line
#
# ```
# nnxmoe finetune demo backwards.jsonl --out tuned --lora 8 --learning-rate 5e-3 --steps 80 --seq-len 128
# ```
#
# Killed and given again, it goes on; at the end `tuned` is a folder for `from_pretrained`, here and in `transformers`.
#
# Next: notebook 6 trains with a loss of your own.
