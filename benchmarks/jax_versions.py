"""Which versions of JAX the package works with: a table, made by running a selection of the tests under each.

    python -m benchmarks.jax_versions                                   # the versions that docs/jax_versions.md has
    python -m benchmarks.jax_versions 0.8.0 0.11.2@python3.12           # others, with another Python

Each version gets a virtual environment of its own in a temporary folder, which is removed. Tests that need the compiled
part are skipped where it was not built for that Python. Prints a table in Markdown.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("0.8.0", "0.8.3", "0.9.2", "0.10.2", "0.11.2@python3.12", "newest@python3.12")
PACKAGES = ("numpy", "platformdirs", "flax", "optax", "pytest", "pytest-timeout", "hypothesis", "flatbuffers")
# Values and gradients, transformations, meshes by every way, a ring, Flax: what JAX's own changes have broken. Small
# enough for two minutes a version on an idle machine.
SELECTION = (
    "tests/test_attention.py",
    "tests/test_autodiff.py::test_vmap_of_gradients_is_per_example",
    "tests/test_autodiff.py::test_checkpoint_keeps_the_named_residuals",
    "tests/test_autodiff.py::test_other_derivatives_name_the_remedy",
    "tests/test_flax.py::test_every_parameter_of_both_libraries_has_a_name",
    "tests/test_flax.py::test_the_mask_arrives",
    "tests/test_flax.py::test_segments_stay_apart",
    "tests/test_partitioning.py::test_batch_and_heads_are_split_without_any_transfer",
    "tests/test_partitioning.py::test_explicit_axes_and_a_sharded_sequence",
    "tests/test_partitioning.py::test_shared_operands_under_shard_map_have_summed_gradients",
    "tests/test_ring.py::test_merging_is_exact_and_knows_empty_parts",
    "tests/test_ring.py::test_equals_one_device",
    "--deselect=tests/test_ring.py::test_equals_one_device[window-blockwise]",
    "--deselect=tests/test_ring.py::test_equals_one_device[causal_contiguous-blockwise]",
    "--deselect=tests/test_ring.py::test_equals_one_device[causal_zigzag-blockwise]",
)


def run(*command: str, limit_seconds: int = 1800) -> subprocess.CompletedProcess[str]:
    """A command's result, with its output."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_seconds)


def try_version(wanted: str, folder: Path) -> str:
    """One row of the table."""
    version, _, python = wanted.partition("@")
    made = run(python or sys.executable, "-m", "venv", str(folder))
    if made.returncode:
        return f"| {version} | {python} | no such Python | |"
    program = str(folder / "bin" / "python")
    requirement = "jax" if version == "newest" else f"jax=={version}"
    installed = run(program, "-m", "pip", "install", "--quiet", requirement, *PACKAGES)
    if installed.returncode:
        reason = installed.stderr.strip().splitlines()[-1][:100]
        return f"| {version} | {python} | not installed: {reason} | |"
    facts = run(
        program, "-c", "import jax, sys, flax; print(jax.__version__, sys.version.split()[0], flax.__version__)"
    )
    jax_version, python_version, flax_version = facts.stdout.split()
    started = time.perf_counter()
    tests = run(program, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *SELECTION)
    last = re.sub(r"^=+|=+$| in [\d.]+s.*", "", tests.stdout.strip().splitlines()[-1]).strip()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", tests.stdout, re.MULTILINE)
    print(*failed, *([] if not tests.returncode else [tests.stdout[-3000:]]), sep="\n", file=sys.stderr)
    seconds = time.perf_counter() - started
    return f"| {jax_version} | {python_version} | {flax_version} | {last} | {seconds:.0f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="version, or version@python; 'newest' is one")
    print("| JAX | Python | Flax | tests | seconds |\n|---|---|---|---|---|", flush=True)
    for number, version in enumerate(parser.parse_args().versions):
        with tempfile.TemporaryDirectory(prefix="jax_fa4_versions_") as folder:
            print(try_version(version, Path(folder) / str(number)), flush=True)


if __name__ == "__main__":
    main()
