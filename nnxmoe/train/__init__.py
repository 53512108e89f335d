"""Training: loss, step, fit, LoRA, data, checkpoints.

data = nnxmoe.train.batches("chats.jsonl", tokenizer, batch_size=8, seq_len=512)
nnxmoe.train.lora.add(model, rank=16, rngs=nnx.Rngs(0))
model = nnxmoe.train.fit(model, data, optimizer=optax.adamw(1e-4), steps=500, checkpoint="run").model
"""

from nnxmoe.train import lora as lora
from nnxmoe.train.checkpoint import Checkpoints as Checkpoints
from nnxmoe.train.data import Batches as Batches
from nnxmoe.train.data import Rows as Rows
from nnxmoe.train.data import batches as batches
from nnxmoe.train.documents import Documents as Documents
from nnxmoe.train.fit import Fitted as Fitted
from nnxmoe.train.fit import NotFinite as NotFinite
from nnxmoe.train.fit import Progress as Progress
from nnxmoe.train.fit import fit as fit
from nnxmoe.train.jsonl import DataError as DataError
from nnxmoe.train.loss import Chunked as Chunked
from nnxmoe.train.loss import Losses as Losses
from nnxmoe.train.loss import Objective as Objective
from nnxmoe.train.loss import Whole as Whole
from nnxmoe.train.metrics import CsvLog as CsvLog
from nnxmoe.train.metrics import JsonLog as JsonLog
from nnxmoe.train.metrics import TensorBoardLog as TensorBoardLog
from nnxmoe.train.step import Report as Report
from nnxmoe.train.step import Step as Step
from nnxmoe.train.step import TrainState as TrainState
