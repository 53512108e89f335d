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
# # 8 · From one GPU to a cluster: plan, compare, read the bill
#
# **What you learn**
#
# - how to ask whether a model fits on devices that you do not have, and what one step costs there;
# - how three meshes of the same 256 GPUs differ by almost a factor of two in time;
# - how to read the bill: bytes on one device, bytes that travel, over which link, and what the step waits for;
# - how to take the advice of a plan until the step fits.
#
# `nnxmoe.plan` computes with shapes alone, in a second or two, without an accelerator and without weights. Each figure
# says where it is from: parameters, moments and caches are exact; activations, traffic and time are estimates. Before
# you rent the devices, `nnxmoe plan … --compile` compiles the step for them and replaces the estimate of the memory.

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
from collections import defaultdict

import matplotlib.pyplot as plt

import nnxmoe
from nnxmoe import plot

plt.rcParams["figure.dpi"] = 110

# %% [markdown]
# ## One GPU
#
# Mixtral-8x7B is to answer eight people at once, each with a context of 4096 tokens. Is one H100 enough?

# %%
one = nnxmoe.plan("mixtral-8x7b", {"data": 1}, batch=8, seq=4096, on="h100", train=False)
print(one)

# %% [markdown]
# The weights alone are larger than the device. The step waits for the *memory*: to make one token per row it reads all
# that it holds, and the products take 1 % of that time. The last lines are the advice: each change was planned again.
#
# Two of them split the weights over two devices, and both halve what a device holds, but not at the same price. With
# `expert=2` each device keeps four of the eight experts of every layer and the tokens travel. With `fsdp=2` the
# weights travel, in every step, to make eight tokens.

# %%
answers = {"data": 1}, {"fsdp": 2}, {"expert": 2}, {"tensor": 2}
decoding = [nnxmoe.plan("mixtral-8x7b", mesh, batch=8, seq=4096, on="h100", train=False) for mesh in answers]


def name(plan):
    return ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"


times = {name(plan): {limiter: 1e3 * seconds for limiter, seconds in plan.times.items()} for plan in decoding}
for label, limits in times.items():
    print(f"{label:12}", ", ".join(f"{limiter} {value:7.3f} ms" for limiter, value in limits.items()))
plot.bars({name(plan): 1e3 * plan.seconds for plan in decoding}, "ms per step of 8 tokens", form="{:.0f}")
plt.show()

# %% [markdown]
# Rent two devices, with an `expert` axis. On them this line is what was planned:
#
# ```python
# mesh, dispatch = nnxmoe.make_mesh(expert=2), nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll())
# nnxmoe.from_pretrained("mistralai/Mixtral-8x7B-v0.1", mesh=mesh, strategy=nnxmoe.Strategy(dispatch=dispatch))
# ```
#
# ## A cluster: three meshes
#
# Now training, where a device also holds gradients and AdamW's moments: DeepSeek-V3, 671 billion parameters, on 256
# H100s in nodes of eight. One step takes 256 rows of 4096 tokens, one row per device. Three ways to use the devices:
#
# - `fsdp=256` shards every weight over all devices, and gathers each layer where it is needed;
# - `fsdp=32, expert=8` keeps the experts' axis inside a node, where links are nine times as fast;
# - `fsdp=8, expert=32` lets tokens cross nodes, so that fewer weights must.

# %%
rules = {**nnxmoe.RULES}  # dense kernels over fsdp only; the default (fsdp and expert) is the last change below
work = {"batch": 256, "seq": 4096, "on": "h100", "rules": rules}
meshes = {"fsdp": 256}, {"fsdp": 32, "expert": 8}, {"fsdp": 8, "expert": 32}
plans = {name(plan): plan for plan in (nnxmoe.plan("deepseek-v3", mesh, **work) for mesh in meshes)}
for label, plan in plans.items():
    fits = "fits" if plan.fits else "does not fit"
    print(f"{label:18} {plan.memory / 1e9:4.0f} GB, {fits}; {plan.seconds:5.1f} s per step, waits for {plan.limiter}")

# %% [markdown]
# None fits, and their times differ. Why? The bill has three pages.
#
# ## Page one: bytes on one device
#
# Parameters, moments and gradients are divided by the number of devices, as far as an axis of the mesh reaches them:
# more experts' devices leave less `fsdp` for the rest. Activations are those of one row, and of the rows that a device
# may *receive* from others for its experts. By default there is room for all of them, whatever the router does; with
# `fsdp=256` a device applies all 256 experts itself, and gathers their kernels to do so.

# %%
KEPT = ("parameters", "moments", "gradients", "activations")
held = {label: {kind: getattr(plan.bytes, kind) / 1e9 for kind in KEPT} for label, plan in plans.items()}
ax = plot.bars(held, "GB on one device", form="{:.0f}")
ax.axvline(plan.hardware.memory / 1e9, color="black", linestyle=":")
ax.set_title("dotted: the memory of one H100")
plt.show()

# %% [markdown]
# ## Page two: bytes that travel
#
# What one device receives in a step, by collective and mesh axis. An axis inside a node has NVLink; one that crosses
# nodes has the network, a ninth as fast: but what is gathered enters each node once, and the devices of a node that are
# on the axis share it. Devices are numbered with the last mesh axis fastest, so `expert` comes before `fsdp` where a
# node is filled.


# %%
def bill(plan):
    """TB that one device receives in a step, by collective, by what it carries, and by link."""
    sums = defaultdict(float)
    for one in plan.traffic:
        slowest = "network" if any(plan.routes[axis].far > 1 for axis in one.axes) else "node"
        sums[f"{one.kind} of {one.what} over {' x '.join(one.axes)} ({slowest})"] += one.bytes / 1e12
    return sorted(sums.items(), key=lambda pair: -pair[1])


for label, plan in plans.items():
    print(label)
    for line, size in bill(plan)[:4]:
        print(f"  {size:6.3f} TB  {line}")
links = {}
for label, plan in plans.items():
    links[label] = {"node": 0.0, "network": 0.0}
    for line, size in bill(plan):
        links[label]["network" if "(network)" in line else "node"] += size
plot.bars(links, "TB that one device receives in a step", form="{:.2f}")
plt.show()

# %% [markdown]
# With `fsdp=256` every device gathers all experts of all layers twice, since layers are computed again in the backward
# pass, and their gradients are scattered once: 5 TB through the network for the 4096 tokens of a device. An expert axis
# of eight divides that by eight, and pays with tokens that travel inside the node. But then each device of a node
# gathers other experts, and has its own adapter only, where with `fsdp=256` eight adapters bring in the same bytes. An
# expert axis of 32 divides them by four again, and pays with tokens on the network.
#
# ## Page three: time, and what the step waits for
#
# Compute, memory and network would overlap at best, so that the longest of them is the time of a step. Compute assumes
# that whole steps reach 38 % of the peak, as published runs did on such devices, which you can change: `--efficiency`,
# or `dataclasses.replace(hardware, …)`.

# %%
for label, plan in plans.items():
    parts = ", ".join(f"{limiter} {seconds:6.2f} s" for limiter, seconds in plan.times.items())
    busy = plan.times["compute"] / plan.seconds
    print(f"{label:18} {parts}: devices compute {busy:4.0%} of the time")
rates = {label: plan.work.tokens / plan.seconds for label, plan in plans.items()}
plot.bars(rates, "tokens per second", form="{:,.0f}")
plt.show()

# %% [markdown]
# ## Taking the advice
#
# The last mesh is the fastest. Its plan was made again with some changes; those that save memory are:

# %%
best = plans["fsdp 8, expert 32"]
print(*best.advice, sep="\n")

# %% [markdown]
# Much of the memory is room for received rows. Without `chunks`, a plan exchanges as many slices of sequences in turn
# as keep this room within eight times the even load, here four: `ChunkedExchange(RaggedAllToAll())` in a strategy. More
# slices take less, and drop nothing. `RaggedAllToAll(buffer_factor=1.25)` has room for a quarter more than an even
# load, and drops rows beyond it, which it counts (a balanced router seldom needs more; notebook 3 shows loads); it
# saves the one more forward pass of the experts that slices cost. And rules may name several axes: `embed` over `fsdp`
# and `expert` shards the parameters of attention over all devices too. Neither is enough alone. Together:

# %%
rules = {**nnxmoe.RULES, "embed": ("fsdp", "expert")}
steps = {
    "as planned first": best,
    "buffer 1.25": nnxmoe.plan("deepseek-v3", best.mesh, **work, buffer_factor=1.25),
    "embed over both": nnxmoe.plan("deepseek-v3", best.mesh, **work | {"rules": rules}),
    "both changes": nnxmoe.plan("deepseek-v3", best.mesh, **work | {"rules": rules}, buffer_factor=1.25),
}
held = {label: {kind: getattr(plan.bytes, kind) / 1e9 for kind in KEPT} for label, plan in steps.items()}
ax = plot.bars(held, "GB on one device", form="{:.0f}")
ax.axvline(best.hardware.memory / 1e9, color="black", linestyle=":")
ax.set_title("dotted: the memory of one H100")
plt.show()
final = steps["both changes"]
assert final.fits
print(final)

# %% [markdown]
# It fits by estimate, with 8 % to spare. That is not enough to rent by: steps that were compiled for H100 took 9 and
# 14 % more than their estimates (nnxmoe/apps/planning/README.md). Compile it first, with `compile_for="device"` or
# `--compile`; XLA needs no GPU for that. A plan draws its own bytes:

# %%
final.plot()
plt.show()

# %% [markdown]
# What would make it safer, and faster? The network is still the limit, so fewer bytes per token must travel: more
# tokens per device between two gathers. With 151 GB instead of 85, H200s have room for two rows each.

# %%
for on, batch in (("h100", 256), ("h200", 256), ("h200", 512)):
    plan = nnxmoe.plan("deepseek-v3", best.mesh, batch=batch, seq=4096, on=on, rules=rules, buffer_factor=1.25)
    rate = plan.work.tokens / plan.seconds
    print(f"{on}, {batch} rows: {plan.memory / 1e9:.0f} GB, {plan.times['network']:5.2f} s of network in", end=" ")
    print(f"{plan.seconds:5.2f} s per step; {1e12 / rate / 86400:.0f} days for 10^12 tokens")

# %% [markdown]
# On the command line, `nnxmoe plan deepseek-v3 --search 256 --batch 256 --on h100 --rule embed=fsdp+expert
# --buffer-factor 1.25` compares all meshes of 256 devices and prints the best ten; `--plot FILE.png` draws the best.
# To try a mesh before there are any devices, run a small model on virtual ones: notebook 5.
