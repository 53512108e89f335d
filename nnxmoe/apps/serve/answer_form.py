"""Structure of an answer (reasoning, text, tool calls), and the grammar that enforces it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nnxmoe.apps.serve import harmony
from nnxmoe.apps.serve.call_formats import FORMATS, format_of
from nnxmoe.apps.serve.call_split import AnswerPart, CallSplit
from nnxmoe.apps.serve.reasoning import Reasoning, ReasoningSplit
from nnxmoe.apps.serve.tool_options import ToolOptions, escaped, literal
from nnxmoe.generation.grammar import Grammar


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """Structure of an answer: whether it may contain reasoning and tool calls, and in which format.

    Attributes:
        reasoning: Tags around the reasoning, or `None` for answers without tagged reasoning.
        calls: Tools that the answer may call, or `None`.
        harmony: Whether the answer uses the channels of the harmony format.
        tokens: Ids of the special tokens in tags and calls. Grammars refer to these tokens by id. The decoded
            text includes them.
    """

    reasoning: Reasoning | None = None
    calls: ToolOptions | None = None
    harmony: bool = False
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, template: str, prompt: str, calls: ToolOptions | None, symbols: Mapping[str, int]) -> "AnswerForm":
        """Determine the structure of answers from a chat template.

        Args:
            template: The chat template.
            prompt: End of the rendered chat.
            calls: Tools of the request, or `None`.
            symbols: Maps each token that grammars can refer to by id to its id.
        """
        channels = format_of(template) is FORMATS["harmony"]
        tags = None if channels else Reasoning.of(template, prompt)
        tag_texts = [] if tags is None else [tags.start, tags.end]
        tag_texts += [] if calls is None else [*calls.format.marks, calls.format.call, calls.format.closing or ""]
        tag_texts += [harmony.MESSAGE, *harmony.ENDS, *harmony.BEGINS, FORMATS["harmony"].call] if channels else []
        tokens = {token: i for token, i in symbols.items() if any(token in text for text in tag_texts)}
        return cls(tags, calls, channels, tokens)

    @property
    def reasons(self) -> bool:
        """Whether an answer may have reasoning."""
        return self.harmony or self.reasoning is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, in addition to the checkpoint's end tokens."""
        ends = harmony.ENDS[1:] if self.harmony else ()
        return tuple(self.tokens[end] for end in ends if end in self.tokens)

    def splitter(self) -> "AnswerSplit | harmony.HarmonySplit":
        """Create a streaming splitter for an answer."""
        return harmony.HarmonySplit() if self.harmony else AnswerSplit(self)

    def split(self, text: str, cut: bool = False) -> tuple[AnswerPart, int]:
        """Split a complete answer.

        Args:
            text: Text of the answer.
            cut: Whether the answer was truncated at the length limit.

        Returns:
            The parts of the answer, and the number of tool calls.
        """
        splitter = self.splitter()
        part = splitter.put(text).followed_by(splitter.end(cut))
        return part._replace(reasoning=part.reasoning.rstrip()), splitter.count

    def grammar(self, form: Grammar | None, tokenizer: Any) -> Grammar | None:
        """Create the grammar of answers. It enforces ``form`` and the tool calls that the request requires.

        Args:
            form: Grammar of the content, or `None` for unconstrained content.
            tokenizer: Tokenizer of the model.

        Returns:
            The grammar, or `None` if the answer is not constrained.
        """
        calls = self.calls
        if form is None and (calls is None or not (calls.must or calls.strict or not calls.several)):
            return None
        rules, answers = list[str](), ["calls"] if calls is not None else []
        rules += calls.rules(self.tokens) if calls is not None else []
        if calls is None or not calls.must:
            final = literal(FORMATS["harmony"].text_prefix, self.tokens) if self.harmony else ""
            if form is not None:
                answers.append(f"{final} @form")
            elif calls is not None:
                answers, text_rules = self._free(calls, final)
                rules += text_rules
        text = "\n".join([f"start: {self._thinking(rules)} ({' | '.join(answers)})", *rules])
        return Grammar.lark(text, tokenizer) if form is None else form.within(text)

    def _free(self, calls: ToolOptions, final: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return the Lark alternatives and rules for answers that contain text, tool calls or both."""
        form, any_text = calls.format, r"/(.|\n)*/"
        if self.harmony:
            return ["calls", f"{final} {any_text}"], []
        if form.only_at_start:
            return ["calls", rf"/\s*([^\s{escaped(form.marks[0])}](.|\n)*)?/"], []
        if form.marks[0] in self.tokens:
            return [f"{any_text} calls?"], []
        # The mark that starts a call is ordinary text, so the grammar must exclude it from the content.
        content = " & ".join([any_text, *(rf"~/(.|\n)*{escaped(mark)}(.|\n)*/" for mark in form.marks)])
        rules = [f"SAID: {content}", rf"until[lazy]: /(.|\n)*{escaped(form.marks[0])}/"]
        return ["SAID", "until rest"], rules

    def _thinking(self, rules: list[str]) -> str:
        """Return the Lark expression of the reasoning before the answer, and append its rules to ``rules``."""
        if self.harmony:
            prefix, suffix = (literal(text, self.tokens) for text in harmony.ANALYSIS)
            return rf"({prefix} /(.|\n)*/ {suffix})*"
        tags = self.reasoning
        if tags is None or tags.closed:
            return ""
        if tags.end in self.tokens:
            reasoning = rf"/(.|\n)*/ {literal(tags.end, self.tokens)} /\n{{0,2}}/"
        else:
            rules.append(rf"thought[lazy]: /(.|\n)*{escaped(tags.end)}/")
            reasoning = r"thought /\n{0,2}/"
        return reasoning if tags.inside else f"({literal(tags.start, self.tokens)} {reasoning})?"


PLAIN = AnswerForm()


class AnswerSplit:
    """Streaming splitter of text into reasoning, content and tool calls."""

    def __init__(self, form: AnswerForm):
        self._reasoning = None if form.reasoning is None else ReasoningSplit(form.reasoning)
        self._calls = None if form.calls is None else CallSplit(form.calls)

    @property
    def count(self) -> int:
        """Number of tool calls so far."""
        return 0 if self._calls is None else self._calls.count

    def put(self, piece: str) -> AnswerPart:
        """Read a piece and return the parts that can be emitted now."""
        return self._part(*(("", piece) if self._reasoning is None else self._reasoning.put(piece)))

    def end(self, cut: bool = False) -> AnswerPart:
        """Return the text that was held back. ``cut`` is True if the answer was truncated at the length limit."""
        part = self._part(*(("", "") if self._reasoning is None else self._reasoning.end()))
        return part if self._calls is None else part.followed_by(self._calls.end(cut))

    def _part(self, reasoning: str, content: str) -> AnswerPart:
        part = AnswerPart(content=content) if self._calls is None else self._calls.put(content)
        return part._replace(reasoning=reasoning)
