"""Runs flash-attn-4, a package of others, on the emulated GPU: `python -m tests.emulator.flash_attention_4 '{...}'`.

Prints one JSON line: the largest errors of the outputs against float64, and what the launches counted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from tests.emulator.third_party import OnEmulatorCompile, as_cuda, prepare, pretend_cuda

CASE: dict[str, Any] = dict(
    arch="sm_90a", causal=False, length=256, key_length=None, heads=2, kv_heads=1, batch=1, head_dim=128
)
CASE |= dict(backward=False, deterministic=False, seed=0, completion="random", threads=1)


def redirect_compilation() -> Any:
    """The package's interface module, whose compiled functions run on the emulator."""
    import cutlass.cute as cute
    import flash_attn.cute.cute_dsl_utils as dsl_utils
    import flash_attn.cute.interface as interface
    import flash_attn.cute.utils as utils

    from_dlpack = dsl_utils.from_dlpack
    dsl_utils.from_dlpack = lambda tensor, **kwargs: from_dlpack(as_cuda(tensor), **kwargs)
    utils.from_dlpack = dsl_utils.from_dlpack

    interface.cute.compile = OnEmulatorCompile(cute.compile)
    return interface


def reference(query: Any, key: Any, value: Any, causal: bool, grad_out: Any) -> dict[str, np.ndarray]:
    """Attention and its gradients in float64; arrays (batch, length, heads, dim); causal at the bottom right."""
    q, k, v, do = (t.double().numpy() for t in (query, key, value, grad_out))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    keys, values = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    if causal:
        hidden = np.arange(k.shape[1])[None] > np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    probs = np.exp(scores - top)
    total = probs.sum(-1, keepdims=True)
    probs = probs / total
    out = np.einsum("bhqk,bkhd->bqhd", probs, values)
    grad_probs = np.einsum("bqhd,bkhd->bhqk", do, values)
    grad_scores = probs * (grad_probs - np.einsum("bqhd,bqhd->bhq", do, out)[..., None])
    split = lambda x: x.reshape(*x.shape[:2], k.shape[2], group, -1).sum(3)  # noqa: E731
    return {
        "out": out,
        "lse": (top + np.log(total))[..., 0],
        "grad_query": np.einsum("bhqk,bkhd->bqhd", grad_scores, keys) * scale,
        "grad_key": split(np.einsum("bhqk,bqhd->bkhd", grad_scores, q) * scale),
        "grad_value": split(np.einsum("bhqk,bqhd->bkhd", probs, do)),
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Errors by output, and the counts of the launches."""
    import torch

    from jax_fa4 import emulator

    interface = redirect_compilation()
    emulator.set_options(seed=case["seed"], completion=case["completion"], threads=case["threads"])
    torch.manual_seed(0)
    b, s, sk = case["batch"], case["length"], case["key_length"] or case["length"]
    make = lambda length, heads: torch.randn(b, length, heads, case["head_dim"]).to(torch.bfloat16)  # noqa: E731
    query, key, value = make(s, case["heads"]), make(sk, case["kv_heads"]), make(sk, case["kv_heads"])
    grad_out = make(s, case["heads"])
    expected = reference(query, key, value, case["causal"], grad_out)
    if case["backward"]:
        out = torch.tensor(expected["out"]).to(torch.bfloat16)
        lse = torch.tensor(expected["lse"]).float()
        grads = interface._flash_attn_bwd(
            query, key, value, out, grad_out, lse, causal=case["causal"], deterministic=case["deterministic"]
        )
        got = dict(zip(("grad_query", "grad_key", "grad_value"), grads[:3], strict=True))
    else:
        out = torch.full(query.shape, float("nan"), dtype=torch.bfloat16)
        lse = torch.full((b, case["heads"], s), float("nan"))
        interface._flash_attn_fwd(query, key, value, causal=case["causal"], out=out, lse=lse, return_lse=True)
        got = {"out": out, "lse": lse}
    errors = {name: float(np.abs(t.double().numpy() - expected[name]).max()) for name, t in got.items()}
    launches = [{k: v for k, v in launch.items() if k != "regions"} for launch in emulator.statistics()]
    return {"errors": errors, "launches": launches}


def main() -> None:
    """Runs the case of the command line."""
    case = CASE | json.loads(sys.argv[1])
    prepare(case["arch"])
    pretend_cuda(case["arch"])
    print(json.dumps(run(case)), flush=True)
    # The launchers' libraries are unloaded in no good order at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
