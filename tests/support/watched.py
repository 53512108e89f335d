"""Run by test_audit.py: uses a checkpoint folder and prints the forbidden audit events."""

import json
import os
import sys
import sysconfig

ROOT, FOLDER, WHAT = sys.argv[1:]
SAVED = FOLDER + "-saved"
# Paths that may be read: the interpreter, its packages, this project, the folder, and kernel tables.
READABLE = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), ROOT, FOLDER, "/proc", "/sys", "/dev/null"]
READABLE = [os.path.realpath(path) for path in READABLE]
PARENT, NAME = os.path.split(os.path.realpath(SAVED))
WRITABLE = (f"{PARENT}/{NAME}", f"{PARENT}/.{NAME}.")
TIME = ["/etc/localtime", "/usr/share/zoneinfo"]
forbidden: list[str] = []


def within(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def inside(name: object) -> bool:
    return isinstance(name, str) and within(os.path.realpath(name), [os.path.realpath(FOLDER)])


def hook(event: str, arguments: tuple) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        writing = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        saved = path == PARENT or path.startswith(WRITABLE)
        wrong = not saved and ((writing and path != "/dev/null") or not within(path, READABLE + TIME))
        if wrong and not (writing and "__pycache__" in path and within(path, READABLE) and not inside(path)):
            forbidden.append(f"open {path} writing={writing}")
    elif event == "exec" and inside(getattr(arguments[0], "co_filename", None)):
        forbidden.append(f"exec {arguments[0].co_filename}")
    elif event == "compile" and inside(os.fsdecode(arguments[1]) if isinstance(arguments[1], bytes) else arguments[1]):
        forbidden.append(f"compile {arguments[1]}")
    elif event.startswith("socket."):
        forbidden.append(f"{event} {arguments!r:.100}")
    elif event == "pickle.find_class":
        forbidden.append(f"{event} {arguments!r:.100}")
    elif event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen"):
        forbidden.append(f"{event} {arguments!r:.100}")


def use() -> str:
    """Loads without the unknown fields, inspects, generates, saves and renders the chat template."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, ROOT)
    import nnxmoe
    from nnxmoe.apps.cli import summary

    try:
        model = nnxmoe.from_pretrained(FOLDER)
        tokenizer = nnxmoe.Tokenizer.from_pretrained(FOLDER)
        summary.summarize(FOLDER)
        list(nnxmoe.stream(model, tokenizer, "hello you", max_new_tokens=2))
        nnxmoe.save_pretrained(model, SAVED)
    except ValueError as error:
        return str(error)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    except nnxmoe.TokenizerError:
        return "loaded, saved, template refused"
    return "the template was rendered"


def do_import() -> None:
    sys.path.insert(0, FOLDER)
    __import__("modeling_x")


def do_exec() -> None:
    import runpy

    runpy.run_path(FOLDER + "/modeling_x.py")


def do_compile() -> None:
    compile("1", FOLDER + "/modeling_x.py", "exec")


def do_unpickle() -> None:
    import pickle

    with open(FOLDER + "/pytorch_model.bin", "rb") as file:
        pickle.load(file)


def do_socket() -> None:
    import socket

    socket.socket().close()


def do_read() -> None:
    open("/etc/hostname").close()


def do_write() -> None:
    open(FOLDER + "/MARK", "w").close()


def do_shell() -> None:
    import subprocess

    subprocess.run(["true"])


if __name__ == "__main__":
    sys.addaudithook(hook)
    answer = (use if WHAT == "use" else globals()[f"do_{WHAT}"])()
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    forbidden += [f"import {file}" for file in files if inside(file)]
    print(json.dumps({"forbidden": forbidden, "answer": str(answer)}))
