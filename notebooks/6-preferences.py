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
# # 6 · Learning from preferences with DPO
#
# **What you learn**
#
# - how to train on pairs of answers, of which one is liked better;
# - how adapters make the reference model of DPO free: it is the same model without them;
# - how to write another loss of pairs, or any loss of a model and a batch.
#
# The embedded demo answers in sentences: "What is the capital of France?" with "The capital of France is Paris.". We
# would like the name alone. We do not write down what is wrong with a sentence; we show pairs of answers, and say which
# one we like better. *Direct preference optimisation* (Rafailov et al. 2023) makes the preferred answer likelier, and
# the other one less likely, than they are to the model as it was.

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
import random

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
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
# Each has a prompt and two answers, as in the data sets for TRL; a file of JSON lines would do as well. In a batch, the
# two rows of a pair stand side by side. Only the tokens of the answers count.


# %%
def pairs(countries):
    def said(text):
        return [{"role": "assistant", "content": text}]

    ask = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in countries]
    return [
        {"prompt": prompt, "chosen": said(capitals[country]), "rejected": said(sentences[country])}
        for prompt, country in zip(ask, countries, strict=True)
    ]


sizes = {"batch_size": 6, "seq_len": 40}
batches = train.preferences(pairs(trained), tokenizer, **sizes)
measured = list(train.preferences(pairs(held), tokenizer, **sizes, epochs=1))
print({name: array.shape for name, array in measured[0].items()})

# %% [markdown]
# ## Training
#
# The reference is `lora.without(model)`: the same arrays without the adapters. There is no second copy of the weights,
# and no gradient flows into it. Before the first step the model equals its reference: every margin is 0, the loss is
# log 2. `nnxmoe finetune demo pairs.jsonl --preferences --lora 8 --out tuned` does the same with a file.

# %%
options = {"objective": train.DPO(train.lora.without), "evaluate": train.Evaluation(measured, every=4)}
fitted = train.fit(model, batches, optimizer=optax.adam(1e-3), steps=24, **options)
print(f"loss {fitted.history[0]['loss']:.3f} -> {fitted.history[-1]['loss']:.3f}")
plot.history(fitted.history, ["loss", "eval_loss", "rewards/margins"])
plt.show()

# %% [markdown]
# ## After
#
# Six countries that it has not been trained on:

# %%
for country in held:
    print(f"{country}: {answer(fitted.model, country)}")

# %% [markdown]
# The model kept its knowledge and changed its manner.
#
# ## Losses of your own
#
# `train.DPO(…, loss=train.ipo_loss)` minimises another function of the pairs, and so does one of yours:
# `(ratios, tokens, beta) -> losses`, from how much likelier than to the reference both answers are. An objective may
# also be any function of the model and the batch, whose arrays then have names and shapes of your choice: for
# distillation, an entropy bonus, a penalty on experts. This one is DPO again, by hand:


# %%
def by_hand(model, batch):
    def log_probabilities(model):
        rows, counts = (batch[name].reshape(-1, 40) for name in ("tokens", "loss_mask"))
        each = jax.nn.log_softmax(model(rows[:, :-1]).logits)
        chosen = jnp.take_along_axis(each, rows[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(chosen * counts[:, 1:], axis=1).reshape(-1, 2)

    ratios = log_probabilities(model) - log_probabilities(train.lora.without(model))
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])))


print(f"{by_hand(fitted.model, measured[0]):.4f} = {fitted.history[-1]['eval_loss']:.4f}")
