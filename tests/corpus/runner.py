"""Runs each case in a process with limits on time and memory, and judges the outcome."""

import dataclasses
import gc
import io
import os
import resource
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("TQDM_DISABLE", "1")

import jax
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.apps.cli.summary import summarize
from nnxmoe.config.base import DecoderConfig
from nnxmoe.models import model_class
from tests.corpus import configs, families, files, mxfp4, tensors, texts
from tests.corpus.case import Case, Draft
from tests.support.arrays import max_error
from tests.support.forked import forked
from tests.support.numpy_decoder import reference_logits
from tests.support.running import MODEL_TOLERANCE
from tests.support.tiny import ORACLE, random_tokens

SECONDS, WALL = 2.0, 60.0  # of processor time for an answer; of the clock, on a busy machine, until the kill
MEGABYTES = 200  # more than before
ADDRESS_SPACE = 8 << 30

CASES: dict[str, Case] = {}
for _case in (case for part in (files, configs, tensors, texts, mxfp4, families) for case in part.cases()):
    assert _case.name not in CASES, f"two cases are called {_case.name}"
    CASES[_case.name] = _case


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a process did with a checkpoint. ``kinds``: the error's class and its bases, empty if it was accepted."""

    kinds: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0
    loaded: tuple[DecoderConfig, str, list[np.ndarray]] | None = None  # what makes the model anew
    inspected: str | None = None  # why `nnxmoe inspect` says that it cannot be loaded; None where it says nothing
    warned: str = ""  # on stderr


def fault(case: Case, outcome: Outcome, draft: Draft) -> str | None:
    """Describes what is wrong with an outcome; None if nothing is."""
    folder = draft.folder
    refused = bool(outcome.kinds)
    if refused != (case.verdict == "refuse"):
        return f"was {'refused' if refused else 'taken'}, should be {case.verdict}: {outcome.text}"
    if case.action == "load" and refused != (outcome.inspected is not None):
        return f"inspect and load disagree: {outcome.inspected} / {outcome.text}"
    lost = [name for name in case.names if name not in outcome.text]
    if lost:
        return f"does not name {lost}: {outcome.text}"
    lines = outcome.warned.splitlines()
    if case.verdict == "report" and any(sum(name in line for line in lines) != 1 for name in case.names):
        return f"does not name {case.names} once on stderr: {outcome.warned}"
    if not refused:
        error = logits_error(outcome, draft)
        return None if error <= MODEL_TOLERANCE else f"logits are off by {error}"
    if "ValueError" not in outcome.kinds or (outcome.kinds[0] == "ValueError" and case.action != "generate"):
        return f"{outcome.kinds[0]} reached the user: {outcome.text}"
    if case.action == "generate":  # of a sound checkpoint with tokens that do not fit: no file is at fault
        return None
    if str(folder) not in outcome.text or len(outcome.text) > 3000:
        return f"message without the folder, or of {len(outcome.text)} characters: {outcome.text[:3000]}"
    if outcome.seconds > SECONDS or outcome.megabytes > MEGABYTES:
        return f"took {outcome.seconds:.1f} s and {outcome.megabytes:.0f} MB"
    return None


def logits_error(outcome: Outcome, draft: Draft) -> float:
    """Largest difference between the loaded model's logits and the expected ones."""
    fields, weights = draft.expected
    if outcome.loaded is None or not all(np.isfinite(tensor).all() for tensor in weights.values()):
        return 0.0
    config, dtype, leaves = outcome.loaded
    model = model_class(config)(config, ORACLE, rngs=None)  # type: ignore[call-arg]
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(nnx.state(model)), leaves))
    model.dtype = np.dtype(dtype)
    tokens = random_tokens(1, 7)
    return max_error(model(tokens).logits, reference_logits(fields, weights, tokens))


def run(case: Case, folder: Path) -> Outcome:
    """Runs a case's action on a folder in a forked process."""
    code, said = forked(_child, case.name, str(folder), answer_within=WALL)
    if said:
        return said[0]
    if code == -signal.SIGKILL:
        return Outcome(("Hang",), f"no answer within {WALL:g} s")
    return Outcome(("Crash",), f"the process ended with code {code}")


def judge(case: Case) -> tuple[Outcome, str | None]:
    """Runs a case in a temporary folder; returns the outcome and what is wrong with it."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        folder.mkdir()
        draft = Draft(folder, case.family)
        case.make(draft)
        outcome = run(case, folder)
        return outcome, fault(case, outcome, draft)


def _child(name: str, folder: str, pipe: Connection) -> None:
    gc.freeze()  # a collection would copy all memory that is shared with the parent, which takes longer than the case
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    told: list[str] = []
    sys.stderr = stderr = io.StringIO()  # what a script without logging set-up shows
    before, started, loaded, kinds = _peak(), time.process_time(), None, ()
    try:
        model = ACTIONS[CASES[name].action](folder)
        if model is not None:
            told.append(str(model.load_report))
            loaded = (model.config, str(model.dtype), [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))])
    except BaseException as failure:
        kinds = tuple(kind.__name__ for kind in type(failure).__mro__)
        told.append(str(failure))
    seconds, megabytes = time.process_time() - started, _peak() - before
    warned = stderr.getvalue()
    text = "\n".join([warned, *told])
    pipe.send(Outcome(kinds, text, seconds, megabytes, loaded, _inspect(folder), warned))
    pipe.close()
    os._exit(0)  # without closing JAX


def _inspect(folder: str) -> str | None:
    try:
        summary = summarize(folder)
    except ValueError as error:
        return str(error)
    return "; ".join([*summary.missing, *summary.misshapen]) or (None if summary.stored else "no weights")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _chat(folder: str) -> None:
    tokenizer = nnxmoe.Tokenizer.from_pretrained(folder)
    tokenizer.encode("hello there")
    tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)


def _generate(folder: str) -> None:
    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(folder), nnxmoe.from_pretrained(folder)
    list(nnxmoe.stream(model, tokenizer, "hello you", max_new_tokens=2))


def _load(folder: str) -> nnxmoe.CausalLM:
    """With a strategy, which by default depends on the platform: a refusal then does not wait for JAX's backends."""
    return nnxmoe.from_pretrained(folder, strategy=ORACLE)


ACTIONS: dict[str, Any] = {"load": _load, "chat": _chat, "generate": _generate}
