"""The kernels behind `jax_fa4.attention` on the emulated GPU: which are chosen, and that transformations hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import arguments, emulator
from jax_fa4.ffi import hopper_forward
from jax_fa4.ffi.forward_call import ForwardCall
from jax_fa4.kernels import bundle
from jax_fa4.kernels.attention import KERNELS, architecture_of, emulated, kernels_of
from tests.kernels.forward_checks import check_close, compare, draw
from tests.kernels.gradient_checks import check_gradients, gradients_in_float64


def attend(*tensors: jax.Array, **options: Any) -> Any:
    return jax_fa4.attention(*tensors, implementation="emulated", return_residual=True, **options)


def tensors_and_cotangents(batch: int = 2) -> tuple[Any, Any]:
    tensors = draw(0, (batch, 70, 4, 64), 90, 2, "bfloat16")
    rng = np.random.default_rng(1)
    shape = tensors[0].shape
    return tensors, (
        jnp.asarray(rng.standard_normal(shape), "bfloat16"),
        jnp.asarray(rng.standard_normal(shape[:3]), "float32"),
    )


def value_and_gradients(*operands: jax.Array, **options: Any) -> Any:
    """Output, log-sum-exp and gradients of three tensors under two cotangents."""
    results, pull = jax.vjp(lambda *tensors: attend(*tensors, **options), *operands[:3])
    return results, pull(tuple(operands[3:]))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (20, 5)}], ids=str)
def test_jit_and_gradients(options: dict[str, Any]) -> None:
    tensors, cotangents = tensors_and_cotangents()
    (out, lse), gradients = jax.jit(lambda *one: value_and_gradients(*one, **options))(*tensors, *cotangents)
    call = arguments.read_call(*tensors, **options)
    compare(call, out, lse)
    check_gradients(gradients, call, *cotangents)


@pytest.mark.usefixtures("hopper")
def test_vmap_is_one_launch_and_every_example_has_its_gradient() -> None:
    tensors, cotangents = tensors_and_cotangents(6)
    shared_key = tensors[1][:2]
    mapped = [one.reshape(3, 2, *one.shape[1:]) for one in (*tensors, *cotangents)]
    mapped[1] = shared_key
    emulator.statistics()
    mapper = jax.vmap(lambda *one: value_and_gradients(*one, is_causal=True), in_axes=(0, None, 0, 0, 0))
    results, gradients = jax.block_until_ready(jax.jit(mapper)(*mapped))
    grids = [one["grid"] for one in emulator.statistics() if "forward" in one["kernel"].lower()]
    assert grids == [[24, 1, 1]]
    for example in range(3):
        one = [x if x is shared_key else x[example] for x in mapped]
        call = arguments.read_call(*one[:3], is_causal=True)
        compare(call, results[0][example], results[1][example])
        check_gradients([gradient[example] for gradient in gradients], call, *one[3:])


@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the eight CPU devices that conftest.py asks for")
@pytest.mark.parametrize("how", ["shard_map", "jit"])
def test_eight_devices(how: str) -> None:
    """Every shard launches its own kernels under shard_map, and gradients are those of one device."""
    tensors, cotangents = tensors_and_cotangents(4)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    spec = P("data", None, "model")

    def run(*operands: jax.Array) -> Any:
        return value_and_gradients(*operands, is_causal=True)

    if how == "shard_map":
        run = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 5, out_specs=((spec, spec), (spec,) * 3))
    emulator.statistics()
    operands = [jax.device_put(one, NamedSharding(mesh, spec)) for one in (*tensors, *cotangents)]
    (out, lse), gradients = jax.block_until_ready(jax.jit(run)(*operands))
    if how == "shard_map":
        grids = [one["grid"] for one in emulator.statistics() if "forward" in one["kernel"].lower()]
        assert grids == [[2, 1, 1]] * 8
    call = arguments.read_call(*tensors, is_causal=True)
    compare(call, out, lse)
    check_gradients(gradients, call, *cotangents)


@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs the eight CPU devices that conftest.py asks for")
def test_gradients_outside_of_shard_map() -> None:
    """A kernel's results differ from shard to shard; were they taken for replicated, gradients would be summed."""
    tensors, _ = tensors_and_cotangents(8)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=(P("data"),) * 2)
    gradients = jax.jit(jax.grad(lambda *one: jnp.sum(sharded(*one)[0].astype(jnp.float32)), argnums=(0, 1, 2)))(
        *tensors
    )
    call = arguments.read_call(*tensors)
    ones, zeros = jnp.ones(tensors[0].shape), jnp.zeros(tensors[0].shape[:3])
    expected = gradients_in_float64(call, ones, zeros)
    # With this cotangent the gradients of query and key are 0 but for rounding.
    check_close(gradients[2], *expected["value"], "bfloat16")


@pytest.mark.usefixtures("hopper")
def test_checkpoint_scan_and_donation() -> None:
    query, key, value = draw(2, (1, 40, 2, 64), 40, 2, "bfloat16")

    def layer(state: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.checkpoint(lambda one: attend(one, key, value)[0])(state), None

    run = jax.jit(lambda one: jax.lax.scan(layer, one, length=3)[0], donate_argnums=0)
    expected = query
    for _ in range(3):
        expected = jax.jit(lambda one: attend(one, key, value)[0])(expected)
    np.testing.assert_array_equal(np.asarray(run(query + 0)), np.asarray(expected))
    gradient = jax.jit(jax.grad(lambda one: jnp.sum(jax.lax.scan(layer, one, length=3)[0].astype(jnp.float32) ** 2)))
    assert np.isfinite(np.asarray(gradient(query), np.float32)).all()


def test_target_or_option_names_the_emulated_gpu() -> None:
    tensors = draw(3, (1, 20, 1, 64), 20, 1, "bfloat16")

    def explain(**options: Any) -> jax_fa4.Explanation:
        return jax_fa4.explain(*tensors, implementation="emulated", **options)

    try:
        emulator.set_options(arch="10.0")
    except FileNotFoundError:
        pytest.skip("the emulator is not built")
    emulator.set_options(arch="9.0")
    assert str(explain().target) == "cpu sm_90"
    assert explain().implementation == "emulated"
    by_option = jax.jit(attend)(*tensors)
    emulator.set_options(arch="10.0")
    with jax_fa4.target("sm_90"):
        assert str(explain().target) == "cuda sm_90"
        by_target = jax.jit(attend)(*tensors)
    np.testing.assert_array_equal(np.asarray(by_option[0]), np.asarray(by_target[0]))
    with jax_fa4.target("sm_80"), pytest.raises(NotImplementedError) as refusal:
        attend(*tensors)
    assert "is cuda sm_80, and there are attention kernels for sm_90a, sm_100f and sm_103a;" in str(refusal.value)
    assert "jax_fa4.target('sm_90')" in str(refusal.value)


@pytest.mark.usefixtures("hopper")
def test_explain_says_tiles_schedule_and_workspace() -> None:
    shape = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
    text = str(jax_fa4.explain(shape, shape, shape, is_causal=True, implementation="emulated"))
    assert max(map(len, text.splitlines())) <= 96
    parts = (
        "192 queries x 80 keys",
        "704 items",
        "132 multiprocessors",
        "0 bytes",
        "128 keys x 64 queries",
        "1,024 items",
    )
    for part in (*parts, "1,024 items", f"{2 * 16 * 4096 * 130 * 4:,} bytes"):
        assert part in " ".join(text.split())
    ids = np.sort(np.random.default_rng(0).integers(0, 9, (2, 4096)), axis=-1)
    for given, when in ((ids, "key tiles"), (jnp.asarray(ids), "ordered when the call runs")):
        text = str(jax_fa4.explain(shape, shape, shape, segment_ids=given, implementation="emulated"))
        assert when in " ".join(text.split())


@pytest.mark.usefixtures("hopper")
def test_refusals() -> None:
    query = jnp.zeros((1, 8, 2, 64), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"not float32.*blockwise"):
        attend(query, query, query)
    bias = jnp.zeros((1, 1, 8, 8))
    query = query.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"no bias"):
        attend(query, query, query, bias)
    with pytest.raises(NotImplementedError, match=r"logits_soft_cap is 1e\+06; .* up to 10000.*blockwise"):
        attend(query, query, query, logits_soft_cap=1e6)
    with pytest.raises(NotImplementedError, match=r"positive scale"):
        attend(query, query, query, scale=1e-60)  # 0 as float32
    assert (
        jax_fa4.explain(query, query, query, bias, implementation=("emulated", "blockwise")).implementation
        == "blockwise"
    )


@pytest.mark.parametrize(
    ("device", "forward", "backward"),
    [
        ("sm_90", "sm_90a", "sm_90a"),
        ("sm_100", "sm_100f", "sm_100f"),
        ("sm_103", "sm_103a", "sm_100f"),
        ("sm_107", "sm_100f", "sm_100f"),
        *((name, None, None) for name in ("sm_80", "sm_101", "sm_110", "sm_120", "sm_121")),
    ],
)
def test_each_device_gets_the_kernels_made_for_it(device: str, forward: str | None, backward: str | None) -> None:
    """By `architecture_of`, by `kernels_of` and by explain alike."""
    query = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    with jax_fa4.target(device) as target:
        explained = jax_fa4.explain(query, query, query, is_causal=True)
        found = architecture_of(target)
        assert (found and found.name) == forward
        assert explained.implementation == ("blockwise" if forward is None else "fa4")
        if forward is None:
            assert f"there are attention kernels for sm_90a, sm_100f and sm_103a, not for cuda {device};" in str(
                explained.passed_over
            )
            return
        labels = dict(explained.details)
        assert labels["kernel"].endswith(f"-{forward}")
        assert labels["backward kernel"].endswith(f"-{backward}")
        assert kernels_of(target) is KERNELS[forward]


@pytest.mark.parametrize("architecture", KERNELS)
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"segment_ids": np.zeros((1, 200), np.int32)}], ids=str)
def test_the_wheel_suffices_for_every_head_dimension(
    architecture: str, options: dict[str, Any], is_ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiler."""
    monkeypatch.setattr(bundle, "compiler_version", lambda: None)
    monkeypatch.setattr(bundle, "cache_folder", lambda: Path("nowhere"))
    kernels = KERNELS[architecture]
    dims = [(head_dim, head_dim) for head_dim in range(8, 129, 8)]
    dims += [(192, 128), (136, 64)] if architecture != "sm_90a" else []
    for head_dim, value_dim in dims:
        tensors = draw(0, (1, 200, 4, head_dim), 200, 2, "bfloat16", value_dim=value_dim)
        problem = arguments.read_call(*tensors, deterministic=is_ordered, **options).problem
        assert kernels.why_not(problem) is None


@pytest.mark.usefixtures("hopper")
def test_a_report_of_the_emulator_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor map that reaches beyond its buffer: the error says kernel, PTX line, CTA and warp."""
    sizes = ForwardCall.integers
    monkeypatch.setattr(ForwardCall, "integers", lambda self: sizes(self) | {"key_batch_bytes": 1 << 20})
    call = arguments.read_call(*draw(4, (2, 20, 1, 64), 20, 1, "bfloat16"))
    with jax_fa4.target("sm_90"), pytest.raises(Exception, match=r"forward-dtype_bfloat16.*PTX line \d+.*CTA.*warp 0"):
        jax.block_until_ready(jax.jit(lambda operands: emulated.forward(call.problem, operands))(call.operands))


def test_a_call_for_a_gpu_is_not_launched_on_the_cpu() -> None:
    """Addresses of the host must never reach a GPU's kernel."""
    call = arguments.read_call(*draw(5, (1, 20, 1, 64), 20, 1, "bfloat16"))
    with pytest.raises(Exception, match=r"traced for a GPU.*jax_fa4\.target\('cpu'\)"):
        jax.block_until_ready(
            jax.jit(lambda operands: hopper_forward.hopper_forward(call.problem, operands))(call.operands)
        )


def test_plan_with_work_tables_of_a_soft_cap() -> None:
    """The Hopper backward has other tiles where scores are capped: the plan is told, and a wrong one is refused."""
    query = jnp.asarray(np.random.default_rng(5).normal(size=(1, 65, 2, 64)), jnp.bfloat16)
    ids = jnp.asarray(np.repeat([[2, 0, -1]], [30, 30, 5], axis=1))
    described = {"heads": 2, "head_dim": 64, "implementation": "emulated"}

    def gradient(ids: object) -> jax.Array:
        def loss(query: jax.Array) -> jax.Array:
            return attend(query, query, query, segment_ids=ids, logits_soft_cap=2.0)[0].astype(jnp.float32).sum()

        return jax.grad(loss)(query)

    with jax_fa4.target("sm_90"):
        plan = jax_fa4.plan_segments(ids, **described, logits_soft_cap=2.0)
        assert plan.backward_items is not None
        np.testing.assert_array_equal(gradient(plan), gradient(ids))
        with pytest.raises(ValueError, match=r"tiles of 128 by 128, .* and logits_soft_cap, or leave `heads` out"):
            gradient(jax_fa4.plan_segments(ids, **described))
