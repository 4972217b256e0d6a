#!/usr/bin/env bash
# Everything that needs one GPU, in one command: builds the extension in place for this Python, runs the GPU tests as they
# are and with command buffers forced, and times the preprocess kernel. Extra arguments go to the benchmark.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export XLA_PYTHON_CLIENT_PREALLOCATE=false

cmake -S . -B build/dev -G Ninja -DFA4_BUILD_TESTS=OFF -DPython_EXECUTABLE="$(command -v "$python")" >/dev/null &&
  cmake --build build/dev --target _native || exit 1
failed=0
echo "== GPU tests"
"$python" -m pytest -q -m gpu --timeout=120 tests/kernels || failed=1
echo "== GPU tests with command buffers forced"
XLA_FLAGS="--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1" \
  "$python" -m pytest -q -m gpu --timeout=120 -rP -k "command_buffer or fresh or vmap or bfloat16" tests/kernels || failed=1
echo "== preprocess"
"$python" -m benchmarks.preprocess_gpu "$@" || failed=1
exit "$failed"
