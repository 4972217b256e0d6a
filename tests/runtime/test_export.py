"""Programs that leave the process: exported for a GPU on a machine without one, loaded by one that traces nothing."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_fa4
from jax_fa4 import dispatch
from jax_fa4.ffi import launch
from jax_fa4.kernels import bundle

from .conftest import ROOT, Stub

LOADER = """
import sys
from pathlib import Path
from jax import export
import jax_fa4
exported = export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
assert exported.platforms == ("cuda",), exported.platforms
from jax_fa4.ffi import launch
native = launch.native()
driver = launch.emulated_driver((9, 0))
for content_hash in sys.argv[2:]:
    assert not native.is_registered(content_hash)
    print(native.load(driver, content_hash, 0))
"""


def launch_is_built() -> bool:
    """Whether the compiled part of the package is there."""
    try:
        launch.native()
    except ImportError:
        return False
    return True


def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    out = jax_fa4.attention(query, key, value, is_causal=True, implementation="fa4")
    return jnp.sum(out.astype(jnp.float32) ** 2)


def exported(function: object) -> export.Exported:
    shape = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    with jax_fa4.target("sm_90"):
        reason = dispatch.why_not(
            "fa4",
            jax_fa4.explain(shape, shape, shape, is_causal=True, implementation="fa4").problem,
            dispatch.current_target(),
        )
        if reason is not None and not launch_is_built():
            pytest.skip(reason)
        assert reason is None, reason
        return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=jax_fa4.export_disabled_checks())(
            shape, shape, shape
        )


@pytest.mark.parametrize("function", [loss, jax.grad(loss, (0, 1, 2))], ids=["forward", "gradient"])
def test_exported_for_a_gpu_that_is_not_here_and_loaded_elsewhere(function, tmp_path: Path) -> None:
    """The other process imports jax_fa4 and traces nothing; each kernel is found by its hash in the wheel, and loaded
    into an emulated GPU."""
    pytest.importorskip("jax_fa4.emulator").driver()
    program = exported(function)
    hashes = sorted(set(re.findall(r'kernel = "(\w+)"', program.mlir_module())))
    assert hashes
    carried = {facts["content_hash"] for facts in bundle.manifest().values()}
    assert len(hashes) == (1 if function is loss else 4)  # the backward's, and those before and after it
    assert carried >= set(hashes)
    file = tmp_path / "program"
    file.write_bytes(program.serialize(vjp_order=0))
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(file), *hashes],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("device 0") == len(hashes)


def ring_gradient(mesh: Mesh, implementation: str) -> object:
    """The gradient of a causal ring over a mesh."""
    spec = PartitionSpec(None, "sequence")
    local = functools.partial(
        jax_fa4.ring_attention, axis_name="sequence", layout="zigzag", is_causal=True, implementation=implementation
    )
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(jax.grad(lambda *x: jnp.sum(mapped(*x).astype(jnp.float32) ** 2), (0, 1, 2)))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs the CPU devices of conftest.py")
def test_a_ring_over_two_devices_is_exported() -> None:
    """By `jax.shard_map`: for GPUs that are not here, with kernels of the wheel; and for CPU devices, which run it."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("sequence",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    shape = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16, sharding=sharding)
    checks = jax_fa4.export_disabled_checks()
    if launch_is_built():
        with jax_fa4.target("sm_90"):
            program = export.export(ring_gradient(mesh, "fa4"), platforms=["cuda"], disabled_checks=checks)(
                *[shape] * 3
            )
        loaded = export.deserialize(program.serialize())
        assert loaded.nr_devices == 2
        hashes = set(re.findall(r'kernel = "(\w+)"', loaded.mlir_module()))
        assert hashes
        assert hashes <= {facts["content_hash"] for facts in bundle.manifest().values()}
    run = ring_gradient(mesh, "blockwise")
    arguments = [
        jax.device_put(jax.random.normal(jax.random.key(seed), shape.shape, shape.dtype), sharding) for seed in range(3)
    ]
    loaded = export.deserialize(export.export(run, disabled_checks=checks)(*[shape] * 3).serialize())
    jax.tree.map(np.testing.assert_array_equal, loaded.call(*arguments), run(*arguments))


def test_without_our_checks_jax_refuses() -> None:
    """So that the helper is there for a reason."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    call = jax.ffi.ffi_call(launch.TARGET, shape)

    def run(x: jax.Array) -> jax.Array:
        return call(x, driver="cuda", kernel="0")

    with pytest.raises(ValueError, match=launch.TARGET):
        export.export(jax.jit(run), platforms=["cuda"])(shape)
    export.export(jax.jit(run), platforms=["cuda"], disabled_checks=jax_fa4.export_disabled_checks())(shape)


def test_a_kernel_that_the_wheel_lacks_names_the_remedy(stub: Stub) -> None:
    assert not launch.register_stored("feedbeef")
    with pytest.raises(Exception, match=r"content hash 'feedbeef'.*carries none.*install it, or trace"):
        launch.native().load("stub", "feedbeef", 0)
