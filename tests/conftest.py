"""Settings of the whole suite: eight CPU devices for the mesh tests, and a compiler that is quick on small programs.

LLVM's optimiser is left out because these tests compile thousands of tiny programs; `make test-full` runs them with
it, and so do the benchmarks and the demo. Set XLA_FLAGS=--xla_backend_optimization_level=3 to do the same by hand.
"""

import os

flags = os.environ.get("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in flags:
    flags += " --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = flags + " --xla_force_host_platform_device_count=8"
