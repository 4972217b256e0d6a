#!/usr/bin/env bash
# Everything that needs one GPU, in one command, the most telling first; each step has a time limit and a log of its own.
#
#   benchmarks/gpu_check.sh                       every step
#   benchmarks/gpu_check.sh tests packed          those alone
#
# Logs, figures and pictures go to the folder FIGURES, out/gpu by default. Other libraries are measured where they are
# installed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${FIGURES:-out/gpu}
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
mkdir -p "$out"
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests packed attention decode tiles sanitizers command_buffers orders preprocess)
failed=()

# step NAME SECONDS COMMAND...: runs a step that was asked for, and tells how it ended
step() {
  local name=$1 limit=$2 code=0 start=$SECONDS
  shift 2
  [[ " ${steps[*]} " == *" $name "* ]] || return 0
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
  grep -v '^\s*$' "$out/$name.log" | tail -n 30
  echo "== $name: exit code $code after $((SECONDS - start)) s"
  [ "$code" = 0 ] || failed+=("$name")
}

cmake -S . -B build/gpu -G Ninja -DFA4_BUILD_TESTS=OFF -DPython_EXECUTABLE="$(command -v "$python")" >"$out/build.log" 2>&1 &&
  cmake --build build/gpu --target _native >>"$out/build.log" 2>&1 || { tail -n 20 "$out/build.log"; exit 1; }

forced="--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
step tests 400 "$python" -m pytest -q -m "gpu and not slow" --timeout=120 tests/kernels tests/emulator/test_silicon_gpu.py
step packed 200 "$python" -m benchmarks.packed --kinds=training --lengths=600,4000 --out="$out/packed.json"
step attention 300 "$python" -m benchmarks.attention --kinds=dense --out="$out/attention.json" --plot="$out/attention.png"
step decode 120 "$python" -m benchmarks.packed --kinds=decode,planning --out="$out/decode.json"
step tiles 300 "$python" -m benchmarks.hopper_tiles --out="$out/tiles.json"
step sanitizers 600 "$python" -m pytest -q -m gpu tests/kernels/test_sanitizers_gpu.py
step command_buffers 200 env XLA_FLAGS="$forced" \
  "$python" -m pytest -q -m gpu --timeout=120 -rP -k "command_buffer or fresh or vmap or bfloat16" tests/kernels
step orders 200 "$python" -m benchmarks.orders --out="$out/orders.json"
step preprocess 60 "$python" -m benchmarks.preprocess_gpu
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
