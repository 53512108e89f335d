"""Record of a fine-tuning run in its folder: the task, and the number of steps once the run has finished."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.untrusted_files import read_object
from nnxmoe.convert.peft.adapter_folder import WEIGHTS_FILE
from nnxmoe.convert.peft.peft_config import CONFIG_FILE
from nnxmoe.convert.storage.atomic_dir import refuse_unless_empty
from nnxmoe.convert.storage.write_safetensors import write_json

_RECORD = "finetune.json"
_FINISHED, _LENGTHS = "finished", ("steps", "epochs")  # fields of the file


def look(folder: Path, task: Mapping[str, Any]) -> str:
    """Return "done" if the folder contains the finished run of a task, else "".

    Raises CheckpointError if the folder contains a different task or unrelated files.
    """
    path = folder / _RECORD
    if not os.path.lexists(path):
        refuse_unless_empty(folder)
        return ""
    recorded = read_object(path, "use a new folder", CheckpointError)
    finished = recorded.pop(_FINISHED, None)
    new_evaluation = task["evaluation"] not in (None, recorded.get("evaluation"))
    lengths = [(recorded.get(name), task[name]) for name in _LENGTHS]
    longer = all(type(old) is type(new) and (old is None or new >= old) for old, new in lengths)
    may_differ = {"evaluation", *(_LENGTHS if longer else ())}  # evaluation data do not change the result
    if mismatches := [
        name for name in (task.keys() | recorded.keys()) - may_differ if task.get(name) != recorded.get(name)
    ]:
        if set(mismatches) <= {*_LENGTHS}:
            name, old = next((name, recorded.get(name)) for name in mismatches if recorded.get(name) is not None)
            raise CheckpointError(
                f"{folder} contains a run of {old} {name}: pass at least as many {name}, or a new folder"
            )
        differences = "; ".join(
            f"{name} was {short(recorded.get(name))}, is {short(task.get(name))}" for name in sorted(mismatches)
        )
        raise CheckpointError(
            f"{folder} contains a different run ({differences}): use the same command line, or a new folder"
        )
    written_last = (CONFIG_FILE, WEIGHTS_FILE) if task["adapter_only"] else ("config.json",)
    complete = finished and all((folder / name).is_file() for name in written_last)
    return "done" if complete and not new_evaluation and all(old == new for old, new in lengths) else ""


def record(folder: Path, task: Mapping[str, Any], finished: int | None) -> str:
    """Write the task to the folder, with the number of steps if the run has finished."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_RECORD}.{os.getpid()}.tmp"
    write_json(temporary, {**task, _FINISHED: finished})
    os.replace(temporary, folder / _RECORD)
    return ""
