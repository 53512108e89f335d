"""Training loop, objectives, data pipeline, LoRA and checkpoints.

data = nnxmoe.train.batches("chats.jsonl", tokenizer, batch_size=8, seq_len=512)
nnxmoe.train.lora.add(model, rank=16, rngs=nnx.Rngs(0))
model = nnxmoe.train.fit(model, data, optimizer=optax.adamw(1e-4), steps=500, checkpoint="run").model
"""

from nnxmoe.train import lora as lora
from nnxmoe.train.advantages import GDPO as GDPO
from nnxmoe.train.advantages import dr_grpo as dr_grpo
from nnxmoe.train.advantages import group_advantages as group_advantages
from nnxmoe.train.advantages import rloo as rloo
from nnxmoe.train.checkpoints import Checkpoints as Checkpoints
from nnxmoe.train.data.bad_records import DataError as DataError
from nnxmoe.train.data.batches import Batches as Batches
from nnxmoe.train.data.batches import Rows as Rows
from nnxmoe.train.data.batches import batches as batches
from nnxmoe.train.data.batches import preferences as preferences
from nnxmoe.train.data.documents import Documents as Documents
from nnxmoe.train.data.prompts import prompts as prompts
from nnxmoe.train.loop.callbacks import CsvLog as CsvLog
from nnxmoe.train.loop.callbacks import EarlyStopping as EarlyStopping
from nnxmoe.train.loop.callbacks import JsonLog as JsonLog
from nnxmoe.train.loop.callbacks import Profile as Profile
from nnxmoe.train.loop.callbacks import TensorBoardLog as TensorBoardLog
from nnxmoe.train.loop.callbacks import WandbLog as WandbLog
from nnxmoe.train.loop.definition import Report as Report
from nnxmoe.train.loop.definition import TrainState as TrainState
from nnxmoe.train.loop.fit import fit as fit
from nnxmoe.train.loop.interface import Fitted as Fitted
from nnxmoe.train.loop.interface import NotFinite as NotFinite
from nnxmoe.train.loop.interface import Progress as Progress
from nnxmoe.train.loop.loss import ChunkedLoss as ChunkedLoss
from nnxmoe.train.loop.loss import Whole as Whole
from nnxmoe.train.loop.measured import Evaluation as Evaluation
from nnxmoe.train.loop.objective import Losses as Losses
from nnxmoe.train.loop.objective import Objective as Objective
from nnxmoe.train.loop.objective import TrainingObjective as TrainingObjective
from nnxmoe.train.loop.optimizers import muon as muon
from nnxmoe.train.loop.policy_gradient import GRPO as GRPO
from nnxmoe.train.loop.policy_gradient import GSPO as GSPO
from nnxmoe.train.loop.policy_loss import Clip as Clip
from nnxmoe.train.loop.policy_loss import FixedLengthMean as FixedLengthMean
from nnxmoe.train.loop.policy_loss import ImportanceSampling as ImportanceSampling
from nnxmoe.train.loop.policy_loss import k3_kl as k3_kl
from nnxmoe.train.loop.policy_loss import sequence_mean as sequence_mean
from nnxmoe.train.loop.policy_loss import sequence_ratio as sequence_ratio
from nnxmoe.train.loop.policy_loss import token_mean as token_mean
from nnxmoe.train.loop.policy_loss import token_ratio as token_ratio
from nnxmoe.train.loop.policy_loss import unbiased_kl as unbiased_kl
from nnxmoe.train.loop.preference import DPO as DPO
from nnxmoe.train.loop.preference import hinge_loss as hinge_loss
from nnxmoe.train.loop.preference import ipo_loss as ipo_loss
from nnxmoe.train.loop.preference import sigmoid_loss as sigmoid_loss
from nnxmoe.train.loop.preference import with_reference as with_reference
from nnxmoe.train.loop.step import Step as Step
from nnxmoe.train.rewards import evaluate_rewards as evaluate_rewards
