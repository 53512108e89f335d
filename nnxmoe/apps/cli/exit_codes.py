"""Exit codes of the command ``nnxmoe`` that shells expect."""

INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE: the status of other programs in `nnxmoe … | head`
