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
# # 7 · Many prompts, drafts, and an evaluation
#
# **What you learn**
#
# - how to continue many prompts of any lengths, and what comes back;
# - how an engine shares a batch between requests that begin and end on their own;
# - how drafts save steps without changing one id, and when they pay;
# - how to measure a model: an exam of your own, and log-probabilities of given answers.

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

import matplotlib.pyplot as plt
import numpy as np

import nnxmoe
from nnxmoe import Engine, Prefix, PromptLookup, RequestOptions, Sampling, models, plot

plt.rcParams["figure.dpi"] = 110
nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time

model = nnxmoe.from_pretrained("demo")
tokenizer = nnxmoe.Tokenizer.from_pretrained("demo")

# %% [markdown]
# ## Many prompts in one call
#
# A prompt is a text, a chat, or token ids. Completions come in the order of the prompts; each says why it ended. The
# log-probabilities are those of the model itself, before any sampling option.

# %%
chat = [{"role": "user", "content": "What is the capital of Italy?"}]
for done in nnxmoe.complete(model, ["Tom has 11 nuts and", chat], max_new_tokens=24, logprobs=2):
    print(f"{done.finish:6} {len(done.ids):2} ids, log-probability {sum(done.logprobs):6.2f}: {done.text!r}")

# %% [markdown]
# Samples of one prompt differ; the same seed gives the same samples, whatever else is in the batch. Here is the place
# where two samples part, with the ids that the model held to be likely.

# %%
first, second = nnxmoe.complete(model, ["Anna has"], n=2, max_new_tokens=16, sampling=Sampling(), seed=3, logprobs=4)
place = next(i for i, (one, other) in enumerate(zip(first.ids, second.ids, strict=False)) if one != other)
print(repr(first.text), repr(second.text), sep="\n")
ax = plot.bars({repr(tokenizer.decode([i])): round(float(np.exp(p)), 3) for i, p in first.top[place]}, "probability")
ax.set_title(f"place {place}: the likeliest tokens")
plt.show()
# %% [markdown]
# ## An engine
#
# `complete` runs an `Engine`: a batch whose rows begin and end on their own. You can submit to it at any time, cancel,
# and look at what each step has made. A `Prefix` is read once for all requests that begin with it.

# %%
engine = Engine(model, slots=3, capacity=128)
opening = Prefix(tuple(tokenizer.encode("Tom has 11 nuts ")))
ends = ["and eats 2.", "and gives 3 to Anna.", "and finds 4 more.", "and 5 pears.", "but no"]
requests = [
    engine.submit([*opening.ids, *tokenizer.encode(end)], RequestOptions(6 + 3 * i), opening)
    for i, end in enumerate(ends)
]
history = []
while not all(request.done for request in requests):
    engine.step()
    history.append((engine.running, engine.waiting))
fig, ax = plt.subplots(figsize=(6, 2))
ax.step(range(len(history)), np.array(history), label=["rows in use", "waiting"])
ax.set(xlabel="step", ylabel="requests")
ax.legend()
plt.show()
# %% [markdown]
# ## Drafts
#
# A draft guesses the next ids, and the model checks all of them in one pass. `PromptLookup` guesses that what followed
# the newest ids before will follow again. What the model keeps is what it would have written anyway: compare the ids.

# %%
questions = [f"What is {a} + {b}?" for a in range(12, 20) for b in (7, 30)]
chats = [[{"role": "user", "content": question}] for question in questions]
options = {"max_new_tokens": 32, "logprobs": 0}
plain = list(nnxmoe.complete(model, chats, **options))
drafted = list(nnxmoe.complete(model, chats, draft=PromptLookup(4), **options))
assert [done.ids for done in plain] == [done.ids for done in drafted]
accepted = sum((np.array([done.accepted.get(n, 0) for n in range(5)]) for done in drafted), np.zeros(5, int))
ax = plot.bars({f"{n} accepted": int(times) for n, times in enumerate(accepted)}, unit="steps")
made = sum(len(done.ids) for done in plain)
ax.set_title(f"{made} ids in {int(accepted.sum()) + len(drafted)} steps instead of {made}")
plt.show()
# %% [markdown]
# Fewer steps are not less time: the ids of one step meet more experts, and the weights of these are read too. From the
# bytes and the operations of a step follows which share of the drafts must be right. `draft="auto"` chooses drafts, and
# refuses where they are not worth their time; with more rows in a batch, most experts are read anyway.

# %%
shapes = models.Mixtral(models.PRESETS["mixtral-8x7b"], rngs=None, dtype="bfloat16")  # without weights
for slots in (1, 4, 16):
    share = nnxmoe.break_even(shapes, PromptLookup(4), slots=slots)
    print(f"Mixtral-8x7B, {slots:2} rows, 4 drafts each: {share:.0%} of them must be right")

# %% [markdown]
# ## An evaluation
#
# An exam of your own is a loop. For the tasks of lm-evaluation-harness there is `nnxmoe eval MODEL --tasks …`.

# %%
pairs = [(a, b) for a in range(10, 60) for b in range(10, 40)]
asked = random.Random(0).sample(pairs, 60)
chats = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in asked]
answers = [done.text for done in nnxmoe.complete(model, chats, max_new_tokens=24, slots=16)]
right = [str(a + b) in answer for (a, b), answer in zip(asked, answers, strict=True)]
print(f"{sum(right)} of {len(right)} right; such as {answers[0]!r}")

# %% [markdown]
# `score` gives the log-probabilities of texts that are already there: of a right and of a wrong answer, say.

# %%
question = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 + 30?"}], add_generation_prompt=True)
good, bad = nnxmoe.score(model, [(question, "12 + 30 = 42."), (question, "12 + 30 = 41.")])
print(f"right: {good.total:.2f}, wrong: {bad.total:.2f}; perplexity {good.perplexity:.2f} and {bad.perplexity:.2f}")
assert good.total > bad.total
