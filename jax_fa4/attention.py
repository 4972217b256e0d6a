"""The entry points: `attention`, `ring_attention` for a split sequence, and `explain`, which says what a call gets."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import arguments, autodiff, dispatch, partitioning, segments
from jax_fa4.dispatch import DifferentiableOnce, Explanation, Implementation, Target
from jax_fa4.ring import Ring
from jax_fa4.ring_steps import LAYOUTS, chunks_of


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    causal_alignment: str = "top_left",
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    return_residual: bool = False,
    deterministic: bool = False,
    key_splits: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    r"""Scaled dot-product attention; a superset of `jax.nn.dot_product_attention`.

    For each query row, over the keys that it sees,

    .. math:: \mathrm{out} = \mathrm{softmax}(\mathrm{softcap}(\mathrm{scale} \, q k^T) + \mathrm{bias}) \, v

    A row that sees no key gives output 0, log-sum-exp -inf (its sink, where there are sinks) and zero gradients. Rows
    of query, key and value that take part in nothing may hold anything, NaN included. Scores, sums and the log-sum-exp
    are float32, or float64 for float64 operands.

    Args:
      query: (..., T, N, D), bfloat16, float16, float32 or float64; any number of leading batch dimensions, or none.
      key: (..., S, K, D) of query's dtype; N is a multiple of K, and query head n uses key head n // (N / K).
      value: (..., S, K, Dv) of query's dtype.
      bias: added to the logits; floats of any dtype that broadcast to (..., N, T, S), each dimension full or 1.
      mask: bool, broadcasts to (..., N, T, S); True where the pair takes part.
      scale: factor on the logits; a number, or a scalar array (then it has a gradient). None: 1 / sqrt(D).
      is_causal: query i sees key j only if j <= i.
      query_seq_lengths: (...) integers; query rows at or past their length see nothing.
      key_value_seq_lengths: (...) integers; keys at or past their length are unseen. Either works without the other.
      local_window_size: (left, right): query i sees key j only if i - left <= j <= i + right. An int w is (w, w); None
        or -1 leaves a side unbounded. Together with `is_causal` it is the intersection.
      segment_ids: (..., T) integers, or a pair of (..., T) and (..., S): a query sees a key only if their ids are
        equal. Ids may come in any order, and must fit into int32; a negative id is padding, which sees nothing and is
        not seen. Or what `plan_segments` made of them, once for all layers.
      causal_alignment: "top_left": query 0 lies on the diagonal with key 0, as in jax.nn; "bottom_right": the last
        query lies on it with the last key. Holds for causality and for the window.
      logits_soft_cap: c > 0 caps logits: c * tanh(scale * q.k / c), before bias and mask.
      sinks: (N,) floats, one more logit for each head in the denominator, without a value.
      return_residual: also return the log-sum-exp, with its true gradient.
      deterministic: gradients must be bitwise equal from run to run.
      key_splits: into how many parts the keys are cut, each computed by itself in the forward pass and merged exactly,
        for few queries against many keys. None: kernels take as many as pay, "blockwise" none. "reference" takes none.
      implementation: "fa4" (kernels), "emulated" (the same kernels on an emulated GPU), "blockwise" (pure JAX, linear
        memory, on every device), "reference" (dense, derivatives of every order); or a sequence of these, tried in
        order. None takes a kernel where one fits, else "blockwise". Only "reference" has forward-mode and second
        derivatives.

    NumPy arrays and Python sequences of ids and lengths are known when the call is traced: schedules are made then, and
    values are checked. A `jax.Array` is traced always, so that new ids never recompile.

    Returns:
      The output (..., T, N, Dv) in query's dtype; with `return_residual` a pair of it and the log-sum-exp (..., T, N),
      float32 (float64 for float64 operands).

    Raises:
      TypeError: an argument has the wrong kind or dtype; or forward-mode or second derivatives of an implementation
        without them.
      ValueError: an argument has the wrong shape or value.
      NotImplementedError: no implementation that `implementation` names takes the call.

    Source: Dao et al. 2022 (FlashAttention), Ainslie et al. 2023 (grouped heads), Xiao et al. 2023 (sinks).
    """
    names = dispatch.read_names(implementation)
    call = segments.read_call(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        causal_alignment=causal_alignment,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_residual=return_residual,
        deterministic=deterministic,
        key_splits=key_splits,
    )
    target = dispatch.current_target(call.operands.query)

    def attempt(chosen: Implementation, seen: Target) -> autodiff.Pair:
        run = functools.partial(autodiff.attend, chosen, call.problem, seen)
        return partitioning.run_sharded(run, call.operands)

    out, lse = dispatch.run(names, call.problem, target, attempt)
    out = out.reshape(*call.leading, *out.shape[1:])
    if not return_residual:
        return out
    return out, lse.reshape(*call.leading, *lse.shape[1:])


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    axis_name: str | tuple[str, ...],
    layout: str = "contiguous",
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    return_residual: bool = False,
    deterministic: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Attention over a sequence that the devices along a mesh axis share; called inside `jax.shard_map`.

    Keys and values go round the ring of devices while each attends to those that it has; in the backward pass their
    gradients go with them. The result is that of `attention` on the whole sequence; memory per device is linear in its
    share. (Under `jax.jit` with a sequence that is sharded, `attention` does the same by itself.)

    Args:
      query: (..., T, N, D), this device's share of the queries; all shares are of one length.
      key: (..., S, K, D), this device's share of the keys.
      value: (..., S, K, Dv), this device's share of the values.
      bias: refused, as every key that travels would need its column; `attention` takes it.
      mask: refused likewise.
      axis_name: the mesh axis, or axes, along which the sequence is split.
      layout: which part of the sequence a device holds. "contiguous": device d of P has part d of P. "zigzag": of 2 P
        parts it has d and 2 P - 1 - d, one after the other; under a causal mask all devices then have the same work.
        `zigzag_order` gives the order of tokens.
      scale: as for `attention`.
      is_causal: as for `attention`, by places in the whole sequence.
      query_seq_lengths: (...) integers, the same on every device: query rows of the whole sequence at or past their
        length see nothing.
      key_value_seq_lengths: (...) integers, the same on every device: keys of the whole sequence at or past their
        length are unseen.
      local_window_size: as for `attention`, by places in the whole sequence; steps that no window reaches are left out.
      segment_ids: the ids of this device's share, (..., T), or a pair of (..., T) and (..., S).
      logits_soft_cap: as for `attention`.
      sinks: as for `attention`.
      return_residual: as for `attention`.
      deterministic: as for `attention`.
      implementation: as for `attention`; what each device computes with.

    Returns:
      This device's share of the output, (..., T, N, Dv); with `return_residual` a pair of it and the log-sum-exp.

    Raises:
      TypeError: as `attention`.
      ValueError: as `attention`; or `axis_name` names no axis of a `jax.shard_map` around the call, or `layout` does
        not fit.
      NotImplementedError: as `attention`; or there is a bias or a mask.

    Source: Liu et al. 2023 (ring attention), Zhu 2024 (zigzag).
    """
    names = dispatch.read_names(implementation)
    axes = _read_axes(axis_name)
    devices = _ring_size(axes)
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            raise NotImplementedError(
                f"{name} has a column for every key, and keys travel along {', '.join(axes)}. Call attention under "
                f"jax.jit with a sharded sequence, which gathers keys for a {name}; lengths, windows and segment_ids "
                "are masks that travel."
            )
    if isinstance(segment_ids, segments.SegmentPlan):
        raise TypeError(
            "segment_ids is a SegmentPlan, which is of whole sequences. Pass this device's share of the ids; what they "
            f"make of each step along {', '.join(axes)} is found there."
        )
    call = arguments.read_call(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_residual=return_residual,
        deterministic=deterministic,
        devices=devices,
    )
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}. One of {', '.join(map(repr, LAYOUTS))} is accepted.")
    lengths = call.problem.query_length, call.problem.key_length
    if layout == "zigzag" and any(length % 2 for length in lengths):
        raise ValueError(
            f"layout is 'zigzag', but this device has {lengths[0]} queries and {lengths[1]} keys. Even numbers are "
            "accepted: a share is two parts of one length; pad with negative segment_ids, or pass layout='contiguous'."
        )
    target = dispatch.current_target(call.operands.query)

    def attempt(chosen: Implementation, seen: Target) -> autodiff.Pair:
        if not isinstance(chosen, DifferentiableOnce):
            raise NotImplementedError("it has no backward pass of its own, which a ring needs; pass 'blockwise'.")
        ring = Ring(chosen, axes, devices, layout)
        reason = ring.why_not(call.problem, seen)
        if reason is not None:
            raise NotImplementedError(reason)
        return autodiff.attend(ring, call.problem, seen, call.operands)

    out, lse = dispatch.run(names, call.problem, target, attempt)
    out = out.reshape(*call.leading, *out.shape[1:])
    if not return_residual:
        return out
    return out, lse.reshape(*call.leading, *lse.shape[1:])


def _read_axes(axis_name: Any) -> tuple[str, ...]:
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, Sequence) or not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"axis_name is {axis_name!r}. The name of the mesh axis along which the sequence is split, or a tuple of "
            "names, is accepted; where it is not split call attention."
        )
    return tuple(axes)


def _ring_size(axes: tuple[str, ...]) -> int:
    try:
        return math.prod(jax.lax.axis_size(axis) for axis in axes)
    except (NameError, KeyError) as error:
        raise ValueError(
            f"axis_name is {axes}, but no jax.shard_map around this call has such an axis ({error}). Call "
            "ring_attention inside jax.shard_map over a mesh that has it; under plain jax.jit call attention, which "
            "finds a sequence that is sharded by itself."
        ) from error


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """The tokens of a sequence in the order of the layout "zigzag": `x[:, zigzag_order(length, devices)]`.

    Split evenly along the axis, the sequence then lies as `ring_attention` expects. `numpy.argsort` of it is the way
    back.

    Args:
      length: of the whole sequence.
      devices: along the mesh axis.

    Returns:
      (length,) int64.

    Raises:
      TypeError: an argument is not an int.
      ValueError: twice the number of devices does not divide the length; or one of the two is out of range.
    """
    for name, size, least in (("length", length, 0), ("devices", devices, 1)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(f"{name} is {size!r} ({type(size).__name__}). An int from {least} is accepted.")
        if size < least:
            raise ValueError(f"{name} is {size}. An int from {least} is accepted.")
    if length % (2 * devices):
        raise ValueError(
            f"length is {length} for {devices} devices. A multiple of {2 * devices} is accepted: two parts for each."
        )
    order = np.asarray(chunks_of("zigzag", devices)).reshape(-1)
    return np.arange(length).reshape(2 * devices, -1)[order].reshape(-1)


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: str | Sequence[str] | None = None,
    **options: Any,
) -> Explanation:
    """What `attention` does with the same arguments: which implementation takes the call, and why the others do not.

    Nothing is computed; `jax.ShapeDtypeStruct` stands for an array wherever `attention` takes one.

    Args:
      query: as for `attention`.
      key: as for `attention`.
      value: as for `attention`.
      bias: as for `attention`.
      mask: as for `attention`.
      implementation: as for `attention`; None reports on the automatic choice.
      **options: the other keyword arguments of `attention`.

    Returns:
      An `Explanation`, which prints as a report.

    Raises:
      TypeError: as `attention`.
      ValueError: as `attention`.
    """
    names = dispatch.read_names(implementation)
    target = dispatch.current_target(query)
    for name in options.keys() - (attention.__kwdefaults__ or {}).keys():
        raise TypeError(f"explain was given {name!r}. The keyword arguments of jax_fa4.attention are accepted.")
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}
    leaves, tree = jax.tree.flatten(given)
    is_array = [isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in leaves]
    problems = []

    def read(arrays: list[jax.Array]) -> jax.Array:
        remaining = iter(arrays)
        merged = [next(remaining) if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)]
        problems.append(segments.read_call(**jax.tree.unflatten(tree, merged)).problem)
        return jnp.zeros(())

    jax.eval_shape(read, [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag])
    return dispatch.explain_problem(names, problems[0], target)
