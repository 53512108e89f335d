"""Convert checkpoints between formats: detect the format, load the model, write it, and optionally verify it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import bytes_text
from nnxmoe.convert import maxtext, native
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArrays
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.host_memory import as_unsigned
from nnxmoe.convert.files.hub import local_folder
from nnxmoe.convert.files.untrusted_files import absolute_path, is_gguf
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.hf import pretrained
from nnxmoe.convert.hf.auxiliary_files import has_tokenizer, read_config, read_generation_config
from nnxmoe.convert.hf.tensor_arrays import tensor_arrays
from nnxmoe.convert.maxtext import layout
from nnxmoe.convert.maxtext.array_trees import split_off_states
from nnxmoe.convert.storage.atomic_dir import refuse_unless_empty, refuse_unless_writable
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.convert.storage.find_checkpoint import INDEX_FILE, NATIVE_FILE, SINGLE_FILE, normalize_prefixes
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.methods import Method, Mixed, check_quantize_options
from nnxmoe.model.quantization.quantized_kernels import dequantize, quantized_kernels
from nnxmoe.model.quantization.rounding import quantize as round_kernels
from nnxmoe.model.stack import Scanned, Unrolled
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import near_presets, preset
from nnxmoe.runtime.memory import memory_bytes
from nnxmoe.runtime.progress import bytes_bar, logger, say

_PROMPT = 8  # length in tokens of the prompt whose logits are compared


@dataclasses.dataclass(frozen=True)
class CheckpointFormat:
    """Functions that read and write one checkpoint format.

    Attributes:
        read: ``read(folder, decoded)`` opens the arrays in a folder. If ``decoded``, they are dequantized.
        made: ``made(model, scan)`` returns the arrays that ``save`` writes.
        load: ``load(folder, config, dtype, strategy, keep_quantized)`` loads a model. Native checkpoints always keep
            quantized kernels, and MaxText has none.
        save: ``save(model, folder, scan)`` writes a model.
    """

    read: Callable[[str, bool], contextlib.AbstractContextManager[LazyArrays]]
    made: Callable[[CausalLM, bool], LazyArrays]
    load: Callable[[str, DecoderConfig | None, Any, Strategy, bool], CausalLM]
    save: Callable[[CausalLM, str, bool], None]


@contextlib.contextmanager
def _tensors(folder: str, decoded: bool) -> Iterator[LazyArrays]:
    with Checkpoint.open(folder) as checkpoint:
        if decoded:
            yield tensor_arrays(checkpoint.tensors, checkpoint.config, checkpoint.config_file, checkpoint)
        else:
            yield {name: plain_array(checkpoint, info) for name, info in checkpoint.tensors.items()}


def _maxtext(folder: str, _: bool) -> contextlib.AbstractContextManager[LazyArrays]:
    """Read the parameters of a MaxText checkpoint, except the duplicates of the router biases (`maxtext.BIASES`)."""
    arrays = split_off_states(maxtext.read(folder))[0]
    return contextlib.nullcontext({name: a for name, a in arrays.items() if maxtext.BIASES not in name})


FORMATS = {
    "hf": CheckpointFormat(
        _tensors,
        lambda model, _: normalize_prefixes(pretrained.arrays(model)),  # the same names as in `Checkpoint`
        lambda folder, _, dtype, strategy, keep_quantized: pretrained.from_pretrained(
            folder, dtype=dtype, strategy=strategy, keep_quantized=keep_quantized
        ),
        lambda model, folder, _: pretrained.save_pretrained(model, folder),
    ),
    "maxtext": CheckpointFormat(
        _maxtext,
        lambda model, scan: {f"params/params/{name}": a for name, a in layout.maxtext_arrays(model, scan).items()},
        lambda folder, config, dtype, strategy, _: maxtext.load(folder, config, strategy, dtype=dtype),
        maxtext.save,
    ),
    "orbax": CheckpointFormat(
        lambda folder, _: contextlib.nullcontext(native.read(folder)),
        native.arrays,
        lambda folder, _, dtype, strategy, __: native.load(folder, dtype, strategy=strategy),
        lambda model, folder, scan: native.save(model, folder, scan_layers=scan),
    ),
}


def detect_format(path_or_hub_id: str) -> str:
    """Return the `FORMATS` key of a folder or hub id. Raises CheckpointError if the format is not recognized."""
    folder = local_folder(path_or_hub_id, CheckpointError)
    if folder is None or is_gguf(folder) or (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return "hf"
    if (folder / NATIVE_FILE).exists():
        return "orbax"
    try:
        maxtext.items(folder)
        return "maxtext"
    except CheckpointError as error:
        if any(folder.glob("*.safetensors")):
            return "hf"
        raise CheckpointError(
            f"{folder} contains no checkpoint: it has neither safetensors files (Hugging Face) nor {NATIVE_FILE} "
            f"(nnxmoe.save), and it is not a MaxText checkpoint: {error}"
        ) from None


@dataclasses.dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion. Speeds are in bytes per second.

    ``difference`` is the largest absolute difference between the logits of the source and of the target (None if not
    verified). ``dtype``, ``change`` and ``quantize`` are applied to the source first. ``roundings`` describes the
    tensors that the target format rounds, which can explain the difference.
    """

    source: str
    target: str
    arrays: int
    bytes: int
    read_speed: float
    write_speed: float
    difference: float | None = None
    roundings: tuple[str, ...] = ()


def convert(
    source: str,
    target: str,
    to: str,
    *,
    scan: bool = False,
    dtype: Any = None,
    mesh: Mesh | None = None,
    config: str | None = None,
    verify: bool = False,
    change: Callable[[CausalLM], None] | None = None,
    quantize: Method | Mixed | None = None,
) -> ConversionResult:
    """Convert a checkpoint to another format.

    Args:
        source, target: Checkpoint to convert, and new or empty folder for the result.
        to: Target format, a key of `FORMATS`.
        scan: Whether to store each stack of layers as one array. Not supported for ``hf``.
        dtype, mesh: Dtype of the parameters, and mesh to shard them over. See `from_pretrained`.
        config: Folder with config.json, or name of a preset. Only for MaxText sources.
        verify: Whether to read all arrays back, compare them bitwise, and compare the logits of a short prompt. Logits
            may differ by 2e-4 of the largest logit, or by 5e-2 if the format requires rounding.
        change: Function called on the model before writing, for example to merge an adapter.
        quantize: Quantization method to apply to the kernels after ``change``.

    Raises:
        ValueError: The arguments are invalid (checked before reading), the source is unusable, or verification fails.
    """
    _check(to, scan, quantize, verify)
    dtype = float_dtype(dtype)
    refuse_unless_empty(target)
    refuse_unless_writable(target)
    reader, writer = FORMATS[detect_format(source)], FORMATS[to]
    source_config = _given_config(config, source, reader)
    strategy = dataclasses.replace(Strategy.auto(), mesh=mesh, stacking=Scanned() if scan else Unrolled())
    _announce_source(source, reader, dtype, quantize)
    if quantize is not None and reader is FORMATS["hf"] and change is None:
        model, quantize = pretrained.from_pretrained(source, dtype, strategy=strategy, quantize=quantize), None
    else:
        model = reader.load(source, source_config, dtype, strategy, False)
    _add_files(model, config)
    if change is not None:
        change(model)
    model = _rounded(model, to, quantize)
    report = model.load_report
    start_time, arrays = time.perf_counter(), writer.made(model, scan)
    num_arrays, num_bytes, difference = len(arrays), sum(array.nbytes for array in arrays.values()), None
    writer.save(model, target, scan)
    write_speed, roundings = num_bytes / (time.perf_counter() - start_time), _roundings(model, to, arrays)
    if verify:
        _compare(arrays, writer, target)
        source_logits, saved_config, is_quantized = _logits(model), model.config, bool(quantized_kernels(model))
        dtype = model.dtype if is_quantized else None
        del model, arrays
        saved = writer.load(target, saved_config, dtype, strategy, is_quantized)  # dequantization would round kernels
        difference = _difference(source_logits, _logits(saved), target, roundings)
    assert report is not None
    speeds = report.bytes_per_second, write_speed
    return ConversionResult(report.source, target, num_arrays, num_bytes, *speeds, difference, roundings)


def _announce_source(source: str, reader: CheckpointFormat, dtype: Any, quantize: Method | Mixed | None) -> None:
    """For a local source, log the expected peak memory and whether weights will be dequantized."""
    is_hf = reader is FORMATS["hf"]
    if is_hf and local_folder(source, CheckpointError) is None:
        return
    with reader.read(source, True) as arrays:
        _announce(arrays, dtype)
        if is_hf and quantize is None and any(array.codes for array in arrays.values()):
            say("quantized kernels are dequantized; pass --quantize METHOD to quantize them again")


def _roundings(model: CausalLM, to: str, arrays: LazyArrays) -> tuple[str, ...]:
    """Describe the tensors that the target format scales and that are rounded to a dtype narrower than float32."""
    factor = model.config.fold_query_scale()[1] if to == "hf" else 1.0
    floats = {array.dtype for array in arrays.values() if jax.dtypes.issubdtype(array.dtype, np.inexact)}
    if (dtypes := floats - {np.dtype(np.float32)}) and math.frexp(factor)[0] != 0.5:
        return (f"queries multiplied by {factor:.4g} are rounded to {', '.join(sorted(map(str, dtypes)))}",)
    return tuple(maxtext.roundings(model, arrays)) if to == "maxtext" else ()


def _check(to: str, scan: bool, quantize: Method | Mixed | None, verify: bool) -> None:
    if to not in FORMATS:
        raise ValueError(f"--to {to}: choose one of {', '.join(FORMATS)}")
    check_quantize_options(quantize, keep_quantized=False)
    if scan and to == "hf":
        raise ValueError("--scan is not supported for hf, which stores each layer's tensors separately: omit --scan")
    if quantize is not None and to == "maxtext":
        raise ValueError("--quantize is not supported for maxtext (floats only): omit it, or convert to hf or orbax")
    if verify and jax.process_count() > 1:
        raise ValueError("--verify requires a single process: run it on one machine with access to the files")


def _rounded(model: CausalLM, to: str, quantize: Method | Mixed | None) -> CausalLM:
    """Dequantize the model if the target format or ``quantize`` requires floats, then apply ``quantize`` if set."""
    if quantized_kernels(model) and (quantize is not None or to == "maxtext"):
        say("dequantizing the kernels of %s", model.load_report.source if model.load_report else "the model")
        model = dequantize(model)
    return model if quantize is None else round_kernels(model, quantize)


def _given_config(name: str | None, source: str, reader: CheckpointFormat) -> DecoderConfig | None:
    if name is None:
        return None
    if reader is not FORMATS["maxtext"]:
        raise ValueError(f"--config {name}: {source} already has a config.json: omit --config, or edit that file")
    if (preset_config := preset(name)) is None and not (name and absolute_path(name).is_dir()):
        raise ValueError(f"--config {name}: neither a folder with config.json nor a preset{near_presets(name)}")
    return preset_config or read_config(absolute_path(name))


def _add_files(model: CausalLM, config: str | None) -> None:
    """Use the tokenizer files and generation config of the folder ``config`` if the source has none."""
    if config is None or not absolute_path(config).is_dir():
        return
    folder = absolute_path(config)
    assert model.load_report is not None
    if model.load_report.files is None or not has_tokenizer(model.load_report.files):
        model.load_report = dataclasses.replace(model.load_report, files=str(folder))
    model.generation_config = model.generation_config or read_generation_config(folder, model.config)


def _announce(arrays: LazyArrays, dtype: Any) -> None:
    """Log the expected peak memory: the size of the model plus twice the size of its largest array."""
    itemsize = np.dtype(dtype).itemsize if dtype is not None else None
    sizes = [math.prod(a.shape) * (itemsize or (2 if a.codes else a.dtype.itemsize)) for a in arrays.values()] or [0]
    peak_bytes, (limit, limit_name) = sum(sizes) + 2 * max(sizes), memory_bytes()
    say("%d arrays; expected peak memory %s plus the program itself", len(arrays), bytes_text(peak_bytes))
    if peak_bytes > limit:
        logger.warning("peak memory exceeds the %s of %s: pass --mesh or add memory", bytes_text(limit), limit_name)


def _compare(arrays: LazyArrays, writer: CheckpointFormat, target: str) -> None:
    """Raise CheckpointError unless every array in the folder is bitwise equal to the model's array."""
    with writer.read(target, False) as files, bytes_bar(sum(a.nbytes for a in arrays.values()), "verifying") as bar:
        if mismatches := sorted(files.keys() ^ arrays.keys()):
            raise CheckpointError(
                f"{target}: {mismatches[0]} is missing in the files or in the model: delete the folder and retry"
            )
        for name, array in arrays.items():
            expected, actual = np.asarray(array, order="C"), np.asarray(files[name], order="C")
            if expected.dtype != actual.dtype or not np.array_equal(as_unsigned(expected), as_unsigned(actual)):
                raise CheckpointError(
                    f"{target}: {name} differs from the written array: check the disk, delete the folder and retry"
                )
            bar.update(array.nbytes)


def _logits(model: CausalLM) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, _PROMPT)).astype(np.int32)
    return np.asarray(model(tokens).logits)


def _difference(expected: np.ndarray, actual: np.ndarray, target: str, roundings: tuple[str, ...]) -> float:
    """Return the largest difference between logits. Raises CheckpointError if it exceeds the tolerance."""
    is_different = ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    with np.errstate(invalid="ignore"):
        difference = float(np.max(np.abs(actual - expected), initial=0, where=is_different))
    limit = (5e-2 if roundings else 2e-4) * np.abs(expected).max(initial=1.0, where=np.isfinite(expected))
    if not difference <= limit:
        cause = f"although only {' and '.join(roundings)}" if roundings else "although nothing was rounded"
        raise CheckpointError(
            f"{target}: logits differ by {difference:.2g} from the source's, more than {limit:.2g}, {cause}: "
            "do not use this checkpoint"
        )
    return difference
