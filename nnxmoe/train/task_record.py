"""Record of a fine-tuning run in its folder: the task, and whether it has finished."""

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


def look(folder: Path, asked: Mapping[str, Any]) -> str:
    """Return ``done`` if the task has finished in the folder, else "".

    Raises CheckpointError if the folder has other contents.
    """
    path = folder / _RECORD
    if not os.path.lexists(path):
        refuse_unless_empty(folder)
        return ""
    found = read_object(path, "use a new folder", CheckpointError)
    finished = found.pop(_FINISHED, None)
    evaluated_anew = asked["evaluation"] not in (None, found.get("evaluation"))
    lengths = [(found.get(name), asked[name]) for name in _LENGTHS]
    longer = all(type(old) is type(new) and (old is None or new >= old) for old, new in lengths)
    same = {"evaluation", *(_LENGTHS if longer else ())}  # evaluation data do not change the result
    if odd := [name for name in (asked.keys() | found.keys()) - same if asked.get(name) != found.get(name)]:
        if set(odd) <= {*_LENGTHS}:
            name, old = next((name, found.get(name)) for name in odd if found.get(name) is not None)
            raise CheckpointError(f"{folder} holds a run of {old} {name}: give as many {name} or more, or a new folder")
        what = "; ".join(f"{name} was {short(found.get(name))}, is {short(asked.get(name))}" for name in sorted(odd))
        raise CheckpointError(f"{folder} holds another run ({what}): use the same command line, or a new folder")
    written_last = (CONFIG_FILE, WEIGHTS_FILE) if asked["adapter_only"] else ("config.json",)
    complete = finished and all((folder / name).is_file() for name in written_last)
    return "done" if complete and not evaluated_anew and all(old == new for old, new in lengths) else ""


def record(folder: Path, task: Mapping[str, Any], finished: int | None) -> str:
    """Write the task to the folder, with the number of steps if the run has finished."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{_RECORD}.{os.getpid()}.tmp"
    write_json(beside, {**task, _FINISHED: finished})
    os.replace(beside, folder / _RECORD)
    return ""
