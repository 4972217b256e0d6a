"""JAX's persistent compilation cache serves programs of jax_fa4 to other processes, single and over a mesh.

Over a mesh JAX has the address of a callback in its key, unless it is told to leave it out. Then two calls that differ
in nothing but what the callback computes must still be two entries.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import jax_fa4
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.random.normal(jax.random.key(0), (2, 8, 2, 4))

def loss(x, is_causal):
    return jnp.sum(jax_fa4.attention(x, x, x, is_causal=is_causal, implementation="blockwise") ** 2)

split = [NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec(None, "data"))]
for sharding in (*split, jax.devices()[0]):
    placed = jax.device_put(x, sharding)
    hits.clear()
    grads = [jax.jit(jax.grad(loss), static_argnums=1)(placed, is_causal) for is_causal in (False, True)]
    print(hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
    assert not jnp.allclose(*grads)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines.append(done.stdout.split("\n")[:3])
    assert lines == [["0 2"] * 3, ["2 0"] * 3]
