"""Attention functions for Flax, linen and nnx alike, and the swap of one into a model that is already written.

Both libraries take an `attention_fn`. linen passes it only those arguments whose names it reads off the signature, and
drops the others without a word, the mask too; nnx passes all of its own. So the function made here names every
parameter of both. What the kernels do not compute (dropout, attention weights that are to be kept, the caller's own
einsums, a precision) goes to the dense computation of Flax under the same mask, never past it.

Segment ids have no place in Flax's interface: they come by `segment_ids(...)`, a context, or by a `SegmentMask` in the
mask's place. Neither can be lost: a context that no attention has read is an error where it ends.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype as promote_together

from jax_fa4 import arguments
from jax_fa4.attention import attention
from jax_fa4.reference import visible_pairs

__all__ = ["SegmentMask", "attention_fn", "segment_ids", "swap_nnx_attention", "swapped_linen_attention"]

AttentionFunction = Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentMask:
    """Segment ids in the place of a mask; a pytree, so that it passes through Flax modules, `jit`, `scan` and `remat`.

    Attributes:
      segment_ids: as for `jax_fa4.attention`: (..., T) integers, or a pair of (..., T) and (..., S).
      mask: a mask besides, or None.
    """

    segment_ids: Any
    mask: Any = None


class _Context:
    """Ids that a `with` block provides, and whether some attention has read them."""

    def __init__(self, ids: Any):
        self.ids, self.is_read = ids, False


_context: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("jax_fa4_segment_ids", default=None)


@contextlib.contextmanager
def segment_ids(ids: Any) -> Iterator[None]:
    """Every attention traced inside, of a function that `attention_fn` made, keeps these segments apart.

    Enter it inside of the function that `jax.jit` traces: what is traced already would not see the ids.

    Args:
      ids: as for `jax_fa4.attention`: (..., T) integers, or a pair of (..., T) and (..., S); None leaves an outer
        context out.

    Raises:
      RuntimeError: no attention has read the ids.
    """
    context = _Context(ids)
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)
    if ids is not None and not context.is_read:
        raise RuntimeError(
            "segment_ids were given to a block in which no attention of jax_fa4.flax was traced, so nothing kept the "
            "segments apart; pass attention_fn=jax_fa4.flax.attention_fn() to the model's attention modules, and enter "
            "the context inside of the function that jax.jit traces."
        )


def attention_fn(
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str | None = None,
    logits_soft_cap: float | None = None,
    deterministic: bool = False,
    mask_is_redundant: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> AttentionFunction:
    """A function for `attention_fn` of linen's `MultiHeadDotProductAttention` and nnx's `MultiHeadAttention`.

    What it computes is what `jax_fa4.attention` does, in grouped heads and in any number of batch dimensions. Masks of
    any dtype are taken (nonzero: the pair takes part); they are general masks, which `blockwise` computes, so say
    `is_causal` here where it is known. One query that comes with a mask and many keys is a step of decoding from a
    cache: then the mask alone says which keys are there, and `is_causal` does not apply.

    Dropout, `module` (attention weights are sown), the caller's own einsums and a precision are computed densely.

    Args:
      is_causal: query i sees key j only if j <= i. nnx can also say so call by call.
      local_window_size: as for `jax_fa4.attention`.
      causal_alignment: as for `jax_fa4.attention`; None: "top_left", and where T != S causality is refused.
      logits_soft_cap: as for `jax_fa4.attention`.
      deterministic: gradients must be bitwise equal from run to run. (Flax's argument of that name is about dropout.)
      mask_is_redundant: the caller's promise that masks say nothing beyond causality, window and segment ids; they are
        left out, except in a step of decoding, and kernels can take the call. Checked where a mask is not traced.
      implementation: as for `jax_fa4.attention`.

    Returns:
      A function of query (..., T, N, D), key (..., S, K, D) and value (..., S, K, Dv), and of every other argument
      that linen or nnx passes, to (..., T, N, Dv).
    """
    fixed = {
        "local_window_size": local_window_size,
        "logits_soft_cap": logits_soft_cap,
        "deterministic": deterministic,
        "implementation": implementation,
    }
    always_causal = is_causal

    def attend(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,  # it always is
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        if promote_dtype is None:
            query, key, value = promote_together(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        ids, mask = _read_ids(mask)
        options = {**fixed, "segment_ids": ids, "causal_alignment": causal_alignment or "top_left"}
        options["is_causal"] = _is_causal(query, key, mask, is_causal or always_causal, causal_alignment)
        is_decoding = _is_decoding(query, key, mask)
        if is_decoding and local_window_size is not None:
            raise ValueError(
                f"local_window_size is {local_window_size}, but one query with {key.shape[-3]} keys is a step of "
                "decoding from a cache, whose mask alone tells where the query stands. Build a second function without "
                "local_window_size for decoding, and pass a mask that holds the window."
            )
        if mask is not None:
            mask = jnp.asarray(mask) if isinstance(mask, jax.Array) else np.asarray(mask)
            mask = mask.astype(bool)
        if mask is not None and mask_is_redundant and not is_decoding:
            _check_redundant(query, key, value, mask, options)
            mask = None
        has_einsums = not (einsum_dot_general is qk_attn_weights_einsum is attn_weights_value_einsum is None)
        has_dropout = dropout_rate > 0 and not deterministic
        if not (has_dropout or has_einsums or module is not None or _is_special(precision)):
            return attention(query, key, value, bias, mask, **options)
        return _dense(
            (query, key, value, bias, mask),
            options,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            precision=precision,
            module=_NnxSower(module) if isinstance(module, nnx.Module) else module,
            force_fp32_for_softmax=force_fp32_for_softmax,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )

    return attend


def _read_ids(mask: Any) -> tuple[Any, Any]:
    """The segment ids of a call, from the mask's place or from the context, and the mask proper."""
    context = _context.get()
    from_context = None if context is None else context.ids
    if context is not None:
        context.is_read = True
    if not isinstance(mask, SegmentMask):
        return from_context, mask
    if from_context is not None:
        raise ValueError("segment_ids come from a SegmentMask and from the context segment_ids(...); give them once.")
    return mask.segment_ids, mask.mask


def _is_decoding(query: Any, key: Any, mask: Any) -> bool:
    return mask is not None and query.shape[-3] == 1 and key.shape[-3] != 1


def _is_causal(query: Any, key: Any, mask: Any, is_asked: bool, alignment: str | None) -> bool:
    """Whether causality that was asked for holds in this call: not in a step of decoding."""
    if not is_asked or _is_decoding(query, key, mask):
        return False
    if query.shape[-3] != key.shape[-3] and alignment is None:
        raise ValueError(
            f"is_causal is True, but query has length {query.shape[-3]} and key {key.shape[-3]}. "
            "Give attention_fn a causal_alignment, 'top_left' or 'bottom_right', or give cross-attention a function "
            "that is not causal."
        )
    return True


def _is_special(precision: Any) -> bool:
    return precision not in (None, jax.lax.Precision.DEFAULT, "default")


def _visible(operands: Sequence[Any], options: dict[str, Any]) -> jax.Array:
    """Which pairs take part in a call, (..., 1 or N, T, S)."""
    query, key, value, _, mask = operands
    names = ("is_causal", "local_window_size", "causal_alignment", "segment_ids")
    call = arguments.read_call(query, key, value, mask=mask, **{name: options[name] for name in names})
    visible = visible_pairs(call.problem, call.operands)
    visible = jnp.broadcast_to(visible, (call.problem.batch, *visible.shape[1:]))
    return visible.reshape(*call.leading, *visible.shape[1:])


def _check_redundant(query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> None:
    if isinstance(mask, jax.core.Tracer) or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(options)):
        return
    structure = [np.zeros(x.shape, bool) for x in (query, key, value)]
    zeros = [x.astype(np.float32) for x in structure]
    with jax.ensure_compile_time_eval():
        alone = _visible((*zeros, None, None), options)
        is_same = bool(jnp.all(mask | ~alone))
    if not is_same:
        raise ValueError(
            "mask rules out pairs that is_causal, local_window_size and segment_ids allow, although attention_fn was "
            "given mask_is_redundant=True. Leave that out."
        )


class _NnxSower:
    """Takes what linen's dense attention sows into an nnx module, under nnx's kind for it."""

    def __init__(self, module: nnx.Module):
        self._module = module

    def sow(self, collection: str, name: str, value: jax.Array) -> None:
        """Keep `value` under `name`."""
        self._module.sow(nnx.Intermediate, name, value)


def _dense(operands: Sequence[Any], options: dict[str, Any], **flax_options: Any) -> jax.Array:
    """Flax's own dense attention under the mask of the call, with jax_fa4's meaning of rows that see nothing."""
    query, key, value, bias, _ = operands
    visible = _visible(operands, options)
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    # What nobody sees may be NaN, and NaN times a weight of zero is NaN.
    is_seen = jnp.swapaxes(jnp.any(visible, axis=-2), -1, -2)[..., None]
    sees = jnp.swapaxes(jnp.any(visible, axis=-1), -1, -2)[..., None]
    query, key, value = (jnp.where(s, x, 0) for s, x in ((sees, query), (is_seen, key), (is_seen, value)))
    cap = options["logits_soft_cap"]
    if cap is not None:
        flax_options |= _capped_einsums(cap, flax_options)
    out = linen.dot_product_attention(query, key, value, bias, visible, **flax_options)
    return jnp.where(sees, out, 0)


def _capped_einsums(cap: float, flax_options: dict[str, Any]) -> dict[str, Any]:
    """Einsums for Flax's dense attention that cap the logits, which it has no option for."""
    plain = functools.partial(
        jnp.einsum,
        precision=flax_options["precision"],
        _dot_general=flax_options["einsum_dot_general"] or jax.lax.dot_general,
    )
    logits_of = flax_options["qk_attn_weights_einsum"] or plain
    return {
        "precision": None,
        "einsum_dot_general": None,
        "qk_attn_weights_einsum": lambda *arguments: cap * jnp.tanh(logits_of(*arguments) / cap),
        "attn_weights_value_einsum": flax_options["attn_weights_value_einsum"] or plain,
    }


@contextlib.contextmanager
def swapped_linen_attention(function: AttentionFunction) -> Iterator[None]:
    """Inside, linen's attention modules that were left with Flax's own attention function compute with this one.

    For models whose code cannot be changed: `init` and `apply` that are traced inside are swapped; parameters are the
    same. Enter it inside of the function that `jax.jit` traces.

    Args:
      function: one that `attention_fn` made.

    Raises:
      RuntimeError: no attention module was called.
    """
    count = 0

    def intercept(call: Any, positional: Any, named: Any, context: Any) -> Any:
        nonlocal count
        module = context.module
        is_attention = isinstance(module, linen.MultiHeadDotProductAttention) and context.method_name == "__call__"
        if not is_attention or module.attention_fn is not linen.dot_product_attention:
            return call(*positional, **named)
        count += 1
        object.__setattr__(module, "attention_fn", function)  # a bound module is frozen
        try:
            return call(*positional, **named)
        finally:
            object.__setattr__(module, "attention_fn", linen.dot_product_attention)

    with linen.intercept_methods(intercept):
        yield
    if not count:
        raise RuntimeError(
            "no linen.MultiHeadDotProductAttention with Flax's own attention function was called in the block, so "
            "nothing was swapped; enter swapped_linen_attention inside of the function that jax.jit traces, or pass "
            "attention_fn to the modules where the model is written."
        )


def swap_nnx_attention(model: nnx.Module, function: AttentionFunction) -> int:
    """Gives every `nnx.MultiHeadAttention` of a model this attention function, in place; parameters stay as they are.

    Args:
      model: an nnx module.
      function: one that `attention_fn` made.

    Returns:
      How many there were.

    Raises:
      ValueError: there was none.
    """
    modules = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.MultiHeadAttention)]
    if not modules:
        raise ValueError(
            f"model is a {type(model).__name__} without any nnx.MultiHeadAttention, so nothing was swapped. Pass the "
            "attention function where the model is written."
        )
    for module in modules:
        module.attention_fn = function
    return len(modules)
