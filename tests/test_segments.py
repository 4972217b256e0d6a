"""Plans of packed documents: the same values and gradients as ids under every transformation, paid for once."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fa4
from jax_fa4 import dispatch
from jax_fa4.cost import ARCHITECTURES
from jax_fa4.problem import AttentionOperands, PlannedGrids
from jax_fa4.schedule import order
from jax_fa4.segments import read_call
from tests.inputs import assert_close, draw

LENGTH = 96
HOPPER = ARCHITECTURES["sm_90"]
TILES = (64, 32)


def packed_ids(seed, batch=2, length=LENGTH):
    """Rows of three documents and padding; the second row's documents are interleaved, with a hole."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
    ids = np.repeat([[0, 7, 3, -1]], np.diff([0, *cuts, length]), axis=1).astype(np.int32)
    ids = np.repeat(ids, batch, axis=0)
    ids[1::2] = rng.integers(-1, 3, ids[1::2].shape)
    return ids


def loss(q, k, v, ids, **options):
    out, lse = jax_fa4.attention(q, k, v, segment_ids=ids, return_residual=True, **options)
    return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))


@pytest.fixture
def with_tables(monkeypatch):
    """Lets `blockwise` ask for work tables as kernels do, and look them up, forward and backward."""
    blockwise = dispatch.load("blockwise")
    looked_up = []

    def grids(problem, target):
        arguments = (problem, *TILES, HOPPER)
        return PlannedGrids(order.forward_grid(*arguments), order.backward_grid(*arguments))

    def forward(problem, operands):
        looked_up.append(order.forward_table(problem, operands, *TILES, HOPPER))
        return type(blockwise).forward(blockwise, problem, operands)

    monkeypatch.setattr(blockwise, "planned_grids", grids, raising=False)
    monkeypatch.setattr(blockwise, "forward", forward, raising=False)
    yield looked_up
    jax.clear_caches()


@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (9, 4)}], ids=str)
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("known", "blockwise"), ("traced", "blockwise"), ("argument", "blockwise"), ("argument", "reference")],
)
def test_plans_equal_ids(kind, implementation, options):
    tensors, ids = draw(0, query_length=LENGTH, key_length=LENGTH, query_heads=4), packed_ids(0)
    wanted = gradients(*tensors, ids, implementation=implementation, **options)
    plan = jax_fa4.plan_segments(ids if kind == "known" else jnp.asarray(ids), **options)
    assert plan.is_concrete == (kind == "known")
    if kind == "argument":
        found = jax.jit(lambda plan: gradients(*tensors, plan, implementation=implementation, **options))(plan)
    else:
        found = gradients(*tensors, plan, implementation=implementation, **options)
    jax.tree.map(assert_close, found, wanted)


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray])
def test_no_batch_dimension(wrap):
    tensors, ids = draw(0, batch=1, query_length=LENGTH, key_length=LENGTH), packed_ids(0)[:1]
    plan = jax_fa4.plan_segments(wrap(ids[0]), heads=2, head_dim=8, dtype="float32")
    assert plan.queries.exact.shape == ()
    found = jax_fa4.attention(*(one[0] for one in tensors), segment_ids=plan)
    assert_close(found, jax_fa4.attention(*tensors, segment_ids=ids)[0])


def test_different_ids_of_queries_and_keys():
    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    tensors, ids = draw(1, query_length=40, key_length=LENGTH), (packed_ids(1, length=40), packed_ids(2))
    wanted = gradients(*tensors, ids, **options)
    plan = jax_fa4.plan_segments(tuple(map(jnp.asarray, ids)), **options)
    jax.tree.map(assert_close, jax.jit(lambda plan: gradients(*tensors, plan, **options))(plan), wanted)


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)
def test_any_leading_dimensions(leading):
    ids = np.broadcast_to(packed_ids(3)[0], (*leading, LENGTH))
    q, k, v = (
        x.reshape(*leading, *x.shape[1:])
        for x in draw(2, batch=int(np.prod(leading)), query_length=LENGTH, key_length=LENGTH)
    )
    plan = jax_fa4.plan_segments(jnp.asarray(ids))
    jax.tree.map(assert_close, gradients(q, k, v, plan), gradients(q, k, v, ids))


def test_scan_over_rematerialised_layers():
    """Layers take the plan as a constant of the loop, or carried through it."""
    query, key, value = draw(3, query_length=LENGTH, key_length=LENGTH)
    ids = jnp.asarray(packed_ids(4))

    def model(query, ids, use):
        def layer(carry, _):
            x, held = carry
            out = jax_fa4.attention(x, key, value, segment_ids=held if use == "carried" else ids, is_causal=True)
            return (x + out, held), None

        (out, _), _ = jax.lax.scan(jax.checkpoint(layer), (query, ids), None, length=3)
        return (out**2).sum()

    plan = jax_fa4.plan_segments(ids, is_causal=True)
    wanted = jax.grad(model)(query, ids, "closed over")
    for use in ("closed over", "carried"):
        assert_close(jax.jit(jax.grad(model), static_argnums=2)(query, plan, use), wanted)


def test_vmap(with_tables):
    """Of plans with the tensors, of tensors beside one plan; a map makes another batch, whose tables are made anew."""
    tensors = draw(4, batch=6, query_length=LENGTH, key_length=LENGTH)
    tensors = tuple(x.reshape(3, 2, *x.shape[1:]) for x in tensors)
    ids = jnp.asarray(np.stack([packed_ids(seed) for seed in range(3)]))
    options = {"is_causal": True, "implementation": "blockwise"}
    tables = {"heads": 2, "head_dim": 8, "dtype": "float32"}
    wanted = jax.vmap(lambda *x: gradients(*x, **options))(*tensors, ids)
    plans = jax.vmap(lambda ids: jax_fa4.plan_segments(ids, **tables, **options))(ids)
    jax.tree.map(assert_close, jax.vmap(lambda *x: gradients(*x, **options))(*tensors, plans), wanted)
    one = jax.tree.map(lambda leaf: leaf[0], plans)
    wanted = jax.vmap(lambda *x: gradients(*x, ids[0], **options))(*tensors)
    jax.tree.map(assert_close, jax.vmap(lambda *x: gradients(*x, one, **options))(*tensors), wanted)
    for table in with_tables:
        assert len(table.items) == table.batch_order.shape[0] * 2 * 2


def test_tables_are_looked_up(with_tables):
    tensors, ids = draw(5, query_length=LENGTH, key_length=LENGTH), jnp.asarray(packed_ids(5))
    options = {"is_causal": True, "implementation": "blockwise"}
    jaxpr = jax.make_jaxpr(lambda ids: loss(*tensors, ids, **options))(ids)
    with_tables.clear()
    plan = jax_fa4.plan_segments(ids, heads=2, head_dim=8, dtype="float32", **options)
    planned = jax.make_jaxpr(lambda plan: loss(*tensors, plan, **options))(plan)
    assert with_tables
    call = read_call(*tensors, segment_ids=plan, is_causal=True)
    raw = read_call(*tensors, segment_ids=ids, is_causal=True)
    for table in (order.forward_table, order.backward_table):
        looked_up, made = (
            jax.jit(lambda operands, problem=one.problem, table=table: table(problem, operands, *TILES, HOPPER))(
                one.operands
            )
            for one in (call, raw)
        )
        for ours, theirs in zip(looked_up, made, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert re.search(r"i32\[2,96\] = sort", str(jaxpr))
    assert not re.search(r"i32\[2,96\] = sort", str(planned))


def test_known_plans_have_the_tables_of_traced_ones(with_tables):
    ids, options = packed_ids(6), {"heads": (4, 2), "head_dim": 64, "is_causal": True, "implementation": "blockwise"}
    known, traced = (jax_fa4.plan_segments(x, **options) for x in (ids, jnp.asarray(ids)))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(known))
    assert known.forward_items is not None
    assert known.backward_items is not None
    jax.tree.map(np.testing.assert_array_equal, known, traced)


def sorts(function, *arguments):
    """Sorts and gathers in the compiled program."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return len(re.findall(r" sort\(", text)), len(re.findall(r" gather\(", text))


def test_layers_pay_once():
    """Three layers, forward and backward, sort no more than one does: raw ids too, since XLA finds what is common."""
    tensors, ids = draw(6, query_length=LENGTH, key_length=LENGTH), jnp.asarray(packed_ids(7))

    def model(layers):
        def of(query, ids, planned):
            held = jax_fa4.plan_segments(ids, is_causal=True) if planned else ids
            for _ in range(layers):
                query = query + jax_fa4.attention(
                    query, *tensors[1:], segment_ids=held, is_causal=True, implementation="blockwise"
                )
            return (query**2).sum()

        return jax.grad(of)

    counts = {
        (layers, planned): sorts(lambda q, i, n=layers, p=planned: model(n)(q, i, p), tensors[0], ids)
        for layers in (1, 3)
        for planned in (False, True)
    }
    assert counts[1, False] == counts[3, False] == counts[1, True] == counts[3, True]
    assert counts[1, True][0] == 1


def test_a_loop_over_layers_holds_no_planning():
    """In a scan the plan stays outside of the loop's body."""
    tensors, ids = draw(7, query_length=64, key_length=64), jnp.asarray(packed_ids(8, length=64))

    def model(query, held):
        def layer(x, _):
            return x + jax_fa4.attention(x, *tensors[1:], segment_ids=held, implementation="blockwise"), None

        return jax.lax.scan(layer, query, None, length=4)[0].sum()

    plan = jax_fa4.plan_segments(ids)
    assert "sort" not in str(jax.make_jaxpr(jax.grad(model))(tensors[0], plan))
    assert "sort" in str(jax.make_jaxpr(jax.grad(model))(tensors[0], ids))


def test_new_ids_do_not_recompile():
    tensors, compiled = draw(8, query_length=LENGTH, key_length=LENGTH), []

    @jax.jit
    def step(ids):
        compiled.append(1)
        return gradients(*tensors, jax_fa4.plan_segments(ids, is_causal=True), is_causal=True)

    for seed in range(4):
        ids = jnp.asarray(packed_ids(seed))
        jax.tree.map(assert_close, step(ids), gradients(*tensors, ids, is_causal=True))
    assert len(compiled) == 1


def planned_sizes(length):
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    plan = jax.jit(lambda ids: jax_fa4.plan_segments(ids, is_causal=True))
    return plan.lower(ids).compile()


def test_planning_is_linear_and_has_no_loop():
    """One sort, no loop, nothing that the host would have to read; memory grows as tokens do, times their logarithm."""
    small, large = planned_sizes(8192), planned_sizes(32768)
    text = small.as_text()
    assert not re.search(r" (while|conditional|infeed|outfeed|custom-call)\(", text)
    assert len(re.findall(r" sort\(", text)) == 1
    ratio = large.memory_analysis().temp_size_in_bytes / small.memory_analysis().temp_size_in_bytes
    assert ratio < 5


def test_memory_of_a_long_row_is_linear():
    """256k tokens, forward and backward: temporaries are a few times the operands."""
    length = 262144

    def step(query, key, value, ids):
        plan = jax_fa4.plan_segments(ids, is_causal=True)
        return jax.grad(lambda *x: jax_fa4.attention(*x, segment_ids=plan, is_causal=True).sum(), (0, 1, 2))(
            query, key, value
        )

    tensors = [jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)] * 3
    compiled = jax.jit(step).lower(*tensors, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    operands = 3 * length * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * operands
    for shape in re.findall(r"\[([\d,]+)\]", compiled.as_text()):
        assert np.prod([int(size) for size in shape.split(",")]) <= 2 * length * 64


def test_batch_sharded_mesh(with_tables):
    """Under jit over a mesh, and in `shard_map`, where each shard finds that its tables are another batch's."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:2])
    tensors, ids = draw(9, batch=4, query_length=LENGTH, key_length=LENGTH), jnp.asarray(packed_ids(9, batch=4))
    options = {"is_causal": True, "implementation": "blockwise"}
    wanted = gradients(*tensors, ids, **options)
    plan = jax_fa4.plan_segments(ids, heads=2, head_dim=8, dtype="float32", **options)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    placed = jax.device_put((*tensors, plan), rows)
    jax.tree.map(assert_close, jax.jit(lambda *x: gradients(*x, **options))(*placed), wanted)
    each = jax.shard_map(
        lambda *x: jax_fa4.attention(*x[:3], segment_ids=x[3], **options),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    assert_close(jax.jit(each)(*placed), jax_fa4.attention(*tensors, segment_ids=ids, **options))


def test_what_does_not_fit_is_refused(with_tables):
    q, k, v = draw(10, query_length=LENGTH, key_length=LENGTH)
    ids = jnp.asarray(packed_ids(10))
    plan = jax_fa4.plan_segments(ids, is_causal=True)
    for options, match in (
        ({}, "is_causal True, but the call has False"),
        ({"is_causal": True, "local_window_size": 4}, "local_window_size"),
        ({"is_causal": True, "query_seq_lengths": np.array([3, 4])}, "lengths were given beside it"),
    ):
        with pytest.raises(ValueError, match=match):
            jax_fa4.attention(q, k, v, segment_ids=plan, **options)
    with pytest.raises(ValueError, match="shape"):
        jax_fa4.attention(q[:, :10], k, v, segment_ids=plan, is_causal=True)
    with pytest.raises(ValueError, match="shape"):
        jax_fa4.attention(q[:1], k[:1], v[:1], segment_ids=plan, is_causal=True)
    tabled = jax_fa4.plan_segments(ids, heads=4, head_dim=8, dtype="float32")
    with pytest.raises(ValueError, match="work tables for"):
        jax_fa4.attention(q, k, v, segment_ids=tabled)
    tabled = jax_fa4.plan_segments(ids, heads=2, head_dim=8, dtype="float32", implementation="blockwise")
    call = read_call(q, k, v, segment_ids=tabled)
    with pytest.raises(ValueError, match="tiles of 64 by 32"):
        order.forward_table(call.problem, call.operands, 128, 64, HOPPER)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"heads": 4}, "together"),
        ({"head_dim": 4}, "together"),
        ({"heads": (4, 3), "head_dim": 8}, "multiple"),
        ({"heads": 0, "head_dim": 8}, "Positive"),
        ({"heads": True, "head_dim": 8}, "Positive"),
        ({"local_window_size": -7}, "negative"),
    ],
    ids=str,
)
def test_wrong_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        jax_fa4.plan_segments(packed_ids(0), **options)


@pytest.mark.parametrize(
    ("dtype", "match"),
    [("foo", "dtype is 'foo', which names none"), ("int8", "dtype is int8"), (None, "dtype is None")],
)
def test_wrong_dtype(dtype, match):
    with pytest.raises(TypeError, match=match + r".*bfloat16, .* pass query\.dtype"):
        jax_fa4.plan_segments(packed_ids(0), heads=2, head_dim=8, dtype=dtype)


def test_wrong_ids():
    with pytest.raises(TypeError, match="SegmentPlan already"):
        jax_fa4.plan_segments(jax_fa4.plan_segments(packed_ids(0)))
    with pytest.raises(TypeError, match="segment_ids is None"):
        jax_fa4.plan_segments(None)
    with pytest.raises(TypeError, match="dtype float"):
        jax_fa4.plan_segments(np.zeros((2, 3)))
    with pytest.raises(TypeError, match=r"segment_ids is \[\[0, 1\], \[1\]\], which is no array"):
        jax_fa4.plan_segments([[0, 1], [1]])
    with pytest.raises(ValueError, match="equal leading dimensions"):
        jax_fa4.plan_segments((np.zeros((2, 3), int), np.zeros((3, 3), int)))


def test_explain_takes_a_plan():
    shape = jax.ShapeDtypeStruct((2, LENGTH, 2, 8), jnp.float32)
    for ids, word in ((packed_ids(0), "known when traced"), (jnp.asarray(packed_ids(0)), "traced")):
        report = jax_fa4.explain(shape, shape, shape, segment_ids=jax_fa4.plan_segments(ids))
        assert f"segment ids ({word})" in str(report)
    assert dataclasses.is_dataclass(jax_fa4.SegmentPlan)
    assert AttentionOperands().query_lo is None


def test_values_of_other_documents_change_nothing():
    """Gradients by keys and values of other documents are exactly zero; NaN in padding is not read."""
    q, k, v = draw(11, query_length=LENGTH, key_length=LENGTH)
    ids = packed_ids(11)
    plan = jax_fa4.plan_segments(jnp.asarray(ids))
    mine = jnp.asarray(ids == 0)[:, :, None, None]
    grads = jax.grad(lambda k, v: jnp.where(mine, jax_fa4.attention(q, k, v, segment_ids=plan), 0).sum(), (0, 1))(k, v)
    for grad in grads:
        assert (np.asarray(grad)[ids != 0] == 0).all()
        assert (np.asarray(grad)[ids == 0] != 0).any()
    poison = jnp.where(jnp.asarray(ids < 0)[:, :, None, None], jnp.nan, 0)
    clean = jax_fa4.attention(q, k, v, segment_ids=plan)
    assert_close(jax_fa4.attention(q + poison, k + poison, v + poison, segment_ids=plan), clean)
