"""``nnxmoe serve``: serve a model over HTTP."""

import argparse
import os
import re

from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.options import add_draft, add_loading, add_slots, count, size
from nnxmoe.runtime.extras import install_command
from nnxmoe.runtime.progress import logger, say

EXAMPLE = "serve demo --port 8000 --draft prompt:4"

KEY = "NNXMOE_API_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe serve``."""
    add_loading(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, help="port (default 8000; 0 selects a free port)")
    add("--name", help="model name for clients (default: MODEL, or the last part of its path without .gguf)")
    add_slots(add)
    add("--capacity", type=count, default=2048, metavar="T", help="tokens per sample, prompt included (default 2048)")
    help_text = "memory of the prefix cache, such as 2GB (default: the memory of 4 slots; 0 disables the cache)"
    add("--prefix-bytes", type=size, metavar="SIZE", help=help_text)
    add(
        "--queue",
        type=count,
        default=256,
        metavar="N",
        help="samples that may wait; further requests get 429 (default 256)",
    )
    add("--seconds", type=count, default=600, metavar="S", help="time limit per request in seconds (default 600)")
    add(
        "--max-body",
        type=count,
        default=4 << 20,
        metavar="BYTES",
        help="maximum size of a request body (default 4 MiB)",
    )
    add("--drain", type=count, default=30, metavar="S", help="seconds to finish requests at shutdown (default 30)")
    help_text = "log one line per request with path, status, seconds and tokens (default: on)"
    add("--access-log", action=argparse.BooleanOptionalAction, default=True, help=help_text)
    help_text = "let requests set return_routed_experts, which returns the experts of each token"
    add("--enable-return-routed-experts", action="store_true", help=help_text)
    add_draft(parser)
    parser.epilog = f"{parser.epilog}\n\n{KEY}=… in the environment: clients must send this key as a bearer token."


def model_id(model: str) -> str:
    """Return the name of a model for clients: the last part of a local path, or the whole hub id."""
    if not os.path.exists(model):
        return model
    name = os.path.basename(os.path.abspath(model))
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE) if os.path.isfile(model) else name


def run(options: argparse.Namespace) -> None:
    """Serve a model over HTTP: the OpenAI API and a chat page. Requires the serve extra."""
    try:
        from nnxmoe.apps.serve import server
        from nnxmoe.apps.serve.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise ValueError(f"nnxmoe serve needs {error.name}: {install_command('serve')}") from None
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port {options.port}: use a port from 0 to 65535")
    name = options.name or model_id(options.model)
    is_local = options.host in {"localhost", "127.0.0.1", "::1"}
    settings = ServerSettings(
        name=name,
        key=os.environ.get(KEY, "").strip() or None,
        hosts=server.LOOPBACK if is_local else None,
        queue=options.queue,
        seconds=options.seconds,
        body=options.max_body,
        drain=options.drain,
        access_log=options.access_log,
    )
    if not is_local and settings.key is None:
        logger.warning("anyone who can reach %s can use this server: set %s to require a key", options.host, KEY)
    model, tokenizer = loading.load(options)
    engine = server.serving_engine(
        model,
        draft=loading.draft_of(options.draft, model),
        slots=options.slots,
        capacity=options.capacity,
        prefix_bytes=options.prefix_bytes,
        return_routing=options.enable_return_routed_experts,
    )
    message = f"serving {name} with {engine.slots} slots of {engine.capacity} tokens on %s; Ctrl-C stops the server"
    server.serve(engine, tokenizer, settings, options.host, options.port, lambda address: say(message, address))
