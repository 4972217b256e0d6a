"""Meshes under jit: what is split, what is moved, and that every way of placing operands gives one device's results."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import arguments, dispatch, partitioning
from jax_fa4.problem import AttentionOperands
from tests.inputs import assert_close, draw
from tests.programs import collectives

needs_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the eight CPU devices of conftest.py")
IMPLEMENTATIONS = ["blockwise"]
LENGTH = 16


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def place(mesh, arrays, spec):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def results_and_gradients(implementation, **options):
    """A function of operands and of the output's cotangent: output, log-sum-exp and gradients."""

    def run(operands, grad_out):
        def attend(operands):
            return jax_fa4.attention(
                *operands[:3], *operands[3:], implementation=implementation, return_residual=True, **options
            )

        results, pull = jax.vjp(attend, operands)
        return results, pull((grad_out, jnp.ones_like(results[1])))[0]

    return jax.jit(run)


def inputs(seed=0, **sizes):
    sizes = {"batch": 4, "query_length": LENGTH, "key_length": LENGTH, "query_heads": 4, "kv_heads": 2} | sizes
    operands = draw(seed, **sizes)
    return operands, jax.random.normal(jax.random.key(seed + 50), operands[0].shape)


@needs_devices
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "model"), P("data", None, "model")], ids=str)
def test_batch_and_heads_are_split_without_any_transfer(spec, implementation):
    """Nothing moves between devices, forward and backward; results and gradients lie as the operands do."""
    mesh = mesh_of(data=2, model=2)
    operands, grad_out = inputs()
    run = results_and_gradients(implementation, is_causal=True)
    placed, placed_grad = place(mesh, operands, spec), place(mesh, [grad_out], spec)[0]
    program = run.lower(placed, placed_grad).compile()
    assert collectives(program.as_text()) == {}
    (out, lse), grads = program(placed, placed_grad)
    for array in (out, lse, *grads):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    jax.tree.map(assert_close, ((out, lse), grads), run(list(operands), grad_out))


@needs_devices
def test_fewer_kv_heads_than_devices_sum_two_gradients_and_move_nothing_else():
    """One KV head, four devices along heads: each has it whole; its gradients are the sum of the devices'."""
    mesh = mesh_of(model=4)
    operands, grad_out = inputs(kv_heads=1)
    run = results_and_gradients("blockwise", is_causal=True)
    heads = P(None, None, "model")
    placed = [*place(mesh, operands[:1], heads), *place(mesh, operands[1:], P())]
    program = run.lower(placed, place(mesh, [grad_out], heads)[0]).compile()
    moved = collectives(program.as_text())
    assert set(moved) == {"all-reduce"}
    assert sum(one.bytes for one in moved["all-reduce"]) == 2 * operands[1].nbytes
    jax.tree.map(assert_close, program(placed, place(mesh, [grad_out], heads)[0]), run(list(operands), grad_out))


@needs_devices
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sharded_sequence_goes_round_a_ring(implementation):
    """Under plain jit, beside a split batch: keys travel, nothing is gathered, and results lie as the operands do."""
    mesh = mesh_of(data=2, sequence=2)
    spec = P("data", "sequence")
    operands, grad_out = inputs()
    run = results_and_gradients(implementation, is_causal=True)
    placed, placed_grad = place(mesh, operands, spec), place(mesh, [grad_out], spec)[0]
    program = run.lower(placed, placed_grad).compile()
    assert set(collectives(program.as_text())) == {"collective-permute"}
    (out, lse), grads = program(placed, placed_grad)
    for array in (out, lse, *grads):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    jax.tree.map(assert_close, ((out, lse), grads), run(list(operands), grad_out))


IDS = np.array([[0] * 5 + [1] * 8 + [-1] * 3, [0] * 16, [2, 0] * 8, [-1] * 16], np.int32)
# What stands beside query, key and value, and how many devices share batch, sequence and heads.
HARD = {
    "known_ids_and_lengths": (
        {"segment_ids": IDS, "key_value_seq_lengths": np.array([3, 16, 9, 0])}, {"data": 2, "sequence": 2}, {}),
    "traced_lengths_in_a_ring": (
        {"query_seq_lengths": jnp.array([16, 5, 9, 0]), "key_value_seq_lengths": jnp.array([3, 16, 9, 4])},
        {"sequence": 4}, {}),
    "bias_needs_whole_keys": ({"is_causal": True, "bias": True}, {"sequence": 2, "model": 2}, {}),
    "keys_of_odd_length": (
        {"is_causal": True, "causal_alignment": "bottom_right", "local_window_size": (9, 0)}, {"sequence": 4},
        {"key_length": 19}),
    "other_length_in_a_ring": (
        {"is_causal": True, "causal_alignment": "bottom_right"}, {"sequence": 2}, {"key_length": 24}),
    "sinks": ({"sinks": jnp.array([0.5, -1.0, 2.0, 0.0]), "is_causal": True}, {"sequence": 2, "model": 2}, {}),
    "kv_heads_across_devices": ({}, {"model": 3}, {"query_heads": 6, "kv_heads": 2}),
}  # fmt: skip


@needs_devices
@pytest.mark.parametrize("case", HARD)
def test_what_a_mesh_makes_hard_equals_one_device(case):
    options, sizes, shapes = HARD[case]
    operands, grad_out = inputs(1, **shapes)
    if options.get("bias"):
        operands = (*operands, jax.random.normal(jax.random.key(2), (1, 4, LENGTH, LENGTH)))
    options = {name: value for name, value in options.items() if name != "bias"}
    names = {axis: axis if axis in sizes else None for axis in ("data", "sequence", "model")}
    spec = P(names["data"], names["sequence"], names["model"])
    mesh = mesh_of(**sizes)

    def fits(x):
        return all(axis is None or n % sizes[axis] == 0 for axis, n in zip(spec, x.shape, strict=False))

    placed = [place(mesh, [x], spec if fits(x) and n < 3 else P())[0] for n, x in enumerate(operands)]
    run = results_and_gradients("blockwise", **options)
    want = results_and_gradients("reference", **options)(list(operands), grad_out)
    is_finite = jnp.isfinite(want[0][1])
    got = run(placed, place(mesh, [grad_out], spec)[0])
    jax.tree.map(assert_close, got, want)
    assert is_finite.any()


@needs_devices
@pytest.mark.parametrize("sizes", [{"data": 2, "model": 2}, {"sequence": 2}], ids=str)
def test_a_plan_of_segments_is_split_with_its_batch(sizes):
    """And is made again from the ids where the sequence is cut."""
    operands, grad_out = inputs(6)
    plan = jax_fa4.plan_segments(jnp.asarray(IDS), is_causal=True)
    mesh = mesh_of(**sizes)
    spec = P(None, "sequence") if "sequence" in sizes else P("data", None, "model")
    got = results_and_gradients("blockwise", is_causal=True, segment_ids=plan)(
        place(mesh, operands, spec), place(mesh, [grad_out], spec)[0]
    )
    want = results_and_gradients("reference", is_causal=True, segment_ids=jnp.asarray(IDS))(list(operands), grad_out)
    jax.tree.map(assert_close, got, want)


@needs_devices
def test_operands_placed_at_random_equal_one_device():
    """Every operand split or not along every dimension, by a seed: what disagrees is corrected, never computed."""
    mesh = mesh_of(data=2, model=4)
    operands, grad_out = inputs(2, kv_heads=4, head_dim=8)
    want = results_and_gradients("reference", is_causal=True, segment_ids=jnp.asarray(IDS))(list(operands), grad_out)
    run = results_and_gradients("blockwise", is_causal=True, segment_ids=jnp.asarray(IDS))
    draw_axes = np.random.default_rng(0)
    for _ in range(3):
        specs = []
        for _ in range(4):
            entries = [None] * 4
            for axis in ("data", "model"):
                dimension = draw_axes.integers(0, 5)
                if dimension < 4 and entries[dimension] is None:
                    entries[dimension] = axis
            specs.append(P(*entries))
        placed = [place(mesh, [x], spec)[0] for x, spec in zip((*operands, grad_out), specs, strict=True)]
        got = run(placed[:3], placed[3])
        jax.tree.map(assert_close, got, want)


PLACES = [P(), P("x"), P(None, "x"), P(None, None, "x"), P(None, None, None, "x")]


@needs_devices
@pytest.mark.parametrize("odd", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("common", [P("x"), pytest.param(P(None, None, "x"), marks=pytest.mark.slow)], ids=str)
def test_one_operand_that_lies_elsewhere_is_all_that_moves(common, odd):
    """Each operand in every place while the others agree: its own share crosses devices once, in each direction that
    has it; a query that is split by sequence makes a ring, and nothing is gathered for it."""
    devices, names = 4, ("query", "key", "value", "grad_out")
    mesh = mesh_of(x=devices)
    operands, grad_out = inputs(8, kv_heads=4, head_dim=8)
    run = results_and_gradients("blockwise", is_causal=True)
    want = run(list(operands), grad_out)
    share = operands[0].nbytes // devices
    for spec in PLACES:
        placed = [
            place(mesh, [x], spec if name == odd else common)[0]
            for name, x in zip(names, (*operands, grad_out), strict=True)
        ]
        program = run.lower(placed[:3], placed[3]).compile()
        jax.tree.map(assert_close, program(placed[:3], placed[3]), want)
        moved = {
            kind: sum(one.bytes for one in transfers) for kind, transfers in collectives(program.as_text()).items()
        }
        if spec in (P(), common):
            assert moved == {}
        elif odd != "query":
            assert moved == {"all-to-all": share}
        elif spec == P(None, "x"):
            assert set(moved) == {"collective-permute", "all-to-all"}
            assert moved["all-to-all"] == 5 * share  # key, value and cotangent there, two gradients back
        else:  # there it decides, and the others follow; where nothing is split it follows them, and its results
            assert moved == {"all-to-all": 3 * share}


@needs_devices
def test_shared_operands_under_shard_map_have_summed_gradients():
    """With check_vma: keys, a scale and sinks that all devices share beside queries that are split."""
    mesh = mesh_of(data=4)
    operands, _ = inputs(3)
    sinks, scale = jnp.array([0.1, 0.2, -0.3, 1.0]), jnp.float32(0.3)
    query, key, value = operands[0], operands[1][:1], operands[2][:1]

    def attend(query, key, value, sinks, scale):
        return jax_fa4.attention(query, key, value, sinks=sinks, scale=scale, implementation="blockwise")

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P("data"), P(), P(), P(), P()), out_specs=P("data"))

    def alone(query, key, value, sinks, scale):
        rows = (jnp.broadcast_to(x, (4, *x.shape[1:])) for x in (key, value))
        return jax_fa4.attention(query, *rows, sinks=sinks, scale=scale, implementation="reference")

    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2, 3, 4)))(
            query, key, value, sinks, scale
        )
        for f in (mapped, alone)
    )
    jax.tree.map(assert_close, got, want)


@needs_devices
def test_axes_left_to_the_compiler_inside_shard_map():
    """Manual along one axis, Auto along the other: right, whatever the compiler moves."""
    mesh = mesh_of(data=2, model=2)
    operands, _ = inputs(4)
    mapped = jax.jit(
        jax.shard_map(
            lambda *x: jax_fa4.attention(*x, is_causal=True, implementation="blockwise"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )
    )
    with jax.set_mesh(mesh):
        got = mapped(*place(mesh, operands, P("data", None, "model")))
    assert_close(got, jax_fa4.attention(*operands, is_causal=True, implementation="reference"))


@needs_devices
def test_explicit_axes_and_a_sharded_sequence():
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Explicit,) * 2)
    spec = P("data", "sequence", None, None)
    operands, grad_out = inputs(5)
    run = results_and_gradients("blockwise", is_causal=True)
    with jax.set_mesh(mesh):
        (out, lse), grads = run(place(mesh, operands, spec), place(mesh, [grad_out], spec)[0])
        assert jax.typeof(out).sharding.spec == spec
        assert jax.typeof(lse).sharding.spec == P("data", "sequence", None)
        assert [jax.typeof(grad).sharding.spec for grad in grads] == [spec] * 3
    jax.tree.map(assert_close, ((out, lse), grads), run(list(operands), grad_out))


def split_of(specs, sizes, implementation="blockwise", **shapes):
    shapes = {"batch": 4, "query_length": 16, "key_length": 16, "query_heads": 8, "kv_heads": 2} | shapes
    problem = arguments.read_call(*draw(0, **shapes), is_causal=True).problem
    names = ("query", "key", "value")
    return problem, partitioning.choose_split(
        dispatch.load(implementation), problem, dispatch.Target("cpu"), sizes, dict(zip(names, specs, strict=True))
    )


def test_the_query_decides_and_others_fill_in():
    sizes = {"data": 2, "model": 2}
    _, split = split_of([P("data", None, "model"), P(), P("model")], sizes)
    assert (split.batch, split.heads, split.sequence) == (("data",), ("model",), ())
    _, split = split_of([P(), P("data"), P(None, None, "model")], sizes)
    assert (split.batch, split.heads) == (("data",), ("model",))
    _, split = split_of([P(("data", "model")), P(), P()], sizes)
    assert split.batch == ("data", "model")
    _, split = split_of([P(("data", "model")), P(), P()], sizes, batch=6)  # 6 = 2 * 3
    assert split.batch == ("data",)
    _, split = split_of([P(None, None, None, "model")] * 3, sizes)  # the head dimension is never split
    assert (split.batch, split.heads, split.sequence) == ((), (), ())


def test_kv_heads_that_devices_share_are_picked():
    problem, split = split_of([P(None, None, "model"), P(), P()], {"model": 4})
    np.testing.assert_array_equal(split.kv_heads(problem), [[0], [0], [1], [1]])
    assert split.problem(problem).kv_heads == 1
    problem, split = split_of([P(None, None, "model"), P(), P()], {"model": 3}, query_heads=6)
    np.testing.assert_array_equal(split.kv_heads(problem), [[0, 0], [0, 1], [1, 1]])
    problem, split = split_of([P(None, None, "model"), P(), P()], {"model": 2})
    assert split.kv_heads(problem) is None
    assert split.axes("key", (4, 16, 2, 8), problem) == ((), (), ("model",), ())


def test_keys_travel_where_they_can():
    sizes = {"sequence": 4}
    _, split = split_of([P(None, "sequence"), P(), P()], sizes)
    assert (split.keys, split.layout) == ("ring", "zigzag")
    _, split = split_of([P(None, "sequence"), P(), P()], sizes, key_length=18)
    assert (split.keys, split.sequence) == ("whole", ("sequence",))
    _, split = split_of([P(None, "sequence"), P(None, "sequence"), P()], sizes, query_length=1)
    assert split.sequence == ()


def test_a_share_that_no_implementation_takes_names_mesh_and_axis():
    class Picky:
        name = "picky"

        def why_not(self, problem, target):
            return "batch 2 is not taken; pass implementation='blockwise'." if problem.batch == 2 else None

        def describe(self, problem, target):
            return []

        forward = backward = None

    problem = arguments.read_call(*draw(0, batch=4)).problem
    specs = dict.fromkeys(("query", "key", "value"), P("data"))
    with pytest.raises(NotImplementedError, match=r"'picky'.*mesh \(data: 2\).*batch by \('data',\).*blockwise"):
        partitioning.choose_split(Picky(), problem, dispatch.Target("cpu"), {"data": 2}, specs)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 4), (4, 1)], ids=str)
def test_sharding_rules_are_ones_that_shardy_takes(heads):
    """Every operand at once, with and without a batch to broadcast over: the rule parses and has the right ranks."""
    operands, grad_out = inputs(query_heads=heads[0], kv_heads=heads[1])
    mesh = mesh_of(data=2, model=2) if len(jax.devices()) >= 4 else None
    if mesh is None:
        pytest.skip("needs four devices")
    bias = jnp.zeros((1, heads[0], 1, LENGTH))
    mask = jnp.ones((4, 1, LENGTH, LENGTH), bool)
    run = results_and_gradients(
        "blockwise", sinks=jnp.zeros(heads[0]), scale=jnp.float32(0.2), segment_ids=jnp.asarray(IDS),
        query_seq_lengths=jnp.full(4, LENGTH), mask=mask,
    )  # fmt: skip
    placed = [*place(mesh, operands, P("data")), bias]
    text = run.lower(placed, place(mesh, [grad_out], P("data"))[0]).as_text()
    assert text.count("sdy.sharding_rule") == 2


def test_pairs_of_axes_are_disjoint():
    sizes = {"data": 2, "model": 2}
    for specs in itertools.product([P("data"), P(None, "data"), P(None, None, "data")], repeat=3):
        _, split = split_of(list(specs), sizes, kv_heads=8)
        used = (*split.batch, *split.sequence, *split.heads)
        assert len(used) == len(set(used)) == 1


@pytest.fixture
def without_shardy():
    """GSPMD, the partitioner before Shardy, which JAX can still be told to use."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


@needs_devices
@pytest.mark.usefixtures("without_shardy")
@pytest.mark.parametrize("spec", [P("x", None, "y"), P(None, ("x", "y"))], ids=str)
def test_the_partitioner_before_shardy_is_right_too(spec):
    """It asks where results lie instead of reading a rule; without an answer it ended the process."""
    mesh = mesh_of(x=2, y=2)
    operands, grad_out = inputs(9)
    run = results_and_gradients("blockwise", is_causal=True)
    got = run(place(mesh, operands, spec), place(mesh, [grad_out], spec)[0])
    jax.tree.map(assert_close, got, run(list(operands), grad_out))


@needs_devices
def test_a_mesh_that_cannot_be_honoured_says_which_axis_and_what_to_do(monkeypatch):
    """The compiler asks late; its error still has our sentence, with the mesh, the axis and the remedy."""
    operands, _ = inputs(10)
    only_whole = "batch 1 is not taken; pass implementation='reference'."
    blockwise = dispatch.load("blockwise")
    monkeypatch.setattr(type(blockwise), "why_not", lambda self, problem, _: only_whole if problem.batch == 1 else None)
    dispatch.why_not.cache_clear()
    with pytest.raises(Exception, match=r"the share of a device of the mesh \(data: 4\).* batch by \('data',\).* pass"):
        jax.jit(lambda *x: jax_fa4.attention(*x, implementation="blockwise"))(
            *place(mesh_of(data=4), operands, P("data"))
        )
    dispatch.why_not.cache_clear()


@needs_devices
def test_layers_that_are_alike_are_traced_once():
    """The compiler asks for the share of every call, and each answer used to be traced anew: 20 s for four layers."""
    traced = []

    class Counting:
        name = "counting"

        def why_not(self, problem, target):
            return None

        def describe(self, problem, target):
            return []

        def forward(self, problem, operands):
            traced.append(problem.query_length)
            return dispatch.load("blockwise").forward(problem, operands)

        def backward(self, problem, operands, *rest):
            return dispatch.load("blockwise").backward(problem, operands, *rest)

    counting, (operands, _) = Counting(), inputs(7)
    problem = arguments.read_call(*operands, is_causal=True).problem

    @jax.jit
    def layers(operands):
        for _ in range(3):
            given = AttentionOperands(*operands)
            out, _ = partitioning.forward(counting, problem, dispatch.Target("cpu"), given)
            operands = [operands[0] + out, *operands[1:]]
        return operands[0]

    layers.lower(place(mesh_of(sequence=2), operands, P(None, "sequence"))).compile()
    # Whole, once for each layer; the share of a device, of which the later steps have two forms, once for all.
    assert [traced.count(LENGTH), traced.count(LENGTH // 2), traced.count(LENGTH // 4)] == [3, 2, 1]
