"""Multilinear functions with custom transposes, for forward and reverse mode.

``jax.custom_vjp`` supports reverse mode only, not ``jax.jvp``. ``jax.custom_derivatives.linear_call`` supports neither
batching nor differentiation with respect to its residual arguments (JAX 0.10 to 0.12).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Function = Callable[..., Array]


def multilinear(function: Function, transposes: Mapping[int, Function], forward: Function | None = None) -> Function:
    """``function``, which is linear in each argument whose position is a key of ``transposes``, with derivatives.

    ``transposes[i](*others, d_out)`` returns the gradient of argument i; ``others`` are all arguments except i. Under
    differentiation the output is computed by ``forward``. All operations are visible to rematerialisation policies.
    """
    wrapped = jax.custom_jvp(function)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out, slope = (forward or function)(*primals), None
        for i, transpose in transposes.items():
            if isinstance(tangents[i], SymbolicZero):
                continue
            others = (*primals[:i], *primals[i + 1 :])

            def term(*given: Any, i: int = i) -> Any:
                return wrapped(*given[:i], given[-1], *given[i:-1])

            more = _linear.bind(*others, tangents[i], function=term, transpose=transpose)
            slope = more if slope is None else slope + more
        return out, SymbolicZero(jax.typeof(out)) if slope is None else slope

    wrapped.defjvp(jvp, symbolic_zeros=True)
    return wrapped


# Computes ``function(*constants, x)``, linear in x; the gradient of x is ``transpose(*constants, d_out)``.
_linear = Primitive("linear")


@_linear.def_impl
def _run(*given: Any, function: Function, transpose: Function) -> Any:
    return function(*given)


@_linear.def_abstract_eval
def _shape(*given: Any, function: Function, transpose: Function) -> Any:
    return jax.make_jaxpr(function)(*given).out_avals[0]


def _jvp(primals: Any, tangents: Any, *, function: Function, transpose: Function) -> tuple[Any, Any]:
    *constants, x = primals
    *d_constants, d_x = tangents
    out = _linear.bind(*primals, function=function, transpose=transpose)
    terms = []
    if not isinstance(d_x, ad.Zero):
        terms.append(_linear.bind(*constants, d_x, function=function, transpose=transpose))
    moved = [i for i, d in enumerate(d_constants) if not isinstance(d, ad.Zero)]
    if moved:

        def of_moved(*values: Array) -> Any:
            given = dict(zip(moved, values, strict=True))
            return function(*(given.get(i, c) for i, c in enumerate(constants)), x)

        terms.append(jax.jvp(of_moved, [constants[i] for i in moved], [d_constants[i] for i in moved])[1])
    return out, sum(terms[1:], terms[0])


def _transposed(d_out: Any, *given: Any, function: Function, transpose: Function) -> list[Any]:
    *constants, x = given
    assert ad.is_undefined_primal(x) and not any(map(ad.is_undefined_primal, constants))
    d_x = ad.Zero(x.aval) if isinstance(d_out, ad.Zero) else transpose(*constants, d_out)
    return [*(None for _ in constants), d_x]


def _batched(given: Any, dims: Any, *, function: Function, transpose: Function) -> tuple[Any, int]:
    axes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    if axes[-1] is None:  # x is not batched: its gradient is the sum over the batch

        def summed(*given: Any) -> Any:
            return jax.vmap(transpose, (*axes[:-1], 0))(*given).sum(axis=0)

        back = summed
    else:
        back = jax.vmap(transpose, (*axes[:-1], 0), axes[-1])
    return _linear.bind(*given, function=jax.vmap(function, axes), transpose=back), 0


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transposed
batching.primitive_batchers[_linear] = _batched
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=False))
