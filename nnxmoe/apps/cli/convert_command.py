"""``nnxmoe convert``: convert a checkpoint to another layout."""

import argparse

import jax

from nnxmoe.apps.cli.loading import mesh_of, quantize_method
from nnxmoe.apps.cli.options import DTYPES, add_adapter, add_mesh, add_quantize
from nnxmoe.config.printable import bytes_text

EXAMPLE = "convert demo demo-maxtext --to maxtext --scan --verify"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe convert``."""
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder, a hub id, or 'demo'; the layout is detected")
    add("target", metavar="DST", help="the output folder; new or empty")
    help_text = "hf for transformers and from_pretrained, maxtext for MaxText, orbax for nnxmoe.load"
    add("--to", choices=["hf", "maxtext", "orbax"], required=True, help=help_text)
    help_text = "stack each parameter of all layers into one array (MaxText's scan_layers)"
    add("--scan", action="store_true", help=help_text)
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    add_mesh(parser)
    add("--config", metavar="FOLDER", help="a folder with config.json, or a preset: MaxText does not store the config")
    add_adapter(parser)
    add_quantize(parser, keep=False)
    add("--verify", action="store_true", help="read the result back and compare arrays and logits")


def run(options: argparse.Namespace) -> None:
    """Convert a checkpoint to the layout of Hugging Face, MaxText or nnxmoe.save, in a new folder."""
    from nnxmoe.convert import conversion
    from nnxmoe.convert.peft.adapter_folder import open_adapter
    from nnxmoe.models import refuse_preset
    from nnxmoe.train import lora

    refuse_preset(options.source)
    if options.adapter is not None:
        open_adapter(options.adapter)  # raises for a malformed adapter before the model is loaded
    result = conversion.convert(
        options.source,
        options.target,
        options.to,
        scan=options.scan,
        dtype=options.dtype,
        mesh=mesh_of(options.mesh, connect=True),
        config=options.config,
        verify=options.verify,
        quantize=quantize_method(options),
        change=None if options.adapter is None else lambda model: lora.merge_from(model, options.adapter),
    )
    if jax.process_index() == 0:
        print(f"{result.target}: {result.arrays} arrays, {bytes_text(result.bytes)}")
        print(f"read {bytes_text(result.read_speed)}/s, written {bytes_text(result.write_speed)}/s")
        if result.difference is not None and result.roundings:
            print(
                f"the arrays are equal to the written arrays, but logits differ by {result.difference:.1e}: "
                f"{' and '.join(result.roundings)}; --dtype float32 avoids it"
            )
        elif result.difference is not None:
            changes = [
                f"--{name} {value}" for name in ("dtype", "adapter", "quantize") if (value := vars(options)[name])
            ]
            source = f" (compared with the source after {' '.join(changes)})" if changes else ""
            print(f"verified: all arrays are equal; logits differ by at most {result.difference:.1e}{source}")
