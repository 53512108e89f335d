"""Interpret parameter names by the words that published decoder implementations use."""

import dataclasses
import itertools
import re

from nnxmoe.linen.mapping import LAYER

Roles = frozenset[str]
# Phrase -> the single word that replaces it. Spaces separate words of a component. " / " separates components.
_PHRASES = [
    (re.compile(rf"\b(?:{pattern})\b"), word)
    for pattern, word in {
        "multi ?head|qk": "", "lm ?head|logits dense|logits|unembed(?:ding)?": "head",
        "attn vec einsum": "attention o", "c attn|q k v|query key value|w?qkv": "fused",
        "gate up|up gate|gateup": "fused",
        "biases|logit bias / values": "bias", "sink|sinks / scores": "sinks",
        "shared experts?": "shared", "expert": "experts", "feed ?forward": "mlp", "ln f|lnf": "final norm",
        "c proj": "out", "output": "out",
        "token embedder|embed tokens|tok embeddings|wte|embed(?:der|dings?)": "embed",
        "(?:layer|rms) ?norm|ln|rms": "norm", "w ([123])": r"w\1", "wi ([01])": r"wi\1",
        "wkv": "kv", "wq|query|queries": "q", "wk|key": "k", "wv|value": "v",
        "attn|sa|mha|gqa|mqa|mla": "attention", "ffn|ffw|ff|swiglu|glu": "mlp", "before": "pre", "after": "post",
    }.items()
]  # fmt: skip
_LEAVES = frozenset("kernel weight weights w bias b scale gamma beta embed table".split())
_NOISE = frozenset("transformer decoder model layer layers block blocks h stack stacks self proj c to norm".split())
_SIDES = {"attention": "attention"} | dict.fromkeys("mlp moe experts shared router".split(), "mlp")
_POSITIONS = frozenset("pre post input final".split())
_ROLES: dict[str, Roles] = {
    **{word: frozenset({word}) for word in "q k v o kv up down router embed head fused sinks".split()},
    "gate": frozenset({"gate", "router"}), "gating": frozenset({"gate", "router"}), "wi": frozenset({"gate", "up"}),
    "out": frozenset({"o", "down", "head"}), "wo": frozenset({"o", "down"}),
    "wi0": frozenset({"gate"}), "wi1": frozenset({"up"}),  # T5X
    **dict.fromkeys(("w1", "w2", "w3", "fc"), frozenset({"gate", "up", "down"})),  # see `propose`
    **dict.fromkeys(("wpe", "pos", "position", "positions"), frozenset({"position"})),
}  # fmt: skip
_OF_SIDE = {
    "attention": frozenset({"q", "k", "v", "o", "kv", "gate", "fused", "sinks"}),
    "mlp": frozenset({"gate", "up", "down", "router", "fused"}),
}
_NORMS = {  # (position, side) -> possible norms of a layer
    ("pre", "attention"): {"attention_norm"}, ("input", "attention"): {"attention_norm"},
    ("input", ""): {"attention_norm"}, ("", "attention"): {"attention_norm", "attention_post_norm"},
    ("post", "attention"): {"attention_post_norm", "mlp_norm"}, ("pre", "mlp"): {"mlp_norm"},
    ("input", "mlp"): {"mlp_norm"}, ("", "mlp"): {"mlp_norm", "mlp_post_norm"}, ("post", "mlp"): {"mlp_post_norm"},
    ("final", ""): {"final"},
}  # fmt: skip
_OURS = {"norm": "final", "moe_norm": "mlp_norm", "moe_post_norm": "mlp_post_norm"}
_OURS |= {name: name for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")}


@dataclasses.dataclass(frozen=True)
class Words:
    """Meaning of a parameter name. Fields are empty or None if the name does not determine them.

    Attributes:
        roles: Possible roles of the parameter, such as ``{"q"}``, or ``{"gate", "router"}`` for the
            word ``gate``.
        aspects: (sublayer, expert type, low-rank factor). The sublayer is ``attention`` or ``mlp``,
            the expert type ``experts`` or ``shared``, and the factor ``a`` or ``b``.
        stem: The words without ``digits`` and noise words.
        rest: Words without a known meaning.
    """

    roles: Roles
    norm: bool | None
    bias: bool | None
    aspects: tuple[str, str, str]
    stem: tuple[str, ...]
    digits: tuple[str, ...]
    rest: frozenset[str]

    def contradicts(self, other: "Words") -> bool:
        """Check whether both names determine the same field with incompatible values."""
        flags = ((self.norm, other.norm), (self.bias, other.bias))
        aspects = zip(self.aspects, other.aspects, strict=True)
        return (
            any(None not in pair and pair[0] != pair[1] for pair in flags)
            or any(value and other_value and value != other_value for value, other_value in aspects)
            or (bool(self.roles and other.roles) and not self.roles & other.roles)
        )


def read(name: str, unambiguous: bool = False) -> Words:
    """Interpret a parameter name. Set ``unambiguous`` for the names in a `CausalLM`."""
    parts = _words(name)
    leaf = parts[-1][0] if parts and len(parts[-1]) == 1 and parts[-1][0] in _LEAVES else ""
    inner = parts[:-1] if leaf and len(parts) > 1 else parts
    words = [word for part in inner for word in part if word != "bias"]
    sides = {_SIDES[word] for word in words if word in _SIDES}
    side = next(iter(sides)) if len(sides) == 1 else ""
    can_be_norm = leaf in ("", "weight", "weights", "w", "scale", "gamma", "bias", "b", "beta") and not unambiguous
    norm = True if "norm" in words else None if can_be_norm else False
    if norm or (can_be_norm and leaf in ("scale", "gamma")):
        roles, aspects = _norm_roles(words, inner[-1]), ("", "", "")
        if unambiguous:
            role = _OURS.get(name.split("/")[-2] if name.count("/") else "")
            roles = frozenset({role}) if role and (role == "final") == (name == "norm/scale") else roles
    else:
        roles = _roles(inner, side) or frozenset({"embed"} if leaf == "embed" else ())
        roles = frozenset({"gate"}) if unambiguous and roles == _ROLES["gate"] else roles
        part = next((word for word in ("shared", "experts") if word in words), "")
        pairs = itertools.pairwise(words)
        aspects = (
            side,
            part,
            next((second for first, second in pairs if first in ("q", "kv") and second in ("a", "b")), ""),
        )
    has_bias = leaf in ("bias", "b", "beta") or (not leaf and any("bias" in part for part in inner))
    bias = has_bias if has_bias or leaf or unambiguous else None
    known_words = _NOISE | _SIDES.keys() | _ROLES.keys() | _POSITIONS | {"a", "b"}
    return Words(
        roles,
        norm,
        bias,
        aspects,
        (*sorted(w for w in words if w not in _NOISE and not w.isdigit()), "norm" * bool(norm), "bias" * bool(bias)),
        tuple(word for word in words if word.isdigit()),
        frozenset(word for word in words if word not in known_words and not word.isdigit()),
    )


def _words(name: str) -> list[list[str]]:
    """Split a name into the words of each component: ``MoEBlock_0/wi_1`` -> ``[[moe, block, 0], [wi1]]``."""
    components = [part.replace("MoE", "Moe") for part in re.split(r"[/. ]+", name.replace(LAYER, "")) if part]
    pattern = r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+"
    text: str = " / ".join(" ".join(re.findall(pattern, part)).lower() for part in components)
    for phrase, word in _PHRASES:
        text = phrase.sub(word, text)
    return [list[str](part.split()) for part in text.split("/") if part.split()]


def _roles(parts: list[list[str]], side: str) -> Roles:
    """Return the roles allowed by the innermost component that has roles.

    The result is empty if the roles belong to the other sublayer.
    """
    for part in reversed(parts):
        if allowed := [_ROLES[word] for word in part if word in _ROLES]:
            common = frozenset.intersection(*allowed) or frozenset({"fused"})
            return common & _OF_SIDE[side] if side else common
    return frozenset()


def _norm_roles(words: list[str], module: list[str]) -> Roles:
    """Return the norms of a layer that a name may refer to.

    ``module`` contains the words of the last component. An attention block may contain several
    norms. A feed-forward block contains none.
    """
    projections = [_ROLES[word] for word in words if word in ("q", "k", "v", "kv", "embed")]
    positions = {word for word in module if word in _POSITIONS}
    sides = {_SIDES[word] for word in module if word in _SIDES}
    if not sides and "norm" in module and {_SIDES[word] for word in words if word in _SIDES} == {"mlp"}:
        sides = {"mlp"}
    if projections or len(positions) > 1 or len(sides) > 1:
        return projections[-1] if projections else frozenset()
    return frozenset(_NORMS.get((next(iter(positions), ""), next(iter(sides), "")), ()))
