"""Where the binary of a plan is found: in the wheel, in the user's cache, built now, or refused with the remedy.

The wheel's binaries lie in `bundle/`, one file each, beside `manifest.json`, which says of what they were made; the
cache holds the same files under the platform's cache folder, named by what they were made of, so that an old one is
never taken for a new one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from jax_fa4.kernels import build as build_module
from jax_fa4.kernels import plans
from jax_fa4.kernels.build import COMPILER, BuildError, KernelBinary, compiler_version, source_digest
from jax_fa4.kernels.plan import KernelPlan

BUNDLE_FOLDER = Path(__file__).parent / "bundle"
MANIFEST = "manifest.json"


class KernelUnavailableError(RuntimeError):
    """No binary of a kernel is at hand, and none can be built here."""


def cache_folder() -> Path:
    """The user's cache of built kernels; it may be deleted at any time."""
    return Path(platformdirs.user_cache_dir("jax_fa4")) / "kernels"


def _cache_file(plan: KernelPlan) -> Path:
    # The digests name the plan; the key, of which file systems that allow 255 bytes may not take all, is for people.
    return cache_folder() / f"{plan.key[:160]}-{plan.digest[:16]}-{source_digest(plan)[:16]}.kernel"


def _read(path: Path, plan: KernelPlan) -> KernelBinary | None:
    """The binary in a file, if it is whole and was made of this plan and of the source as it is now."""
    try:
        binary = KernelBinary.from_bytes(plan, path.read_bytes())
    except (OSError, BuildError):
        return None
    return binary if binary.source_digest == source_digest(plan) else None


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that no reader ever sees part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)  # temporary files are private; the wheel's are for everyone
    os.replace(file.name, path)


def stored(plan: KernelPlan) -> KernelBinary | None:
    """The binary of the wheel, else that of the cache, else None."""
    return _read(BUNDLE_FOLDER / f"{plan.key}.kernel", plan) or _read(_cache_file(plan), plan)


@functools.lru_cache(maxsize=256)
def find(plan: KernelPlan) -> KernelBinary:
    """The binary of a plan; built and kept in the cache where it is not stored. Raises KernelUnavailableError."""
    binary = stored(plan)
    if binary is not None:
        return binary
    if (reason := why_unavailable(plan)) is not None:
        raise KernelUnavailableError(reason)
    binary = build_module.build(plan)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not the result
        _write_whole(_cache_file(plan), binary.to_bytes())
    return binary


def find_by_hash(content_hash: str) -> KernelBinary | None:
    """The wheel's binary with this content, for a program that another process traced; None where it has none."""
    for plan in plans.bundled_plans():
        known = manifest().get(plan.key)
        if known is not None and known["content_hash"] == content_hash:
            binary = stored(plan)
            return binary if binary is not None and binary.content_hash == content_hash else None
    return None


def why_unavailable(plan: KernelPlan) -> str | None:
    """None where `find` would give a binary; else one sentence of why not and one of the remedy. Builds nothing."""
    if compiler_version() is not None or stored(plan) is not None:
        return None
    return (
        f"The kernel {plan.key} is neither in the wheel nor in the cache {cache_folder()}, and {COMPILER}, which could "
        "build it, is not installed. Install it with: pip install 'jax_fa4[build]'."
    )


@functools.cache
def manifest() -> dict[str, dict[str, object]]:
    """What the wheel's binaries were made of, by plan key."""
    kernels: dict[str, dict[str, object]] = json.loads((BUNDLE_FOLDER / MANIFEST).read_text())["kernels"]
    return kernels


def write(binaries: Sequence[KernelBinary]) -> None:
    """Replaces the bundle by these binaries."""
    BUNDLE_FOLDER.mkdir(exist_ok=True)
    for old in BUNDLE_FOLDER.glob("*.kernel"):
        old.unlink()
    for binary in binaries:
        _write_whole(BUNDLE_FOLDER / f"{binary.plan.key}.kernel", binary.to_bytes())
    kernels = {binary.plan.key: binary.facts() for binary in binaries}
    text = json.dumps({"format": 1, "kernels": kernels}, indent=1, sort_keys=True)
    _write_whole(BUNDLE_FOLDER / MANIFEST, (text + "\n").encode())
