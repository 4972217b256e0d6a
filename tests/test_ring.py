"""Context parallelism: a sequence split over devices gives what one device gives, values and gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import ring, ring_steps
from jax_fa4.schedule.tiles import MaskRule
from tests import oracle
from tests.inputs import assert_close, draw, visible_pairs
from tests.programs import collectives

needs_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the eight CPU devices of conftest.py")
IMPLEMENTATIONS = ["blockwise"]
IDS = np.array([[0] * 7 + [3] * 9 + [1] * 6 + [-1] * 2, [5] * 4 + [1] * 4 + [5] * 8 + [0] * 8], np.int32)
LENGTH = 24


def mesh_of(devices, name="sequence"):
    return Mesh(np.array(jax.devices()[:devices]), (name,), axis_types=(AxisType.Auto,))


def whole(operands, cotangents, **options):
    """Values and gradients of one device, by the dense reference."""
    names = ("sinks", "scale")
    arrays = {name: options.pop(name) for name in names if name in options}

    def run(operands, arrays):
        return jax_fa4.attention(*operands, **arrays, **options, return_residual=True, implementation="reference")

    results, pull = jax.vjp(run, operands, arrays)
    return results, pull(cotangents)


def split(operands, cotangents, devices, layout, implementation="blockwise", **options):
    """The same on a ring of devices, put back into the order of one."""
    length = operands[0].shape[1]
    order = jax_fa4.zigzag_order(length, devices) if layout == "zigzag" else np.arange(length)
    back = np.argsort(order)
    names = ("sinks", "scale")
    arrays = {name: options.pop(name) for name in names if name in options}
    ids = options.pop("segment_ids", None)
    ids = None if ids is None else jnp.asarray(ids)[:, order]

    def local(operands, ids, arrays):
        return jax_fa4.ring_attention(
            *operands, **arrays, **options, segment_ids=ids, axis_name="sequence", layout=layout, return_residual=True,
            implementation=implementation,
        )  # fmt: skip

    rows = P(None, "sequence")
    mapped = jax.shard_map(local, mesh=mesh_of(devices), in_specs=(rows, rows, P()), out_specs=(rows, rows))
    ordered, ordered_cotangents = jax.tree.map(lambda x: x[:, order], (operands, cotangents))

    @jax.jit
    def run(operands, arrays, cotangents):
        results, pull = jax.vjp(lambda operands, arrays: mapped(operands, ids, arrays), operands, arrays)
        return results, pull(cotangents)

    results, (grads, array_grads) = run(ordered, arrays, ordered_cotangents)
    results, grads = jax.tree.map(lambda x: x[:, back], (results, grads))
    return results, (grads, array_grads)


def cotangents_for(operands, seed=9):
    rows = (*operands[0].shape[:3],)
    keys = jax.random.split(jax.random.key(seed), 2)
    return jax.random.normal(keys[0], (*rows, operands[2].shape[3])), jax.random.normal(keys[1], rows)


SINKS, SCALE = jnp.array([0.3, -1.0, 0.0, 2.0]), jnp.float32(0.4)
WINDOW, SEGMENTS = {"is_causal": True, "local_window_size": (5, 0)}, {"is_causal": True, "segment_ids": IDS}
KNOWN_LENGTHS = {"query_seq_lengths": np.array([24, 11]), "key_value_seq_lengths": [17, 3]}
LENGTHS = {name: jnp.asarray(lengths) for name, lengths in KNOWN_LENGTHS.items()} | {"is_causal": True}
ALL = {"is_causal": True, "sinks": SINKS, "scale": SCALE, "logits_soft_cap": 3.0}
slow = pytest.mark.slow
CASES = {
    "causal_contiguous": (4, "contiguous", {"is_causal": True}),
    "causal_zigzag": (4, "zigzag", {"is_causal": True}),
    "full": (2, "contiguous", {}),
    "window": (4, "contiguous", WINDOW),
    "two_sided_window": (2, "zigzag", {"local_window_size": (8, 3)}),
    "segments": (2, "contiguous", SEGMENTS),
    "sinks_scale_cap": (2, "zigzag", ALL),
    "lengths_zigzag": (2, "zigzag", LENGTHS),
    "lengths": pytest.param(4, "contiguous", KNOWN_LENGTHS, marks=slow),
    "full_zigzag": pytest.param(2, "zigzag", {}, marks=slow),
    "window_zigzag": pytest.param(4, "zigzag", WINDOW, marks=slow),
    "segments_zigzag": pytest.param(4, "zigzag", SEGMENTS, marks=slow),
    "all_of_eight": pytest.param(8, "contiguous", ALL | SEGMENTS | WINDOW, marks=slow),
}


@needs_devices
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("devices", "layout", "options"), CASES.values(), ids=CASES)
def test_equals_one_device(devices, layout, options, implementation):
    """Values, the log-sum-exp, and gradients through both, with grouped heads and values of another size."""
    operands = draw(3, query_length=LENGTH, key_length=LENGTH, query_heads=4, kv_heads=2, value_dim=6)
    cotangents = cotangents_for(operands)
    want = whole(operands, _finite_only(operands, cotangents, options), **options)
    got = split(operands, _finite_only(operands, cotangents, options), devices, layout, implementation, **options)
    jax.tree.map(assert_close, got, want)


def _finite_only(operands, cotangents, options):
    """Without a cotangent for the -inf of rows that see nothing, whose gradient nobody can want."""
    is_seeing = jnp.ones(operands[0].shape[:2], bool)
    if "segment_ids" in options:
        is_seeing &= jnp.asarray(options["segment_ids"]) >= 0
    if "query_seq_lengths" in options:
        is_seeing &= jnp.arange(LENGTH) < jnp.asarray(options["query_seq_lengths"])[:, None]
    return cotangents[0], jnp.where(is_seeing[:, :, None], cotangents[1], 0)


@needs_devices
def test_padding_never_matters():
    """NaN in keys, values, queries and cotangents of padding: report 20, across devices."""
    operands = draw(4, query_length=LENGTH, key_length=LENGTH)
    cotangents = _finite_only(operands, cotangents_for(operands), {"segment_ids": IDS})
    options = {"is_causal": True, "segment_ids": IDS}
    is_padding = jnp.asarray(IDS < 0)[:, :, None, None]
    poisoned = jax.tree.map(lambda x: jnp.where(is_padding, jnp.nan, x), operands)
    clean = split(operands, cotangents, 4, "contiguous", **options)
    dirty = split(poisoned, (jnp.where(is_padding, jnp.nan, cotangents[0]), cotangents[1]), 4, "contiguous", **options)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.any(clean[0][0][0, -2:])
    assert np.all(np.isneginf(clean[0][1][0, -2:]))


@needs_devices
def test_only_one_device_has_anything_to_see():
    """flashinfer-ai/flashinfer #4452: merging parts that saw nothing. Only device 2 has keys of the queries' id."""
    operands = draw(5, batch=1, query_length=16, key_length=16)
    key_ids = jnp.array([[0] * 8 + [1] * 4 + [0] * 4])
    rows = P(None, "sequence")
    mapped = jax.shard_map(
        lambda q, k, v, q_ids, k_ids: jax_fa4.ring_attention(
            q, k, v, axis_name="sequence", segment_ids=(q_ids, k_ids), return_residual=True
        ),
        mesh=mesh_of(4),
        in_specs=rows,
        out_specs=rows,
    )
    query_ids = jnp.array([[1] * 12 + [7] * 4])
    out, lse = jax.jit(mapped)(*operands, query_ids, key_ids)
    want = jax_fa4.attention(
        *operands, segment_ids=(query_ids, key_ids), return_residual=True, implementation="reference"
    )
    jax.tree.map(assert_close, (out, lse), want)
    assert np.all(np.isneginf(lse[0, 12:]))


def test_merging_is_exact_and_knows_empty_parts():
    """The same report: merge(-inf, -inf) is output 0 and log-sum-exp -inf, without NaN in values or gradients."""
    keys = jax.random.split(jax.random.key(0), 3)
    scores, values = jax.random.normal(keys[0], (6, 8)) * 5, jax.random.normal(keys[1], (8, 3))

    def part(columns):
        return jax.nn.softmax(scores[:, columns]) @ values[columns], jax.nn.logsumexp(scores[:, columns], axis=1)

    together = part(slice(None))
    jax.tree.map(assert_close, ring.merge(part(slice(0, 3)), part(slice(3, 8))), together)
    empty = jnp.zeros((6, 3)), jnp.full(6, -jnp.inf)
    jax.tree.map(assert_close, ring.merge(empty, together), together)
    jax.tree.map(assert_close, ring.merge(together, empty), together)
    jax.tree.map(np.testing.assert_array_equal, ring.merge(empty, empty), empty)


@pytest.mark.parametrize("layout", ring_steps.LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (3, 0)}, {"window": (2, 5)}, {"is_causal": True, "window": (9, 1)}],
    ids=str,
)
def test_steps_cover_each_visible_pair_once(layout, options):
    """The plan of a ring, put together again pair by pair, is the mask of the whole sequence."""
    devices, length = 4, 24
    rule = MaskRule(length, length, options.get("is_causal", False), options.get("window", (None, None)))
    chunks = ring_steps.chunks_of(layout, devices)
    size = length // (devices * len(chunks[0]))
    found = np.zeros((length, length), int)

    def places(own, slots):
        return np.concatenate([np.arange(size) + own[slot] * size for slot in slots.all])

    for step in ring_steps.plan_steps(rule, chunks, chunks, (size, size)):
        for device in range(devices):
            for block in step.works[step.choice[device]]:
                rows = places(chunks[device], block.queries)
                columns = places(chunks[(device - step.shift) % devices], block.keys)
                i, j = np.indices((len(rows), len(columns)))
                left, right = block.rule.band
                seen = np.ones(i.shape, bool)
                if left is not None:
                    seen &= j - i - block.rule.diagonal_offset >= -left
                if right is not None:
                    seen &= j - i - block.rule.diagonal_offset <= right
                assert seen.any()
                assert seen.shape == (block.rule.query_length, block.rule.key_length)
                assert seen.sum() == ring_steps.visible_pairs_of(block.rule)
                found[np.ix_(rows, columns)] += seen
    np.testing.assert_array_equal(found, visible_pairs(length, length, **options))


@pytest.mark.parametrize("layout", ring_steps.LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_a_step_without_a_window_is_one_call(layout, options):
    """However many chunks a device holds, and however far apart they are in the sequence."""
    for devices in (1, 2, 3, 8):
        chunks = ring_steps.chunks_of(layout, devices)
        steps = ring_steps.plan_steps(MaskRule(0, 0, **options), chunks, chunks, (32, 32))
        assert len(steps) == devices
        assert {len(work) for step in steps for work in step.works} <= {0, 1}
        if layout == "zigzag":
            assert all(work for step in steps for work in step.works)


def test_zigzag_halves_what_the_slowest_device_waits_for():
    """Two devices, causal: 1/4 of all pairs each, against 3/8 on the second of a contiguous split."""
    size = 512
    pairs = {}
    for layout in ring_steps.LAYOUTS:
        chunks = ring_steps.chunks_of(layout, 2)
        steps = ring_steps.plan_steps(MaskRule(0, 0, True), chunks, chunks, (size // len(chunks[0]),) * 2)
        pairs[layout] = ring_steps.slowest_work(steps) / (2 * size) ** 2
    assert pairs["contiguous"] == pytest.approx(3 / 8, rel=0.01)
    assert pairs["zigzag"] == pytest.approx(1 / 4, rel=0.01)


def ring_program(devices, share, *, dtype=jnp.bfloat16, gradient=True, **options):
    """The compiled program of a ring on so many devices, each with a share of so many tokens."""
    shape = jax.ShapeDtypeStruct((1, share * devices, 2, 16), dtype)
    rows = P(None, "sequence")
    mapped = jax.shard_map(
        lambda q, k, v: jax_fa4.ring_attention(q, k, v, axis_name="sequence", **options),
        mesh=mesh_of(devices),
        in_specs=rows,
        out_specs=rows,
    )

    def loss(q, k, v):
        return jnp.sum(mapped(q, k, v).astype(jnp.float32) ** 2)

    run = jax.grad(loss, (0, 1, 2)) if gradient else mapped
    return jax.jit(run).lower(shape, shape, shape).compile()


@needs_devices
def test_transfers_are_counted_and_never_mix_dtypes():
    """jax-ml/jax #32148: XLA refused transfers of mixed precision, which a ring with f32 and bf16 in one call meets.

    The count also shows that the backward pass does not keep what the forward pass has received.
    """
    devices, share = 4, 32
    options = {"is_causal": True, "layout": "zigzag"}
    moved = collectives(ring_program(devices, share, **options).as_text())
    assert set(moved) == {"collective-permute"}
    assert {len(one.dtypes) for one in moved["collective-permute"]} == {1}
    array_bytes = share * 2 * 16 * 4
    moved = collectives(ring_program(devices, share, dtype=jnp.float32, **options).as_text())["collective-permute"]
    # Keys and values three times in each pass, their gradients three times.
    assert sum(one.bytes for one in moved) == (2 * 2 * 3 + 2 * 3) * array_bytes


@needs_devices
def test_a_window_spares_the_steps_beyond_it():
    """Four devices, a window of less than a share: each needs the keys of one neighbour, once."""
    options = {"is_causal": True, "local_window_size": (16, 0), "dtype": jnp.float32}
    moved = collectives(ring_program(4, 32, gradient=False, **options).as_text())
    assert [one.bytes for one in moved["collective-permute"]] == [2 * 32 * 2 * 16 * 4]  # keys and values in one


@needs_devices
def test_memory_is_linear_in_the_share():
    """Twice the devices and twice the sequence: the same memory per device. Twice the share: at most twice."""
    sizes = {
        (devices, share): ring_program(devices, share, is_causal=True).memory_analysis().temp_size_in_bytes
        for devices, share in ((2, 256), (4, 256), (2, 512))
    }
    assert sizes[4, 256] <= 1.3 * sizes[2, 256]
    assert sizes[2, 512] <= 2.2 * sizes[2, 256]


def test_transfers_do_not_wait_for_the_products_of_their_step():
    """In the traced program no keys that travel depend on a result, so the compiler can overlap the two."""
    rows = P(None, "sequence")
    mapped = jax.shard_map(
        lambda q, k, v: jax_fa4.ring_attention(q, k, v, axis_name="sequence"),
        mesh=mesh_of(4),
        in_specs=rows,
        out_specs=rows,
    )
    shape = jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.float32)
    text = str(jax.make_jaxpr(mapped)(shape, shape, shape))
    permutes = re.findall(r"(\w+):\S+ = ppermute\[[^\]]*\] (\w+)", text.replace("\n", " "))
    assert len(permutes) == 3
    made = {result for result, _ in permutes}
    sources = {source for _, source in permutes if source not in made}
    assert len(sources) == 1  # key and value themselves; every other transfer passes on what one brought


@needs_devices
def test_vmap_of_a_ring():
    operands = [jnp.stack([x, x[::-1] * 0.5]) for x in draw(6, query_length=8, key_length=8)]
    rows = P(None, None, "sequence")
    mapped = jax.shard_map(
        jax.vmap(lambda q, k, v: jax_fa4.ring_attention(q, k, v, axis_name="sequence", is_causal=True)),
        mesh=mesh_of(2),
        in_specs=rows,
        out_specs=rows,
    )
    got, want = (
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(*operands)
        for f in (mapped, lambda *x: jax_fa4.attention(*x, is_causal=True, implementation="reference"))
    )
    jax.tree.map(assert_close, got, want)


def test_against_the_oracle():
    """A ring of one device, so that the reference is not the only judge of options."""
    operands = draw(7, batch=1, query_length=6, key_length=6)
    rows = P(None, "sequence")
    mapped = jax.shard_map(
        lambda *x: jax_fa4.ring_attention(*x, axis_name="sequence", layout="zigzag", local_window_size=(2, 1)),
        mesh=mesh_of(1),
        in_specs=rows,
        out_specs=rows,
    )
    assert_close(jax.jit(mapped)(*operands), oracle.attention(*operands, window=(2, 1)).out)


def test_bad_input_names_the_argument():
    q, k, v = draw(0, query_length=6, key_length=6)
    with pytest.raises(ValueError, match=r"axis_name is \('sequence',\)"):
        jax_fa4.ring_attention(q, k, v, axis_name="sequence")

    def run(q, k, v, **options):
        spec = P(None, "sequence")
        mapped = jax.shard_map(
            lambda *x: jax_fa4.ring_attention(*x, axis_name="sequence", **options),
            mesh=mesh_of(1),
            in_specs=spec,
            out_specs=spec,
        )
        return mapped(q, k, v)

    with pytest.raises(ValueError, match="layout is 'striped'"):
        run(q, k, v, layout="striped")
    with pytest.raises(ValueError, match=r"layout is 'zigzag', but this device has 5 queries"):
        run(q[:, :5], k[:, :5], v[:, :5], layout="zigzag")
    with pytest.raises(NotImplementedError, match=r"'reference'.*pass 'blockwise'"):
        run(q, k, v, implementation="reference")
    for name in ("bias", "mask"):
        with pytest.raises(NotImplementedError, match=rf"{name} has a column .* along sequence\. Call attention under"):
            run(q, k, v, **{name: jnp.zeros((1, 1, 6, 6))})
    with pytest.raises(TypeError, match=r"SegmentPlan.*Pass this device's share of the ids.*along sequence"):
        run(q, k, v, segment_ids=jax_fa4.plan_segments(jnp.zeros((2, 6), jnp.int32)))
    with pytest.raises(ValueError, match=r"key_value_seq_lengths holds 7\. .* from 0 to 6 are accepted"):
        run(q, k, v, key_value_seq_lengths=[7, 1])
    with pytest.raises(ValueError, match="A multiple of 8 is accepted"):
        jax_fa4.zigzag_order(12, 4)
    for arguments, error, match in (
        ((8, 0), ValueError, "devices is 0. An int from 1 is accepted"),
        ((-8, 2), ValueError, "length is -8. An int from 0 is accepted"),
        (("8", 2), TypeError, r"length is '8' \(str\)"),
        ((8, True), TypeError, r"devices is True \(bool\)"),
    ):
        with pytest.raises(error, match=match):
            jax_fa4.zigzag_order(*arguments)
    for name in (None, 3, (), (None,)):
        with pytest.raises(TypeError, match=re.escape(f"axis_name is {name!r}. The name of the mesh axis")):
            jax_fa4.ring_attention(q, k, v, axis_name=name)
