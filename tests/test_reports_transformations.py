"""Public bug reports about gradients, transformations and dispatch, each as a test of ours."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.inputs import IMPLEMENTATIONS, assert_close, attention, draw


def attend(implementation, q, k, v, ids=None):
    return attention(q, k, v, segment_ids=ids, is_causal=True, implementation=implementation)


def loss(implementation, q, k, v, ids=None):
    return jnp.sum(jnp.sin(attend(implementation, q, k, v, ids)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_of_grad_keeps_examples_apart(implementation):
    """flash_attn_jax 0.6.2, flash-attn3-jax 0.2.3: (vmap, batch) merged, (batch, vmap) split. Inner 2, outer 3."""
    query, key, value = draw(0, batch=6, query_length=7, key_length=9, query_heads=4, kv_heads=2)
    stacked = [x.reshape(3, 2, *x.shape[1:]) for x in (query, key, value)]
    grad = jax.jit(jax.grad(functools.partial(loss, implementation), argnums=(0, 1, 2)))
    together = jax.vmap(grad)(*stacked)
    for index in range(3):
        alone = grad(*[x[index] for x in stacked])
        jax.tree.map(assert_close, jax.tree.map(lambda x, index=index: x[index], together), alone)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_of_grad_of_shared_keys_is_per_example(implementation):
    """flash_attn_jax and flash-attn3-jax return the sum over examples for unmapped K and V."""
    query, key, value = draw(1, batch=2, query_length=5, key_length=5)
    queries = jnp.stack([query, query * 0.5, -query])
    grad = jax.jit(jax.grad(functools.partial(loss, implementation), argnums=(1, 2)))
    together = jax.vmap(grad, in_axes=(0, None, None))(queries, key, value)
    for index in range(3):
        alone = grad(queries[index], key, value)
        jax.tree.map(assert_close, jax.tree.map(lambda x, index=index: x[index], together), alone)


AXES = [axes for axes in itertools.product([None, 0], repeat=4) if any(axis is not None for axis in axes)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("axes", AXES, ids=lambda a: "".join("v" if x == 0 else "-" for x in a))
def test_vmap_over_every_subset_of_arguments(implementation, axes):
    """jax-ml/jax #38495, PR #36702, #23401: partial in_axes failed in cuDNN. Values and gradients."""
    query, key, value = draw(2, batch=2, query_length=6, key_length=6)
    ids = jnp.array([[0, 0, 1, 1, 1, -1], [0, 1, 1, 2, 2, 2]])
    shared = (query, key, value, ids)
    mapped = (
        jnp.stack([query, 2 * query, query + 1]),
        jnp.stack([key, key - 1, -key]),
        jnp.stack([value, value**2, 1 - value]),
        jnp.stack([ids, jnp.roll(ids, 1, 1), jnp.zeros_like(ids)]),
    )
    arguments = [m if axis == 0 else s for m, s, axis in zip(mapped, shared, axes, strict=True)]
    function = jax.jit(jax.value_and_grad(functools.partial(loss, implementation), argnums=(0, 1, 2)))
    together = jax.vmap(function, in_axes=axes)(*arguments)
    for index in range(3):
        alone = function(*[x if axis is None else x[index] for x, axis in zip(arguments, axes, strict=True)])
        jax.tree.map(assert_close, jax.tree.map(lambda x, index=index: x[index], together), alone)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_negative_and_inner_axes_and_nested(implementation):
    """jax-ml/jax #38495: axes other than the leading one, and vmap inside vmap."""
    query, key, value = draw(3, batch=2, query_length=5, key_length=5)
    queries = jnp.stack([query, -query, query * 3], axis=-1)
    keys = jnp.stack([key, key + 1, key * 2], axis=2)
    values = jnp.stack([value, value - 1], axis=1)
    inner = jax.vmap(functools.partial(attend, implementation), in_axes=(-1, 2, None), out_axes=3)
    outer = jax.vmap(inner, in_axes=(None, None, 1), out_axes=-1)
    result = outer(queries, keys, values)
    assert result.shape == (2, 5, 2, 3, 8, 2)
    for i, j in itertools.product(range(3), range(2)):
        alone = attend(implementation, queries[..., i], keys[:, :, i], values[:, j])
        assert_close(result[:, :, :, i, :, j], alone)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_jacrev(implementation):
    """jax-ml/jax #38495: a batched cotangent with unbatched residuals."""
    query, key, value = draw(4, batch=1, query_length=3, key_length=4, query_heads=2, kv_heads=1, head_dim=3)
    jacobians = jax.jit(jax.jacrev(functools.partial(attend, implementation), argnums=(0, 1, 2)))(query, key, value)
    expected = jax.jit(jax.jacfwd(functools.partial(attend, "reference"), argnums=(0, 1, 2)))(query, key, value)
    jax.tree.map(assert_close, jacobians, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_made_outside_or_inside_the_mapped_function(implementation):
    """NVIDIA/TransformerEngine #2685: mapped ids with unmapped positions failed an assertion."""
    query, key, value = draw(5, batch=6, query_length=8, key_length=8)
    stacked = [x.reshape(3, 2, *x.shape[1:]) for x in (query, key, value)]
    boundaries = jnp.array([2, 4, 6])

    def inside(q, k, v, boundary):
        ids = jnp.broadcast_to((jnp.arange(8) >= boundary).astype(jnp.int32), (2, 8))
        return attend(implementation, q, k, v, ids)

    ids = jnp.stack([jnp.broadcast_to((jnp.arange(8) >= b).astype(jnp.int32), (2, 8)) for b in boundaries])
    outside = jax.vmap(functools.partial(attend, implementation))(*stacked, ids)
    assert_close(jax.vmap(inside)(*stacked, boundaries), outside)
    constant = np.array([[0, 0, 0, 1, 1, 1, 2, 2]] * 2, np.int32)
    shared = jax.vmap(lambda q, k, v: attend(implementation, q, k, v, constant))(*stacked)
    assert_close(shared[1], attend(implementation, *[x[1] for x in stacked], jnp.asarray(constant)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("query_dtype", "bias_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_bias_of_another_dtype_has_its_gradient(implementation, query_dtype, bias_dtype):
    """jax-ml/jax #32242: float32 bias with bfloat16 query gave a NaN gradient; #30593, #27184: only batch 1 or none."""
    query, key, value = draw(6, batch=3, query_length=16, key_length=16, query_heads=4, kv_heads=4, dtype=query_dtype)
    bias = jax.random.normal(jax.random.key(7), (1, 4, 16, 16), bias_dtype)

    def run(bias):
        out = attention(query, key, value, bias, implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    grad = jax.jit(jax.grad(run))(bias)
    assert grad.dtype == bias_dtype
    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    expected = jax.jit(jax.grad(lambda b: jnp.sum(jnp.sin(attention(*wide, b, implementation="reference")))))(
        bias.astype(jnp.float32)
    )
    np.testing.assert_allclose(np.asarray(grad, np.float32), np.asarray(expected), atol=0.03)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_integer_operands_have_no_gradient(implementation):
    """jax-ml/jax #34685: vjp gives float0 for ids, lengths and boolean masks; grad over them is JAX's own error."""
    query, key, value = draw(8, batch=1, query_length=4, key_length=4)
    ids = jnp.array([[0, 0, 1, 1]])

    def call(q, ids, lengths, mask):
        return attention(
            q, key, value, mask=mask, segment_ids=ids, key_value_seq_lengths=lengths, implementation=implementation
        )

    out, pull = jax.vjp(call, query, ids, jnp.array([3]), jnp.ones((1, 1, 4, 4), bool))
    grads = pull(jnp.ones_like(out))
    assert [grad.dtype for grad in grads[1:]] == [jax.dtypes.float0] * 3
    with pytest.raises(TypeError, match="int"):
        jax.grad(lambda ids: jnp.sum(attend(implementation, query, key, value, ids)))(ids)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sinks_have_their_gradient(implementation):
    """Dao-AILab/flash-attention #1973, #2102: sink gradient missing; an empty row's LSE is the sink."""
    query, key, value = draw(9, batch=2, query_length=5, key_length=5, query_heads=2, kv_heads=1)
    sinks = jnp.array([0.7, -1.2])
    mask = np.ones((1, 1, 5, 5), bool)
    mask[..., 2, :] = False

    def run(sinks, q, k, v):
        out, lse = attention(q, k, v, mask=mask, sinks=sinks, return_residual=True, implementation=implementation)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    def by_formula(sinks, q, k, v):
        repeat = [jnp.repeat(x, 2, axis=2) for x in (k, v)]
        scores = jnp.einsum("btnd,bsnd->bnts", q, repeat[0]) / np.sqrt(q.shape[-1])
        scores = jnp.where(mask, scores, -jnp.inf)
        with_sink = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))], -1)
        lse = jax.nn.logsumexp(with_sink, axis=-1)
        out = jnp.einsum("bnts,bsnd->btnd", jnp.exp(scores - lse[..., None]), repeat[1])
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    ours = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3)))(sinks, query, key, value)
    theirs = jax.jit(jax.value_and_grad(by_formula, argnums=(0, 1, 2, 3)))(sinks, query, key, value)
    jax.tree.map(assert_close, ours, theirs)
    out, lse = attention(query, key, value, mask=mask, sinks=sinks, return_residual=True, implementation=implementation)
    assert not np.asarray(out)[:, 2].any()
    np.testing.assert_allclose(np.asarray(lse)[:, 2], np.broadcast_to(sinks, (2, 2)), rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lse_is_float32_with_its_true_gradient(implementation, dtype):
    """jax.nn stops the LSE's gradient and rounds it; Dao-AILab/flash-attention #141, jax-ml/jax #32484."""
    query, key, value = draw(10, batch=1, query_length=6, key_length=9, dtype=dtype)

    def lse_of(q):
        return attention(q, key, value, return_residual=True, implementation=implementation)[1]

    assert lse_of(query).dtype == jnp.float32
    assert lse_of(query).shape == (1, 6, 2)
    grad = jax.jit(jax.grad(lambda q: jnp.sum(lse_of(q))))(query)
    scores = jnp.einsum("btnd,bsnd->bnts", *(x.astype(jnp.float32) for x in (query, key))) / np.sqrt(8)
    probs = jax.nn.softmax(scores, axis=-1)
    expected = jnp.einsum("bnts,bsnd->btnd", probs, key.astype(jnp.float32)) / np.sqrt(8)
    tolerance = 2e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(grad, np.float32), np.asarray(expected), atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_shards_merge_to_the_whole_with_gradients(implementation):
    """jax-ml/jax #32484: merging by LSE needs its gradient; values and gradients equal the whole."""
    query, key, value = draw(11, batch=1, query_length=5, key_length=8)

    def merged(q, k, v):
        parts = [
            attention(q, k[:, s], v[:, s], return_residual=True, implementation=implementation)
            for s in (slice(0, 3), slice(3, 8))
        ]
        lse = jax.nn.logsumexp(jnp.stack([part[1] for part in parts]), axis=0)
        return jnp.sum(jnp.sin(sum(jnp.exp(part[1] - lse)[..., None] * part[0] for part in parts)))

    def whole(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, implementation=implementation)))

    arguments = (query, key, value)
    jax.tree.map(
        assert_close,
        jax.jit(jax.value_and_grad(merged, argnums=(0, 1, 2)))(*arguments),
        jax.jit(jax.value_and_grad(whole, argnums=(0, 1, 2)))(*arguments),
    )


def test_forward_mode_works_by_the_reference_and_is_refused_with_its_name():
    """Dao-AILab/flash-attention #1672, pytorch/pytorch #154226: jvp is wanted; an error must name the way."""
    arguments = draw(12, batch=1, query_length=4, key_length=4)
    tangents = tuple(jnp.ones_like(x) for x in arguments)
    _, tangent = jax.jvp(functools.partial(attend, "reference"), arguments, tangents)
    step = 1e-2
    shifted = [attend("reference", *[x + sign * step for x in arguments]) for sign in (1, -1)]
    np.testing.assert_allclose(np.asarray(tangent), np.asarray(shifted[0] - shifted[1]) / (2 * step), atol=2e-3)
    with pytest.raises(Exception, match="implementation='reference'"):
        jax.jvp(functools.partial(attend, "blockwise"), arguments, tangents)


def test_second_order_by_the_reference():
    """Any order through the dense reference."""
    query, key, value = draw(13, batch=1, query_length=3, key_length=3, query_heads=1, kv_heads=1, head_dim=2)
    hessian = jax.jit(jax.hessian(functools.partial(loss, "reference")))(query, key, value)
    assert np.isfinite(np.asarray(hessian)).all()
    gradient = jax.jit(jax.grad(functools.partial(loss, "reference")))
    direction = jnp.ones_like(query)
    by_difference = (
        gradient(query + 1e-2 * direction, key, value) - gradient(query - 1e-2 * direction, key, value)
    ) / 2e-2
    by_hessian = jnp.sum(hessian, axis=(4, 5, 6, 7))
    np.testing.assert_allclose(np.asarray(by_hessian), np.asarray(by_difference), atol=2e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("make", [float, np.float32, np.float64, jnp.float32, lambda x: jnp.asarray(x, jnp.bfloat16)])
def test_scale_of_every_kind(implementation, make):
    """jax-ml/jax #24160: attribute types; here Python, NumPy and JAX scalars, and traced, with a gradient."""
    query, key, value = draw(14, batch=1, query_length=5, key_length=5)
    expected = attention(query, key, value, scale=0.25, implementation="reference")
    assert_close(attention(query, key, value, scale=make(0.25), implementation=implementation), expected)

    def traced(scale):
        return jnp.sum(jnp.sin(attention(query, key, value, scale=scale, implementation=implementation)))

    slope = (traced(0.26) - traced(0.24)) / 0.02
    value_and_slope = jax.jit(jax.value_and_grad(traced))(0.25)
    np.testing.assert_allclose(value_and_slope[0], jnp.sum(jnp.sin(expected)), rtol=1e-5)
    np.testing.assert_allclose(value_and_slope[1], slope, rtol=2e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_new_ids_and_lengths_do_not_recompile(implementation):
    """Dao-AILab/flash-attention #2635: a length given as an array recompiled at each step."""
    query, key, value = draw(15, batch=1, query_length=6, key_length=6)
    traces = []

    @jax.jit
    def step(q, k, v, ids, lengths):
        traces.append(1)
        return attention(q, k, v, segment_ids=ids, key_value_seq_lengths=lengths, implementation=implementation)

    results = [
        step(query, key, value, jnp.array([ids]), jnp.array([length]))
        for ids, length in [([0, 0, 1, 1, 2, 2], 6), ([0, 0, 0, 0, 0, 1], 5), ([1, 0, 1, 0, 1, 0], 4)]
    ]
    assert len(traces) == 1
    assert float(jnp.abs(results[0] - results[1]).max()) > 1e-3


def test_import_needs_no_gpu_no_cuda_and_no_compiler():
    """nshepperd/flash_attn_jax #12, #13; jax-ml/jax #32430: import and the plain path on a machine with nothing."""
    code = (
        "import sys\n"
        "sys.modules['cutlass'] = None\n"
        "sys.modules['nvidia_cutlass_dsl'] = None\n"
        "import jax, jax.numpy as jnp, jax_fa4\n"
        "x = jnp.ones((1, 4, 2, 8))\n"
        "print(float(jax_fa4.attention(x, x, x, is_causal=True).sum()))\n"
        "assert 'matplotlib' not in sys.modules and 'flax' not in sys.modules\n"
    )
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(64.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_remat_scan_donation_and_shapes(implementation):
    """checkpoint, scan over layers, donated buffers and eval_shape give what plain calls give."""
    query, key, value = draw(16, batch=2, query_length=9, key_length=9)
    function = functools.partial(loss, implementation)
    plain = jax.jit(jax.grad(function))(query, key, value)
    assert_close(jax.jit(jax.grad(jax.checkpoint(function)))(query, key, value), plain)
    policy = jax.checkpoint_policies.save_only_these_names("context")
    assert_close(jax.jit(jax.grad(jax.checkpoint(function, policy=policy)))(query, key, value), plain)

    def layers(q):
        return jax.lax.scan(lambda x, _: (attend(implementation, x, key, value), None), q, None, length=3)[0]

    unrolled = query
    for _ in range(3):
        unrolled = attend(implementation, unrolled, key, value)
    assert_close(layers(query), unrolled)
    scanned = jax.jit(jax.grad(lambda q: jnp.sum(layers(q) ** 2)))(query)
    assert np.isfinite(np.asarray(scanned)).all()
    expected = attend(implementation, query, key, value)
    donated = jax.jit(functools.partial(attend, implementation), donate_argnums=0)(query + 0, key, value)
    assert_close(donated, expected)
    shape = jax.eval_shape(functools.partial(attend, implementation), query, key, value)
    assert (shape.shape, shape.dtype) == (expected.shape, expected.dtype)
