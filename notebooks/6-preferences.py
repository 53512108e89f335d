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
# # 6 · A loss of your own: learning from preferences with DPO
#
# **What you learn**
#
# - how to train with any function of the model and a batch;
# - how to give `fit` batches with fields of their own;
# - how adapters make the reference model of DPO free: it is the same model without them.
#
# The embedded demo answers in sentences: "What is the capital of France?" with "The capital of France is Paris.". We
# would like the name alone. We do not write down what is wrong with a sentence; we show pairs of answers, and say which
# one we like better. *Direct preference optimisation* (Rafailov et al. 2023) makes the preferred answer likelier, and
# the other one less likely, than they are to the model as it was.

# %%
# Needs `pip install 'nnxmoe[notebooks]'`. Where that is missing (Colab, Kaggle, a new environment), this cell installs
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
        wanted[0] = wheels[0] + ("[cuda]" if shutil.which("nvidia-smi") else "")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    importlib.invalidate_caches()

# %%
import random

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe import plot, train

nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
plt.rcParams["figure.dpi"] = 110

# %%
strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), compute_dtype="float32")  # one stacked layer: compiles fast
model, tokenizer = nnxmoe.from_pretrained("demo", strategy=strategy), nnxmoe.Tokenizer.from_pretrained("demo")
train.lora.add(model, rank=8, rngs=nnx.Rngs(0))
COUNTRIES = """Argentina Austria Belgium Bulgaria Canada Chile China Cuba Denmark Egypt England Finland France Germany
    Ghana Greece Hungary India Ireland Italy Japan Kenya Morocco Nepal Nigeria Norway Peru Poland Portugal Romania"""
countries = random.Random(0).sample(COUNTRIES.split(), 30)
trained, held = countries[:24], countries[24:]


def asked(country):
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)


def answer(model, country):
    new = nnxmoe.generate(model, [asked(country)], max_new_tokens=20)[0, len(asked(country)) :]
    return tokenizer.decode(new, skip_special_tokens=True)


sentences = {country: answer(model, country) for country in countries}
capitals = {country: sentence.rpartition(" is ")[2].rstrip(".") for country, sentence in sentences.items()}
print(sentences["France"], "|", capitals["France"])

# %% [markdown]
# ## Pairs
#
# A batch is a dict of arrays with the same number of rows; their names are ours. For each question there are the tokens
# of both chats, and a mask of the answer's, which are the only ones that count.

# %%
END = tokenizer.encode("<|end|>", add_special_tokens=False)
LENGTH = 40


def row(prompt, text):
    ids = prompt + tokenizer.encode(text, add_special_tokens=False) + END
    tokens, counts = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.float32)
    tokens[: len(ids)], counts[len(prompt) : len(ids)] = ids, 1
    return tokens, counts


def pairs(countries):
    batch = {}
    for name, answers in (("liked", capitals), ("disliked", sentences)):
        rows = [row(asked(country), answers[country]) for country in countries]
        batch[name], batch[f"{name}_counts"] = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    return batch


batches = [pairs(trained[start : start + 6]) for start in range(0, 24, 6)]
print({name: array.shape for name, array in batches[0].items()})

# %% [markdown]
# ## The loss
#
# A function of a model and a batch that returns a scalar. The reference is `lora.without(model)`: the same arrays, the
# adapters left out. There is no second copy of the weights, and no gradient flows into it: only adapters are trained.

# %%
BETA = 0.1


def log_probability(model, tokens, counts):
    """Of the answers of all rows, [B]."""
    each = jax.nn.log_softmax(model(tokens[:, :-1]).logits)
    chosen = jnp.take_along_axis(each, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(chosen * counts[:, 1:], axis=1)


def margins(model, batch):
    """How much likelier each preferred answer has become, compared to the other one, [B]."""
    reference = train.lora.without(model)
    gains = []
    for name in ("liked", "disliked"):
        given = batch[name], batch[f"{name}_counts"]
        gains.append(log_probability(model, *given) - log_probability(reference, *given))
    return gains[0] - gains[1]


def dpo(model, batch):
    return -jnp.mean(jax.nn.log_sigmoid(BETA * margins(model, batch)))


# %% [markdown]
# ## Training
#
# `fit` does the rest as for any other loss: it compiles one step, saves checkpoints if it is given a folder, and can be
# stopped and continued. Before the first step the model equals its reference: every margin is 0, the loss is log 2.

# %%
options = {"objective": dpo, "evaluate": train.Evaluation([pairs(held)], every=4)}
fitted = train.fit(model, batches, optimizer=optax.adam(1e-3), steps=24, **options)
print(f"loss {fitted.history[0]['loss']:.3f} -> {fitted.history[-1]['loss']:.3f}")
plot.history(fitted.history, ["loss", "evaluation"])
plt.show()

# %% [markdown]
# ## After
#
# Six countries that it has not been trained on:

# %%
for country in held:
    print(f"{country}: {answer(fitted.model, country)}")

# %% [markdown]
# The model kept its knowledge and changed its manner. Any other loss is written in the same way: distillation from
# another model, an entropy bonus, a penalty on experts; `nnxmoe.train.Objective` is the built-in one, next-token
# cross-entropy with the balance losses of notebook 3.
