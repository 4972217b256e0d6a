"""Attention from its definition, in float64 NumPy loops: the values and gradients that the package is held against.

Shares no code with the package. Every query row gathers the keys that it sees, one by one, and touches no other;
gradients are the closed formulas of softmax attention. Slow: for sequences of a dozen or so.
"""

from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    """Values, and gradients of sum(out * grad_out) + sum(lse * grad_lse) over the rows whose lse is finite."""

    out: np.ndarray  # (B, T, N, Dv)
    lse: np.ndarray  # (B, T, N)
    query: np.ndarray | None = None
    key: np.ndarray | None = None
    value: np.ndarray | None = None
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    scale: float | None = None


def sees(batch, head, i, j, *, lengths, is_causal, bottom_right, window, query_lengths, key_lengths, ids, mask):
    """Whether query i sees key j, rule by rule."""
    query_length, key_length = lengths
    if query_lengths is not None and i >= query_lengths[batch]:
        return False
    if key_lengths is not None and j >= key_lengths[batch]:
        return False
    diagonal = i + (key_length - query_length if bottom_right else 0)
    if is_causal and j > diagonal:
        return False
    left, right = window
    if left is not None and left != -1 and diagonal - j > left:
        return False
    if right is not None and right != -1 and j - diagonal > right:
        return False
    if ids is not None:
        query_id, key_id = ids[0][batch][i], ids[1][batch][j]
        if query_id < 0 or query_id != key_id:
            return False
    index = (batch, head, i, j)
    return mask is None or bool(mask[tuple(0 if n == 1 else x for x, n in zip(index, mask.shape, strict=True))])


def attention(
    query,
    key,
    value,
    *,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    bottom_right=False,
    window=(None, None),
    query_lengths=None,
    key_lengths=None,
    ids=None,
    cap=None,
    sinks=None,
    grad_out=None,
    grad_lse=None,
):
    """Values, and gradients where `grad_out` is given.

    `ids` is a pair (B, T), (B, S). Arrays are 4-D, (B, length, heads, dim).
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    bias = None if bias is None else np.asarray(bias, np.float64)
    batch, query_length, heads, dim = query.shape
    key_length, kv_heads = key.shape[1:3]
    scale = dim**-0.5 if scale is None else float(scale)
    out = np.zeros((batch, query_length, heads, value.shape[-1]))
    lse = np.full((batch, query_length, heads), -np.inf)
    full_bias = np.broadcast_to(0.0 if bias is None else bias, (batch, heads, query_length, key_length))
    grads = {name: np.zeros_like(x) for name, x in (("query", query), ("key", key), ("value", value))}
    grad_bias, grad_sinks, grad_scale = np.zeros(full_bias.shape), np.zeros(heads), 0.0
    for b, n, i in np.ndindex(batch, heads, query_length):
        k = n // (heads // kv_heads)
        rules = dict(
            lengths=(query_length, key_length),
            is_causal=is_causal,
            bottom_right=bottom_right,
            window=window,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            ids=ids,
            mask=mask,
        )
        seen = [j for j in range(key_length) if sees(b, n, i, j, **rules)]
        products = np.array([query[b, i, n] @ key[b, j, k] for j in seen])
        capped = scale * products if cap is None else cap * np.tanh(scale * products / cap)
        logits = capped + full_bias[b, n, i, seen]
        terms = list(logits) + ([] if sinks is None else [float(sinks[n])])
        if not terms:
            continue
        lse[b, i, n] = np.logaddexp.reduce(terms)
        probs = np.exp(logits - lse[b, i, n])
        out[b, i, n] = sum((p * value[b, j, k] for p, j in zip(probs, seen, strict=True)), np.zeros(value.shape[-1]))
        if grad_out is None:
            continue
        upstream = 0.0 if grad_lse is None else float(grad_lse[b, i, n])
        if sinks is not None:
            inner = float(grad_out[b, i, n] @ out[b, i, n]) if seen else 0.0
            grad_sinks[n] += np.exp(float(sinks[n]) - lse[b, i, n]) * (upstream - inner)
        for p, j, product, logit in zip(probs, seen, products, capped, strict=True):
            go = np.asarray(grad_out[b, i, n], np.float64)
            grads["value"][b, j, k] += p * go
            grad_logit = p * (go @ value[b, j, k] - go @ out[b, i, n] + upstream)
            grad_bias[b, n, i, j] += grad_logit
            grad_product = grad_logit * (1.0 if cap is None else 1.0 - (logit / cap) ** 2)
            grad_scale += grad_product * product
            grads["query"][b, i, n] += grad_product * scale * key[b, j, k]
            grads["key"][b, j, k] += grad_product * scale * query[b, i, n]
    if grad_out is None:
        return Answer(out, lse)
    if bias is not None:
        axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        grad_bias = grad_bias.sum(axis=axes, keepdims=True)
    return Answer(out, lse, **grads, bias=grad_bias, sinks=grad_sinks, scale=grad_scale)
