"""Tools in the server: the calls of every family in texts, in pieces and by grammar, and whole loops."""

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

import nnxmoe
from nnxmoe.apps.serve.answer_form import AnswerForm
from nnxmoe.apps.serve.call_formats import FORMATS, format_of
from nnxmoe.apps.serve.call_split import AnswerPart, CallPiece
from nnxmoe.apps.serve.json_stream import JsonObject, json_object
from nnxmoe.apps.serve.tool_options import ToolOptions
from nnxmoe.generation.grammar import empty_masks, symbols
from tests.support.serving import Running, serving, serving_tools

DEMO = Path(__file__).parents[2] / "models" / "demo"
PARAMETERS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "near": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": None,
}
ARGUMENTS = {"city": 'Paris "}{"\n  <b>', "days": 3, "near": [True, False]}
JSON = json.dumps(ARGUMENTS)
CALL = f'{{"name": "get_weather", "arguments": {JSON}}}'
BOTH = [("now", {}), ("get_weather", ARGUMENTS)]


def wide(text: str) -> str:
    """The special tokens of DeepSeek."""
    return text.replace("|", "\uff5c")


def end_tag(name: str) -> str:
    """The tag after the value of an argument."""
    tags = FORMATS[name].argument
    return "" if tags is None else tags.end_tag


# Of each format: texts as its models write them, what is said in them, and names and arguments of the calls.
TEXTS: dict[str, list[tuple[str, str, list[tuple[str, Any]]]]] = {
    "hermes": [
        (f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>', "I look.", BOTH[1:]),
        (
            '<tool_call>{"name":"now","arguments":{}}</tool_call>\n<tool_call>\n'
            f'{{"arguments": {JSON}, "name": "get_weather"}}\n</tool_call>\n',
            "",
            BOTH,
        ),
        ('<tool_call>\n{"name": "now", "arguments": "{\\"a\\": 1}"}\n</tool_call> ok', " ok", [("now", {"a": 1})]),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {})]),
        ("The tag <tool_call> opens </tool_call> .\n", "The tag <tool_call> opens </tool_call> .\n", []),
        ("a < b <tool and <tool_cal", "a < b <tool and <tool_cal", []),
        ('<tool_call>\n{"name": "now", "arguments": {}}', "", [("now", {})]),
        *(  # a brace too few or too many, the last tag left out, and no arguments: the next call is still found
            (f'<tool_call>\n{{"name": "now", {one}\n<tool_call>\n{CALL}\n</tool_call> ok', " ok", BOTH)
            for one in (
                '"arguments": {}\n</tool_call>',
                '"arguments": {}}}\n</tool_call>',
                '"arguments": {}}',
                '"arguments": null}\n</tool_call>',
                '"arguments": ""}\n</tool_call>',
            )
        ),
        (f"I write <tool_call> now:\n<tool_call>{CALL}</tool_call>", "I write <tool_call> now:\n", BOTH[1:]),
    ],
    "llama": [
        (f'{{"name": "get_weather", "parameters": {JSON}}}', "", BOTH[1:]),
        (f'\n{{"type": "function", "name": "get_weather", "parameters": {JSON}}}', "", BOTH[1:]),
        (f'{{"name": "now", "parameters": {{}}}}; {{"name": "get_weather", "parameters": {JSON}}}', "", BOTH),
        ('{"name": "now", "parameters": {}} Done', "Done", [("now", {})]),
        ('It is {"name": "now", "parameters": {}}', 'It is {"name": "now", "parameters": {}}', []),
        ('{"answer": 3} ', '{"answer": 3} ', []),
        (" plain", " plain", []),
    ],
    "mistral json": [
        (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}]', "", BOTH[1:]),
        (
            '[TOOL_CALLS][{"name":"now","arguments":{},"id":"Ab3"}, '
            f'{{"arguments": {JSON}, "name": "get_weather"}}]',
            "",
            BOTH,
        ),
    ],
    "mistral": [
        (f"Yes[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{JSON}", "Yes", BOTH),
        (f"[TOOL_CALLS] now [ARGS] {{}} [TOOL_CALLS] get_weather [ARGS] {JSON}", "", BOTH),
    ],
    "mistral v11": [
        (f"Yes[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{{}}[TOOL_CALLS]get_weather[CALL_ID]x[ARGS]{JSON}", "Yes", BOTH)
    ],
    "deepseek v3": [
        (
            wide(
                "So:<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>now\n```json\n{}\n```<|tool▁call▁end|>\n"
                f"<|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n{JSON}\n```<|tool▁call▁end|>"
                "<|tool▁calls▁end|>"
            ),
            "So:",
            BOTH,
        )
    ],
    "deepseek v3.1": [
        (
            wide(
                "<|tool▁calls▁begin|><|tool▁call▁begin|>now<|tool▁sep|>{}<|tool▁call▁end|><|tool▁call▁begin|>"
                f"get_weather<|tool▁sep|>{JSON}<|tool▁call▁end|><|tool▁calls▁end|>"
            ),
            "",
            BOTH,
        )
    ],
    "kimi": [
        (
            "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_call_begin|> functions.get_weather:11 <|tool_call_argument_begin|> "
            f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
            "Hm.",
            BOTH,
        ),
        (
            "<|tool_calls_section_begin|>\n<|tool_call_begin|>now:0<|tool_call_argument_begin|>\n{}\n<|tool_call_end|>"
            "\n<|tool_calls_section_end|>\nSo",
            "\nSo",
            BOTH[:1],
        ),
    ],
    "glm": [
        (
            "Wait\n<tool_call>now\n</tool_call>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
            f"<arg_value>{ARGUMENTS['city']}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
            "<arg_key>near</arg_key>\n<arg_value>[true, false]</arg_value>\n</tool_call>",
            "Wait",
            BOTH,
        )
    ],
    "qwen xml": [
        (
            f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{ARGUMENTS['city']}\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n<parameter=near>\n[true, false]\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            BOTH[1:],
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "", BOTH[:1]),
        ("Yes.\n<function=now>\n</function>\n</tool_call>", "Yes.", BOTH[:1]),
        (
            "<tool_call>\n<function=now>\n</tool_call>\n<tool_call>\n<function=now>\n</tool_call>\nSo",
            "\nSo",
            BOTH[:1] * 2,
        ),
        ("<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>", "", BOTH[:1] * 2),
        ("<tool_call>\n<function=now>\n<parameter=x>\nTrue\n</parameter>\n</function>", "", [("now", {"x": True})]),
    ],
    "minimax": [
        (
            '\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="get_weather">\n'
            '<parameter name="city">'
            f'{ARGUMENTS["city"]}</parameter>\n<parameter name="days">3</parameter>\n<parameter name="near">'
            "[true, false]</parameter>\n</invoke>\n</minimax:tool_call>",
            "",
            BOTH,
        )
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
            "",
            BOTH[1:],
        ),
        (f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON}", "", BOTH[1:]),
        ("<|channel|>final<|message|>It is 3 < 4.<|return|>", "It is 3 < 4.", []),
        ("no channels <|en", "no channels <|en", []),
        ("<|channel|>analysis Think.<|channel|>final<|message|>ok", "ok", []),
    ],
}


TRIP: dict[str, Any] = {
    "find": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": None,
}
ROME, NOW = ("find", {"city": "Rome"}), ("now", {})
QWEN = "<tool_call>\n<function=find>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="find">\n<parameter name="city">{}</parameter>\n</invoke>\n'
CITY = '{"name": "find", "arguments": {"city": "Rome"}}'
HERMES = '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"'
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
KIMI_END = "<|tool_call_end|><|tool_calls_section_end|>"
ODD = '{"city": "", "days": null, "note": "None of \\"\\" null"}'
V3_NEXT = "<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>find\n```json\n"
V3 = "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>now\n```json\n"
MALFORMED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [  # format, text, what is said, calls
    ("llama", '{"name": {"a": 1}, "arguments": {"x": 1', '{"name": {"a": 1}, "arguments": {"x": 1', []),
    (
        "mistral json",
        '[TOOL_CALLS][{"name": {"a": 1}, "arguments": {"x": 1',
        '[TOOL_CALLS][{"name": {"a": 1}, "arguments": {"x": 1',
        [],
    ),
    ("qwen xml", "<tool_call>\n<function=now>", "", [NOW]),
    ("qwen xml", QWEN.format("Rome").removesuffix("</function>\n</tool_call>"), "", [ROME]),
    ("qwen xml", QWEN.format("Rome").removesuffix("</function>\n</tool_call>") + QWEN.format("Rome"), "", [ROME] * 2),
    ("qwen xml", QWEN.format("Rome\n<parameter=days>\n3"), "", [("find", {"city": "Rome", "days": 3})]),
    ("qwen xml", QWEN.format("Rome").replace("</parameter>\n", ""), "", [ROME]),
    ("qwen xml", QWEN.format("Rome").replace("</parameter>\n", "") + "\n" + QWEN.format("Rome"), "", [ROME, ROME]),
    ("qwen xml", QWEN.format("Rome").replace("</parameter>", "</parameter>\nso"), "so\n", [ROME]),
    ("qwen xml", '<tool_call>\n<function=find>\n{"city": "Rome"}\n</function>\n</tool_call>', "", [ROME]),
    ("qwen xml", HERMES + "}}\n</tool_call>", "", [ROME]),
    ("qwen xml", "<function=find>\n<parameter=ci", "<parameter=ci", [("find", {})]),
    ("glm", "<tool_call>now", "", [NOW]),
    ("glm", "<tool_call>no", "<tool_call>no", []),
    ("glm", GLM.format("Rome").removesuffix("</tool_call>"), "", [ROME]),
    ("glm", GLM.format("Rome").removesuffix("</tool_call>") + "<tool_call>now\n</tool_call>", "", [ROME, NOW]),
    ("glm", GLM.format("Rome").replace("</arg_value>", ""), "", [ROME]),
    ("glm", GLM.format("Rome").replace("</arg_key>", ""), "", [ROME]),
    *(  # values in place of the arguments are dropped
        (name, text.replace("{}", value), said, [NOW])
        for name, text, said in (
            ("glm", "<tool_call>now\n{}</tool_call> ok", " ok"),
            ("glm", "<tool_call>now\n{}", ""),
            ("qwen xml", "<tool_call>\n<function=now>\n{}\n</function>\n</tool_call> ok", " ok"),
            ("minimax", '<minimax:tool_call>\n<invoke name="now">{}</invoke>\n</minimax:tool_call> ok', " ok"),
            ("mistral", "[TOOL_CALLS]now[ARGS]{}", ""),
            ("harmony", "<|channel|>commentary to=functions.now json<|message|>{}<|call|>", ""),
        )
        for value in ("null", "None", '""', "[]", "{}")
    ),
    ("glm", GLM.format("Rome").replace("<arg_key>", "null\n<arg_key>"), "", [ROME]),
    ("glm", GLM.format("Rome").replace("</tool", "null</tool"), "null", [ROME]),
    *(  # several objects after one opening tag, in a list or not
        (name, before + first + sep + second + after, said, [NOW, ROME])
        for name, before, after, said in (
            ("hermes", "<tool_call>\n", "\n</tool_call> ok", " ok"),
            ("hermes", "<tool_call>\n[", "]\n</tool_call> ok", " ok"),
            ("hermes", "<tool_call>\n[", "", ""),
            ("hermes", "<tool_call>\n[", "]", ""),
            ("hermes", "<tool_call>\n[", "\n]\n</tool_", ""),
            ("hermes", "<tool_call>\n[", "]\nok", "\nok"),
            ("glm", "<tool_call>[", "]", ""),
            ("kimi", "<|tool_calls_section_begin|>[", "]", ""),
            ("qwen xml", "<tool_call>\n[", "]", ""),
            ("glm", "<tool_call>[", "]</tool_call> ok", " ok"),
            ("qwen xml", "<tool_call>\n[", "]\n</tool_call> ok", " ok"),
            ("mistral json", "[TOOL_CALLS]", "", ""),
            ("llama", "", "\nok", "ok"),
            ("llama", "[", "] ok", "ok"),
            ("llama", "[\n  ", "\n]", ""),
            ("llama", "\n[ ", "] ok", "ok"),
        )
        for sep in (", ", "; ", "\n", "")
        for first, second in [('{"name": "now", "arguments": {}}', CITY)]
    ),
    ("hermes", f"<tool_call>\n[{CITY}, {CITY[:-3]}", "", [ROME, ROME]),
    ("hermes", f"<tool_call>\n[{CITY}]\n</tool_call>\n<tool_call>\n{CITY}\n</tool_call>", "", [ROME, ROME]),
    ("hermes", '<tool_call>\n{"name": "now"}, {"x": 1}\n</tool_call>', ', {"x": 1}\n', [NOW]),
    ("hermes", "<tool_call>\n[1, 2]\n</tool_call>", "<tool_call>\n[1, 2]\n</tool_call>", []),
    ("hermes", f"<tool_call>\n{CITY}\n</tool_call>\n{CITY}", f"\n{CITY}", [ROME]),
    ("glm", f"<tool_call>now</tool_call> {CITY}", f" {CITY}", [NOW]),
    ("llama", "[link](x)", "[link](x)", []),
    ("llama", '[{"a": 1}]', '[{"a": 1}]', []),
    ("llama", '[\n {"a": 1}]', '[\n {"a": 1}]', []),
    ("llama", "[ ", "[ ", []),
    ("glm", GLM.format("Rome\n<arg_key>days</arg_key>\n<arg_value>3"), "", [("find", {"city": "Rome", "days": 3})]),
    ("glm", GLM.format("Rome").replace("\n</tool", "\nso </tool") + " then", "so  then", [ROME]),
    ("minimax", MINIMAX.format("Rome"), "", [ROME]),
    ("minimax", MINIMAX.format("Rome").replace("</invoke>", '<invoke name="now">\n</invoke>'), "", [ROME, NOW]),
    ("minimax", MINIMAX.format("Rome").replace("</parameter>", "") + "</minimax:tool_call> ok", " ok", [ROME]),
    ("hermes", HERMES, "", [ROME]),
    ("hermes", HERMES + '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}', "", [ROME, NOW]),
    (
        "hermes",
        HERMES[:-1] + '}}\n</tool_call>\n<tool_call>\n{"name": "now"}',
        "",
        [("find", {"city": "Rome}}\n"}), NOW],
    ),
    ("hermes", HERMES + "}}\nso </tool_call> then", "\nso  then", [ROME]),
    ("hermes", HERMES + '}, "id": {"a": 1}}\n</tool_call>', "", [ROME]),
    (
        "hermes",
        HERMES.replace('"', "'") + ", 'days': None}}\n</tool_call>",
        "",
        [("find", {"city": "Rome", "days": None})],
    ),
    ("hermes", '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "find"', "", [ROME]),
    (
        "hermes",
        '<tool_call>\n{"name": "find", "arguments": "Rome"}',
        '<tool_call>\n{"name": "find", "arguments": "Rome"}',
        [],
    ),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": }\n</tool_call>', "", [NOW]),
    ("kimi", KIMI.replace("find", "now") + "<|tool_call_end|><|tool_calls_section_end|> ok", " ok", [NOW]),
    ("kimi", KIMI + '{"city": "Rome<|tool_call_end|>' + KIMI[28:].replace("find:0", "now:1") + "{}", "", [ROME, NOW]),
    (
        "mistral",
        '[TOOL_CALLS]now[ARGS][TOOL_CALLS]find[ARGS]{"city": "Rome"[TOOL_CALLS]now[ARGS]',
        "",
        [NOW, ROME, NOW],
    ),
    ("mistral json", '[TOOL_CALLS] [{"name": "find", "arguments": {"city": "Rome"', "", [ROME]),
    ("deepseek v3", wide(V3 + "```<|tool▁call▁end|><|tool▁calls▁end|>So"), "So", [NOW]),
    ("deepseek v3", wide(V3.replace("now", "find") + '{"city": "Rome"\n```<|tool▁call▁end|>'), "", [ROME]),
    ("deepseek v3", wide(V3.replace("now", "find") + '{"city": "Rome"}<|tool▁call▁end|>\n ok'), "\n ok", [ROME]),
    ("llama", '{"name": "find", "parameters": {"city": "Rome"', "", [ROME]),
    ("llama", '{"name": "now", "parameters": ', "", [NOW]),
    ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", "", [NOW]),
    ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|call|>", "", [NOW]),
    ("harmony", "<|channel|>commentary to=functions.now json<|message|>null<|call|>", "", [NOW]),
    ("harmony", "<|channel|>commentary to=functions.now json<|message|>Now!<|call|>", "Now!", []),
    ("harmony", '<|channel|>commentary to=functions.find json<|message|>{"city": "Rome"<|call|>', "", [ROME]),
    *(  # only values in place of the arguments are dropped, not the same words in the next call or after it
        (name, text + ' None of "" null', ' None of "" null', [NOW, ("find", json.loads(ODD))])
        for name, text in (
            ("kimi", KIMI.replace("find", "now") + "<|tool_call_end|>" + KIMI[28:] + ODD + KIMI_END),
            ("deepseek v3", wide(V3 + '""\n```' + V3_NEXT + ODD + "\n```<|tool▁call▁end|><|tool▁calls▁end|>")),
        )
    ),
    ("mistral", "[TOOL_CALLS]now[ARGS]null[TOOL_CALLS]find[ARGS]" + '{"city": ""}', "", [NOW, ("find", {"city": ""})]),
    ("hermes", HERMES.replace("arguments", "args") + "}}", HERMES.replace("arguments", "args") + "}}", []),
    *(  # tags that are written twice, or that nothing follows, are not content
        (name, text.replace(tag, tag * 2) + more, "", [call])
        for name, text, call, tags in (
            ("glm", GLM.format("Rome"), ROME, ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")),
            ("glm", GLM.format("Rome"), ROME, ("</tool_call>",)),
            ("qwen xml", QWEN.format("Rome"), ROME, ("<tool_call>", "</tool_call>", "</function>", "<function=find>")),
            ("minimax", MINIMAX.format("Rome") + "</minimax:tool_call>", ROME, ("</minimax:tool_call>", "</invoke>")),
            ("minimax", MINIMAX.format("Rome") + "</minimax:tool_call>", ROME, ('<invoke name="find">',)),
            ("hermes", HERMES + "}}\n</tool_call>", ROME, ("<tool_call>", "</tool_call>")),
            ("kimi", KIMI.replace("find", "now") + "{}" + KIMI_END, NOW, ("<|tool_call_begin|>", "<|tool_call_end|>")),
            ("kimi", KIMI + '{"city": "Rome"}' + KIMI_END, ROME, ("<|tool_call_argument_begin|>",)),
            ("mistral", '[TOOL_CALLS]find[ARGS]{"city": "Rome"}', ROME, ("[TOOL_CALLS]", "[ARGS]")),
            ("mistral v11", '[TOOL_CALLS]find[CALL_ID]x[ARGS]{"city": "Rome"}', ROME, ("[CALL_ID]", "[ARGS]")),
            ("deepseek v3", wide(V3 + "{}\n```<|tool▁call▁end|>"), NOW, (wide("<|tool▁sep|>"),)),
        )
        for tag in tags
        for more in ("", "\n" + FORMATS[name].marks[0])
    ),
    ("hermes", HERMES + "}}\n</tool_call></tool_call> ok", " ok", [ROME]),
    *(  # the mark between the header and the message is missing
        ("harmony", f"<|channel|>commentary to=functions.find{header}" + '{"city": "Rome"}' + end, said, [ROME])
        for header in ("", " ", " json", " <|constrain|>json ")
        for end, said in (
            ("", ""),
            ("<|call|>", ""),
            ("<|end|><|start|>assistant<|channel|>final Yes.<|return|>", "Yes."),
        )
    ),
    ("harmony", "json", "json", []),
    ("harmony", "I look. <|channel|>commentary to=functions.now json<|message|>{}<|call|>", "I look.", [NOW]),
    ("harmony", "I look.<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}", "I look.", [NOW]),
    ("harmony", "<|start|>functions.now to=assistant<|channel|>commentary<|message|>ok<|end|>", "ok", []),
    ("harmony", "I look. <|channel|>final<|message|>ok", "I look.\nok", []),
    ("harmony", "I look.<|message|>ok", "I look.\nok", []),
    ("harmony", "<|start|>assistant hello<|channel|>final<|message|>ok", "hello\nok", []),
    ("harmony", "a<|end|><|start|>assistant I look. <|channel|>final<|message|>b", "a\nI look.\nb", []),
    ("harmony", "a<|start|>assistant b<|channel|>final c<|channel|>final<|message|>d", "a\nb\nc\nd", []),
    ("harmony", "<|channel|>final<|message|>So<|end|>I look.<|channel|>final<|message|>ok", "So\nI look.\nok", []),
    ("harmony", "<|channel|>The answer is 4.", "The answer is 4.", []),
    ("mistral json", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]\n    indented', "\n    indented", [NOW]),
    ("hermes", '<tool_call>\n{"name": "now", "index": 0, "description": "x"}\n</tool_call>', "", [NOW]),
    ("harmony", "<|channel|>final<|message|>So<|end|><|start|>assistant<|channel|>comm", "So", []),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|>Wait", "I look.\nWait", []),
    *(
        (name, text.replace("{}", value), "", [("find", {"city": value})])
        for name, text in (("qwen xml", QWEN), ("glm", GLM), ("minimax", MINIMAX + "</minimax:tool_call>"))
        for value in (
            f"x = '{end_tag(name)}'",
            end_tag(name),
            "a </function> </invoke> </tool_call> </minimax:tool_call> <tool_call> b",
            f"a\n{text.replace('{}', 'Rome')}\nb",
            "",
        )
    ),
    (
        "hermes",
        HERMES[:-5] + 'a </tool_call> <tool_call> b"}}',
        "",
        [("find", {"city": "a </tool_call> <tool_call> b"})],
    ),
    ("kimi", KIMI + '{"city": "a <|tool_call_end|>"}', "", [("find", {"city": "a <|tool_call_end|>"})]),
]
ENDS = ('"', "}", "]", "1", "\n</parameter>\n", "</parameter>\n", "</arg_value>\n", "true", ", ", "[/THINK]")


def parts(answer: AnswerForm, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, what is said, and the calls of a text that comes in pieces."""
    splitter, found = answer.splitter(), AnswerPart()
    for piece in pieces:
        found = found.followed_by(splitter.put(piece))
    found = found.followed_by(splitter.end())
    names, arguments = list[str](), list[str]()
    for call in found.calls:
        if call.name is not None:
            assert call.call_index == len(names) and call.id is not None
            names.append(call.name)
            arguments.append("")
        arguments[call.call_index] += call.arguments
    assert splitter.count == len(names)
    return found.reasoning, found.content, [(name, json.loads(one)) for name, one in zip(names, arguments, strict=True)]


def joined(calls: Sequence[CallPiece]) -> list[str]:
    """The arguments of each call."""
    found = dict[int, str]()
    for call in calls:
        found[call.call_index] = found.get(call.call_index, "") + call.arguments
    return list(found.values())


@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_texts(name: str) -> None:
    """As a whole, and in pieces of every size."""
    answer = AnswerForm(calls=ToolOptions(FORMATS[name], PARAMETERS), harmony=name == "harmony")
    for text, said, calls in TEXTS[name]:
        for size in (len(text), *range(1, 12), 40):
            found = parts(answer, [text[at : at + size] for at in range(0, len(text), size)])
            assert found[1:] == (said, calls), (size, text)
            assert found[0] == ("Think." if "Think." in text else "")


@pytest.mark.parametrize(("name", "text", "said", "calls"), MALFORMED)
def test_malformed_calls_have_arguments_that_are_json(name: str, text: str, said: str, calls: Any) -> None:
    """Tags or brackets that are missing, that belong to values, and words between: nothing of the text is lost."""
    answer = AnswerForm(calls=ToolOptions(FORMATS[name], TRIP), harmony=name == "harmony")
    for pieces in ([text], text):
        assert parts(answer, pieces)[1:] == (said, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"arguments": {"near": %}, "name": "find"}\n</tool_call>'),
        ("qwen xml", QWEN.replace("{}", "%").replace("city", "near")),
        ("glm", GLM.replace("{}", "%").replace("city", "near")),
    ],
)
def test_lone_surrogates_in_arguments_are_escaped(name: str, text: str) -> None:
    """UTF-8 cannot encode them, so a response with one could not be sent."""
    answer = AnswerForm(calls=ToolOptions(FORMATS[name], TRIP))
    (arguments,) = joined(answer.split(text.replace("%", '["\\ud800"]'))[0].calls)
    assert arguments.encode() == b'{"near": ["\\ud800"]}'


@pytest.mark.parametrize("name", FORMATS)
def test_answers_may_end_anywhere(name: str) -> None:
    """An answer that ends by itself has arguments that are JSON, one that was cut has their beginning, and no word is
    lost, in any division into pieces."""
    form, rng = FORMATS[name], random.Random(0)
    answer = AnswerForm(calls=ToolOptions(form, PARAMETERS), harmony=name == "harmony")
    tags = "" if form.argument is None else form.argument.before + form.argument.after
    marks = f"{form.opening} {form.call} {tags} {form.closing} analysis start assistant end"
    marks += " name function id Ab3 type"  # further fields of calls, and headers without a message, are dropped
    marks += " get_weather" if name == "harmony" else ""
    for text, *_ in TEXTS[name][:2]:
        for end in range(len(text) + 1):
            shown, cuts = text[:end], sorted(rng.choices(range(end + 1), k=3))
            pieces = [shown[i:j] for i, j in zip([0, *cuts], [*cuts, end], strict=True)]
            found = parts(answer, [shown])
            assert found == parts(answer, pieces)
            written = str(answer.split(shown)[0])
            assert all(word in written for word in re.findall(r"\w+", shown) if word not in marks), (shown, found)
            whole, opened = joined(answer.split(text)[0].calls), joined(answer.split(shown, cut=True)[0].calls)
            for full, start in zip(whole, opened, strict=False):
                if form.argument is None:
                    assert full.startswith(start), (full, start)
                with contextlib.suppress(ValueError):  # what was cut does not look whole
                    assert json.loads(start) == json.loads(full)


def test_json_passes_unchanged_and_other_texts_become_json() -> None:
    rng = random.Random(0)
    values: list[Any] = [
        None,
        True,
        -1.5e-9,
        10**20,
        "",
        'a "b" \\ {[,:]}',
        "é\n\t😀",
        [],
        {},
        [1, [2]],
        {"a": {"b": [""]}},
    ]
    for number in range(2000):
        value = {rng.choice("abc") * rng.randrange(3): rng.choice(values) for _ in range(rng.randrange(4))}
        spaces = rng.choice([(",", ":"), (", ", ": "), (" , ", " :")])
        text = json.dumps(value, ensure_ascii=number % 2 == 0, indent=rng.choice([None, 1]), separators=spaces)
        reader = JsonObject()
        assert ("".join(map(reader.put, text)), reader.done, reader.repaired) == (text, True, False)
        assert isinstance(json.loads(json_object(text[: rng.randrange(len(text))])), dict)
        letters = list(text)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(1, len(letters) + 1)
            letters[at : at + rng.randrange(2)] = rng.choice(["", *"\"'{}[]:,x1 \n\\u"])
        assert isinstance(json.loads(json_object("".join(letters))), dict), letters


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{\'a\': True, b: New York, "c": "x\ny",}', {"a": True, "b": "New York", "c": "x\ny"}),
        ('{"a": "he said "hi" to me"}', {"a": 'he said "hi" to me'}),
        ('{"a": "C:\\Users", "b": \'it\\\'s\'}', {"a": "C:\\Users", "b": "it's"}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ('{"a": 1 "b" 2', {"a": '1 "b" 2'}),
        ('{{"a": NaN}}', {"a": "NaN"}),
        ('{"a": 1.', {"a": 1.0}),
        ('{"a": tr', {"a": True}),
        ('{"a": "\\u00', {"a": "\\u00"}),
        ('{"a"', {"a": None}),
    ],
)
def test_repaired_json(text: str, value: Any) -> None:
    assert json.loads(json_object(text)) == value


def test_arguments_come_in_pieces() -> None:
    """A client sees the name first, and the arguments while they are made."""
    text = TEXTS["hermes"][0][0]
    splitter = AnswerForm(calls=ToolOptions(FORMATS["hermes"], PARAMETERS)).splitter()
    found = [piece for letter in text for piece in splitter.put(letter).calls]
    assert found[0].name == "get_weather" and not found[0].arguments and len(found) > len(JSON) / 2
    assert [call.id for call in found[1:]] == [None] * (len(found) - 1)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "10115", "10115"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"$ref": "#/$defs/level"}, "1", "1"),
        ({"$ref": "#/$defs/level"}, '"1"', '"1"'),
        ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]}, '"1"', "1"),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        (True, "5", 5),
        ({"type": 5, "enum": 3, "anyOf": {}}, "5", 5),
    ],
)
def test_values_of_arguments(schema: Any, text: str, value: Any) -> None:
    """Arguments that are written as texts have the types of their schemas."""
    level, loop = {"type": "string", "enum": ["1", "2"]}, {"$ref": "#/$defs/loop"}
    tool = {"type": "object", "properties": {"x": schema}, "$defs": {"level": level, "loop": loop}}
    answer = AnswerForm(calls=ToolOptions(FORMATS["glm"], {"f": tool}))
    written = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert parts(answer, [written])[2] == [("f", {"x": value})]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.argument is None])
def test_white_space_after_arguments_takes_linear_time(name: str) -> None:
    """Small models may repeat a line's end; one regular expression needed minutes for 600 of them."""
    text = TEXTS[name][0][0]
    answer, since = (
        AnswerForm(calls=ToolOptions(FORMATS[name], PARAMETERS), harmony=name == "harmony"),
        time.monotonic(),
    )
    assert parts(answer, [text[: text.index(JSON) + len(JSON)], *"\n" * 400])[2][-1] == BOTH[1]
    assert time.monotonic() - since < 5


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_repeated_opening_tags_take_linear_time(name: str) -> None:
    """Repeated tags, and white space in a tag, also if the text arrives in pieces."""
    form = FORMATS[name]
    answer, call = AnswerForm(calls=ToolOptions(form, PARAMETERS)), form.before_arguments.replace("NAME", "now")
    pieces = [[form.marks[0] * 200 + "x"]]
    if not form.is_object:
        pieces.append([form.opening, *[call.strip()] * 1000])
    if form.argument is not None:
        pieces += [[call, *[form.argument.opening] * 1000], [call, form.argument.opening, *" " * 400]]
    since = time.monotonic()
    for text in pieces:
        parts(answer, text)
    assert time.monotonic() - since < 5


def tokenizer_with(special: Sequence[str], texts: Sequence[str]) -> Tokenizer:
    """The tokenizer of the demo with some more tokens, special ones and others."""
    found = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    found.add_tokens([AddedToken(one, special=False, normalized=False) for one in texts])
    return found


def marks(name: str) -> list[str]:
    """The special tokens in the calls of a format."""
    known = [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
    ]
    known += [
        "<|return|>",
        *(f"<|tool_{one}|>" for one in ("calls_section_begin", "call_begin", "call_argument_begin")),
    ]
    known += ["<|tool_call_end|>", "<|tool_calls_section_end|>", "<tool_call>", "</tool_call>"]
    known += [wide(f"<|tool▁{one}|>") for one in ("calls▁begin", "call▁begin", "call▁end", "calls▁end", "sep")]
    return [one for one in known if any(one in text for text, *_ in TEXTS[name])]


def sampled(answer: AnswerForm, form: nnxmoe.Grammar | None, tokenizer: Tokenizer, seeds: int) -> Iterator[str]:
    """Texts of random ids that the grammar of an answer allows."""
    backend = nnxmoe.Tokenizer(tokenizer, {}, {}, "test")
    grammar = answer.grammar(form, backend)
    assert grammar is not None
    vocab, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|eos|>")
    # Texts end early if what ends their parts is likely.
    ends = [tokenizer.encode(one, add_special_tokens=False).ids for one in ENDS]
    for seed in range(seeds):
        rng, ids, state, plan = np.random.default_rng(seed), list[int](), grammar.start(vocab, [end]), list[int]()
        while len(ids) < 300:
            mask = empty_masks(1, 1, vocab)[0]
            state.masks([], mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little")[0, :vocab])
            if not plan and rng.random() < 0.4:
                plan = [end] if rng.random() < 0.3 else list(ends[rng.integers(len(ends))])
            new = plan.pop(0) if plan else int(rng.choice(allowed))
            if new not in allowed:
                plan.clear()
                continue
            if new == end:
                yield tokenizer.decode(ids, skip_special_tokens=False)
                break
            ids.append(new)
            state.advance([new])


def test_tokens_that_are_symbols() -> None:
    """As llguidance sees them."""
    llguidance = pytest.importorskip("llguidance")
    texts = ["<tool_call>", "<|x|>", wide("<|y|>"), "[ARGS]", "</think>", "<open", "shut>", "plain", "  "]
    tokenizer = tokenizer_with(["[CALL]", "special"], texts)
    found = symbols(nnxmoe.Tokenizer(tokenizer, {}, {}, "test"))
    tables = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|eos|>"))
    vocab = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(i) != "ÿ"]  # the byte FF
    assert set(found.values()) == {i for i in vocab if tables.is_special_token(i)}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_by_grammar(name: str, special: bool) -> None:
    """Random texts of the grammar have calls whose arguments follow the schemas, whatever else is in them."""
    tokens = marks(name)
    tokenizer = tokenizer_with(tokens if special else [], [] if special else tokens)
    ids = symbols(nnxmoe.Tokenizer(tokenizer, {}, {}, "test"))
    weather, unit = PARAMETERS["get_weather"], {"$ref": "#/$defs/unit"}
    more = {"unit": unit, "other": {"anyOf": [unit, {"type": "null"}]}}
    given = {"properties": weather["properties"] | more, "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}}}
    given |= {name: weather[name] for name in ("required", "additionalProperties")}  # no type: it is an object even so
    for several, must in ((True, True), (False, True), (True, False)):
        calls = ToolOptions(FORMATS[name], {"get_weather": given, "now": None}, must=must, strict=True, several=several)
        answer = AnswerForm(calls=calls, harmony=name == "harmony", tokens=ids)
        texts = list(sampled(answer, None, tokenizer, 8))
        assert len(texts) > 3
        counts = list[int]()
        for text in texts:
            _, said, found = parts(answer, [text])
            counts.append(len(found))
            if must:
                assert not said.strip() and found, text
            for tool, arguments in found:
                if tool == "now":
                    assert arguments == {}
                else:
                    assert {"city", "days"} <= arguments.keys() <= given["properties"].keys(), text
                    assert type(arguments["city"]) is str and type(arguments["days"]) is int
                    assert arguments.get("unit", "C") in ("C", "F") and arguments.get("other") in ("C", "F", None)
                    assert len(arguments.get("near", [])) <= 2
        assert several or max(counts) == 1


@pytest.mark.parametrize("place", ["inside", "closed", "before"])
@pytest.mark.parametrize("special", [True, False])
def test_reasoning_before_a_form(special: bool, place: str) -> None:
    """Where a model may think first, the answer has the form that is asked for after it."""
    names = ["[THINK]", "[/THINK]"]
    tokenizer = tokenizer_with(names if special else [], [] if special else names)
    backend = nnxmoe.Tokenizer(tokenizer, {}, {}, "test")
    prompt = {"inside": "[THINK]\n", "closed": "[THINK]\n\n[/THINK]\n\n", "before": ""}[place]
    answer = AnswerForm.of("[THINK] [/THINK]", prompt, None, symbols(backend))
    form = nnxmoe.Grammar.json_schema(PARAMETERS["get_weather"], backend)
    thought = 0
    for text in sampled(answer, form, tokenizer, 30):
        reasoning, said, _ = parts(answer, [text])
        assert json.loads(said).keys() >= {"city", "days"}, text
        thought += bool(reasoning)
    assert (thought > 0) == (place != "closed")


def test_forms_in_channels() -> None:
    """gpt-oss: reasoning, then JSON, or a call where there are tools."""
    tokenizer = tokenizer_with(marks("harmony"), [])
    backend = nnxmoe.Tokenizer(tokenizer, {}, {}, "test")
    form = nnxmoe.Grammar.json_schema(PARAMETERS["get_weather"], backend)
    calls, found = ToolOptions(FORMATS["harmony"], PARAMETERS), list[tuple[str, str, Any]]()
    answer = AnswerForm.of("<|channel|><|message|>", "", calls, symbols(backend))
    for text in sampled(answer, form, tokenizer, 30):
        found.append(parts(answer, [text]))
        assert found[-1][2] or json.loads(found[-1][1]).keys() >= {"city", "days"}, text
    assert any(called for *_, called in found) and any(said for _, said, _ in found) and any(one for one, *_ in found)
    assert answer.stop_ids == (tokenizer.token_to_id("<|call|>"), tokenizer.token_to_id("<|return|>"))


TOOLS = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in PARAMETERS.items()]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "How is it?"}], "temperature": 0}
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving_tools() as running:
        yield running


def asked(server: Running, **more: Any) -> tuple[dict[str, Any], str]:
    """The message of an answer, whole and streamed, and why it ended."""
    body = CHAT | {"tools": TOOLS, "max_tokens": 120} | more
    status, found = server.call(CHATS, body)
    assert status == 200, found
    (choice,) = found["choices"]
    streamed, calls, finish = "", dict[int, dict[str, Any]](), ""
    for event in server.stream(CHATS, body):
        (part,) = event["choices"]
        streamed += part["delta"].get("content") or ""
        for call in part["delta"].get("tool_calls", ()):
            one = calls.setdefault(call["index"], {"arguments": ""})
            one["arguments"] += call["function"]["arguments"]
            assert ("name" in call["function"]) == ("name" not in one) == ("id" in call)
            one |= {"name": call["function"]["name"]} if "name" in call["function"] else {}
        finish = part["finish_reason"] or finish
    message = choice["message"]
    whole = [
        {"arguments": call["function"]["arguments"], "name": call["function"]["name"]}
        for call in message.get("tool_calls", ())
    ]
    assert (streamed, list(calls.values()), finish) == (message["content"] or "", whole, choice["finish_reason"])
    return message, finish


@pytest.mark.slow
def test_tools_are_called(server: Running) -> None:
    message, finish = asked(server, tool_choice="required", temperature=0.8, seed=1)
    assert finish in ("tool_calls", "length") and message["content"] is None and message["tool_calls"]
    message, finish = asked(server, tool_choice={"type": "function", "function": {"name": "now"}})
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"]), finish) == ("now", {}, "stop")
    written = f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>'
    message, finish = asked(server, guided_choice=[f"I look.\n{written}"])
    assert (message["content"], finish) == ("I look.", "tool_calls")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    message, finish = asked(server, tool_choice="none", guided_choice=[written])
    assert (message["content"], finish) == (written, "stop") and "tool_calls" not in message


@pytest.mark.slow
def test_answers_of_tools_are_sent_back(server: Running) -> None:
    """The message of an answer, as it is, and what its calls returned; arguments reach the template as objects."""
    message, _ = asked(server, guided_choice=['So <tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'])
    (call,) = message["tool_calls"]
    turns = [*CHAT["messages"], message, {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}]
    status, found = server.call(CHATS, CHAT | {"messages": turns, "tools": TOOLS, "max_tokens": 4})
    assert status == 200 and found["choices"][0]["message"]["role"] == "assistant", found
    tokens = found["usage"]["prompt_tokens"]
    call["function"]["arguments"] = {"a": 1}
    status, found = server.call(CHATS, CHAT | {"messages": turns, "tools": TOOLS, "max_tokens": 4})
    assert status == 200 and found["usage"]["prompt_tokens"] == tokens
    call["function"]["arguments"] = ""  # as clients write no arguments
    assert server.call(CHATS, CHAT | {"messages": turns, "tools": TOOLS, "max_tokens": 4})[0] == 200
    call["function"]["arguments"] = "[1]"  # for which the template has no items()
    status, found = server.call(CHATS, CHAT | {"messages": turns, "tools": TOOLS, "max_tokens": 4})
    assert status == 400 and "'[1]' are not a JSON object" in found["error"]["message"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "there is no function 'other'"),
        ({"tools": TOOLS[:1] * 2}, "two functions have the same name"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tool_choice": "always"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}],
                "tool_choice": "required",
            },
            "strange",
        ),
    ],
)
def test_what_is_refused(server: Running, more: dict[str, Any], why: str) -> None:
    status, found = server.call(CHATS, CHAT | {"tools": TOOLS, "max_tokens": 4} | more)
    assert status == 400 and why in found["error"]["message"], found


def test_templates_without_tools() -> None:
    """Are refused by name, as are those whose calls no format describes."""
    tokenizer = nnxmoe.Tokenizer.from_pretrained(DEMO)
    with serving(nnxmoe.from_pretrained(DEMO), tokenizer) as running:
        for template, why in (
            (tokenizer.chat_template, "does not read tools"),
            ("{{ tools }}", "none of the call formats"),
        ):
            tokenizer.chat_templates = {"default": template}
            status, found = running.call(CHATS, CHAT | {"tools": TOOLS})
            assert status == 400 and why in found["error"]["message"] and found["error"]["param"] == "tools"


def test_formats_of_templates() -> None:
    words = {name: " ".join(form.template_words) for name, form in FORMATS.items()}
    assert {
        name: next(key for key, form in FORMATS.items() if form is format_of(text)) for name, text in words.items()
    } == {name: name for name in FORMATS}
    assert format_of("{{ tools }}") is None
