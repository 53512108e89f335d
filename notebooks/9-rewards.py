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
# # 9 · Reinforcement learning with GRPO
#
# **What you learn**
#
# - how to train with a reward, a Python function that scores answers;
# - how `fit` samples the answers from the model that it trains;
# - how to measure whether sampler and trained model agree, and what the replay of experts changes.
#
# The embedded demo can add two-digit numbers: it answers "What is 47 + 38?" with "47 + 38 = 85.". It was never asked
# "What is the sum of 47 and 38?", and mostly answers "Sorry, that is too large for me.". *Group relative policy
# optimization* (GRPO; Shao et al. 2024) samples several answers to each question. Answers that are better than the
# group's mean become more likely.

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
import itertools
import random
import re

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe import train

nnxmoe.compile_cache()  # programs that were compiled once are read from a folder next time
plt.rcParams["figure.dpi"] = 110

# %% [markdown]
# ## Questions and reward
#
# A record has a prompt and any other fields. The reward function gets the completions of all samples and the fields of
# their records. It returns one number per sample.


# %%
def record(a, b):
    return {"prompt": [{"role": "user", "content": f"What is the sum of {a} and {b}?"}], "total": a + b}


def is_correct(completions, total):
    return [
        float(re.search(rf"\b{number}\b", text) is not None) for text, number in zip(completions, total, strict=True)
    ]


pairs = random.Random(0).sample(list(itertools.product(range(10, 100), repeat=2)), 500)
records = [record(a, b) for a, b in pairs]
held_out, trained_on = records[:100], records[100:]


def accuracy(model):
    prompts = [record["prompt"] for record in held_out]
    answers = [done.text for done in nnxmoe.complete(model, prompts, tokenizer, max_new_tokens=16, slots=50)]
    return np.mean(is_correct(answers, [record["total"] for record in held_out])), answers


strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), compute_dtype="float32")  # one stacked layer: compiles fast
model, tokenizer = nnxmoe.from_pretrained("demo", strategy=strategy), nnxmoe.Tokenizer.from_pretrained("demo")
before, answers = accuracy(model)
print(f"accuracy {before:.0%}:", *answers[:3], sep="\n  ")

# %% [markdown]
# ## Training
#
# In each step, the model answers 16 questions 8 times each, 128 samples. The loss is GRPO's clipped policy gradient,
# equal to TRL's. `train.GSPO(…)` has one ratio per answer instead of one per token. `help(train.GRPO)` lists the other
# variants: Dr. GRPO, DAPO, RLOO, GDPO, a KL penalty, importance sampling.

# %%
STEPS = 12
objective = train.GRPO(is_correct, group_size=8, max_new_tokens=16, seq_len=48)


def fit(seed):
    prompts = train.prompts(trained_on, tokenizer, batch_size=16, seq_len=32, seed=seed)
    return train.fit(model, prompts, objective=objective, optimizer=optax.adam(5e-5), steps=STEPS, seed=seed)


runs = [fit(seed) for seed in range(2)]
after = [accuracy(run.model)[0] for run in runs]
print(f"accuracy {before:.0%} -> {', '.join(f'{share:.0%}' for share in after)}")
for seed, run in enumerate(runs):
    plt.plot(range(1, STEPS + 1), [step["reward"] for step in run.history], label=f"seed {seed}")
plt.xlabel("step")
plt.ylabel("reward: share of correct samples")
plt.legend()
plt.show()

# %%
print(*accuracy(runs[0].model)[1][:3], sep="\n")

# %% [markdown]
# ## Do sampler and trained model agree?
#
# The policy gradient assumes that the answers come from the trained model. Elsewhere sampler and trainer are two
# programs, whose logits differ by rounding. In a mixture-of-experts model, a rounding error can also select a different
# expert. Here both are the same model. `kl/rollout` is the KL divergence between them per token, measured on the
# samples. In float32 it is zero up to rounding:

# %%
print(f"largest kl/rollout: {max(abs(step['kl/rollout']) for step in runs[0].history):.1e}")

# %% [markdown]
# In bfloat16, the sampler reads its cache token by token, and the trained model reads whole rows. The sums are rounded
# differently. With `replay=True` (the default), the trained model uses the experts that the sampler selected (R3, Ma et
# al. 2025). The weights of these experts are computed by the trained model, so the router is trained too.
# `routing/flipped` is the share of tokens per layer for which the trained router would select other experts.
#
# The demo has 8 experts per layer with clear preferences, so few tokens flip. A model with random weights and more
# experts shows what replay changes:

# %%
fields = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 16}
fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4}
config = nnxmoe.config_from_hf({"model_type": "qwen3_moe", **fields})
strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), compute_dtype="bfloat16")
random_model = nnxmoe.models.Qwen3Moe(config, strategy, rngs=nnx.Rngs(0))


def even_ids(completions, **fields):  # without a tokenizer, completions are token ids
    return [np.mean(np.asarray(ids) % 2 == 0) for ids in completions]


for replay in (True, False):
    objective = train.GRPO(even_ids, group_size=4, max_new_tokens=24, seq_len=32, eos_token_id=None, replay=replay)
    questions = [[{"prompt": [number, 7, 2 * number]} for number in range(4)]]
    options = {"objective": objective, "optimizer": optax.adam(1e-3), "steps": 6}
    history = train.fit(random_model, questions, **options).history
    plt.semilogy(range(1, 7), [step["kl/rollout"] for step in history], label=f"replay={replay}")
    if replay:
        print(f"flipped: {np.mean([step['routing/flipped'] for step in history]):.2%}")
plt.xlabel("step")
plt.ylabel("kl/rollout in bfloat16")
plt.legend()
plt.show()

# %% [markdown]
# ## A real model on a GPU
#
# Replace the model, the tokenizer and the records. Adapters keep the weights in bfloat16, and are the reference of a KL
# penalty for free:
#
# ```python
# model = nnxmoe.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16")
# tokenizer = nnxmoe.Tokenizer.from_pretrained("Qwen/Qwen3-30B-A3B")
# train.lora.add(model, rank=16, rngs=nnx.Rngs(0))
# prompts = train.prompts("questions.jsonl", tokenizer, batch_size=32, seq_len=512)  # {"prompt": …, "answer": …}
# objective = train.GSPO(reward, group_size=8, max_new_tokens=1024, seq_len=1536, kl=0.01, reference=train.lora.without)
# fitted = train.fit(model, prompts, objective=objective, optimizer=optax.adam(1e-5), steps=400, checkpoint="run")
# train.lora.save(fitted.model, "adapter")  # for peft and vLLM
# ```
#
# On several devices, pass `mesh=nnxmoe.make_mesh(fsdp=2, expert=4)` to `fit`.
#
# ## Terms of Tunix and MaxText
#
# | here | Tunix 0.1.7 | MaxText 0.2.5 (`rl.yml`) |
# |---|---|---|
# | `train.fit(…, objective=train.GRPO(reward))` | `GRPOLearner(…).train(…)` | `train_rl` |
# | `train.GSPO(reward)` | `loss_algo="gspo-token"` | `loss_algo: gspo-token` |
# | `group_size` | `num_generations` | `num_generations` |
# | `kl`, `reference` | `beta`, reference role | `grpo_beta` |
# | `clip=train.Clip(low, high)` | `epsilon`, `epsilon_high` | `grpo_epsilon`, `epsilon_high` |
# | `aggregate=train.sequence_mean` | `sequence-mean-token-mean` | `sequence-mean-token-mean` |
# | `aggregate=train.token_mean` | `token-mean` | `token-mean` |
# | `batch_size`, `minibatches` | `mini_batch_size` | `batch_size` |
# | `max_new_tokens` | `max_tokens_to_generate` | `max_target_length` |
# | `temperature` | `temperature` | `decode_sampling_temperature` |
# | `accumulate` of `fit` | `train_micro_batch_size` | `train_micro_batch_size` |
# | `pack=True` | | `max_seq_token_per_tpu` |
# | each sample is used once | `num_iterations` | `num_iterations` |
# | one model on one mesh | actor and rollout engine | trainer and sampler devices |
