"""Model adapter for lm-evaluation-harness.

    results = lm_eval.simple_evaluate(HarnessLM(model, tokenizer), tasks=["arc_easy"])

`score` computes log-likelihoods, and `complete` generates answers. Tasks receive the generated text up
to their stop strings.
"""

# pyright: reportMissingImports=false
# lm-eval is an optional dependency, not installed for type checking.

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nnxmoe.config.validate import whole_number
from nnxmoe.generation.complete import Completion, complete
from nnxmoe.generation.sampling import OPTIONS, Sampling
from nnxmoe.generation.score import score
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import logger
from nnxmoe.tokenizer.tokenizer import Tokenizer

NEW_TOKENS = 256  # default maximum of new tokens, as in the harness


class HarnessLM(TemplateLM):
    """Model of lm-evaluation-harness. Encodes and truncates as the ``hf`` model of the harness does.

    Args:
        slots: Number of answers generated concurrently.
        max_length: Maximum number of tokens of context and continuation together. Defaults to the model's
            ``max_position_embeddings``.
        seed: Random seed for sampled answers.
    """

    def __init__(
        self, model: CausalLM, tokenizer: Tokenizer, *, slots: int = 8, max_length: int | None = None, seed: int = 0
    ):
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self._slots, self._seed = whole_number("slots", slots, 1), whole_number("seed", seed, -(2**63))
        length = model.config.max_position_embeddings if max_length is None else max_length
        self.max_length = whole_number("max_length", length, 1)

    @property
    def eot_token_id(self) -> int:
        """Id of the EOS token. Raises ValueError if the tokenizer has no eos_token."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"{self.tokenizer.source}: evaluation needs an eos_token, but the tokenizer has none")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id that precedes texts without a context: the BOS token, or the EOS token if there is no BOS token."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the caches of the harness."""
        return self.tokenizer.source.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text.

        Args:
            string: Text to encode.
            add_special_tokens: Add special tokens. Defaults to True unless the text starts with the prefix
                token.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat. Without ``add_generation_prompt``, the text ends within the last message."""
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs, results = [], []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(f"a continuation has {len(continuation)} ids: it must have 1 to {self.max_length}")
            ids = [*context, *continuation][-(self.max_length + 1) :]
            split = len(ids) - len(continuation)
            if split < len(context):
                logger.warning("a context of %d ids is truncated to its last %d", len(context), split)
            pairs.append((ids[:split], ids[split:]))
        for request, text_score in zip(requests, score(self.model, pairs), strict=True):
            results.append((text_score.total, bool(text_score.greedy.all())))
            if request[0] is not None:  # None: the text is one window of a longer text
                self.cache_hook.add_partial("loglikelihood", request[0], results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Compute the log-likelihoods of whole texts in disjoint windows."""
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            token_windows = map(
                make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            )
            text_windows = [(None, *pair) for pair in token_windows]
            windows += text_windows
            counts.append(len(text_windows))
        values = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(values)[0] for _ in range(count)) for count in counts]
        self._keep("loglikelihood_rolling", requests, totals)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, truncated before the first stop string of the task.

        Raises:
            ValueError: If a generation option is not supported. It is raised before the first answer is generated.
        """
        answers, groups = dict[int, str](), dict[str, list[int]]()
        arguments: list[Any] = [request.args for request in requests]  # pairs (text, generation options)
        for number, (_, options) in enumerate(arguments):
            groups.setdefault(repr(options), []).append(number)
        jobs = list[tuple[list[int], Iterator[Completion]]]()  # validate all jobs before the first runs
        for numbers in groups.values():
            options = dict(normalize_gen_kwargs(arguments[numbers[0]][1], NEW_TOKENS))
            jobs.append((numbers, self._answers([arguments[number][0] for number in numbers], options)))
        for numbers, completions in jobs:
            answers |= zip(numbers, (completion.text for completion in completions), strict=True)
        ordered_answers = [answers[number] for number in range(len(requests))]
        self._keep("generate_until", requests, ordered_answers)
        return ordered_answers

    def _answers(self, texts: Sequence[str], options: dict[str, Any]) -> Iterator[Completion]:
        """Generate answers to prompts that share generation options."""
        max_new_tokens, stop = options.pop("max_gen_toks"), [text for text in options.pop("until") if text]
        do_sample, temperature = options.pop("do_sample"), options.pop("temperature", 1.0)
        sampling_fields = {name: options.pop(name) for name in OPTIONS if name in options}
        if options:
            raise ValueError(f"generation options {sorted(options)} are not supported: remove them from the task")
        if (max_prompt_tokens := self.max_length - max_new_tokens) < 1:
            raise ValueError(f"max_gen_toks={max_new_tokens} leaves no room for a prompt in {self.max_length} tokens")
        sampling = Sampling(temperature=temperature if do_sample else 0.0, **sampling_fields)
        prompts = [self.tok_encode(text)[-max_prompt_tokens:] for text in texts]
        return complete(
            self.model,
            prompts,
            self.tokenizer,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            seed=self._seed,
            slots=self._slots,
        )

    def _keep(self, request_type: str, requests: Sequence[Instance], results: Sequence[Any]) -> None:
        """Store results in the cache of the harness."""
        for request, value in zip(requests, results, strict=True):
            self.cache_hook.add_partial(request_type, request.args, value)
