"""From a `KernelPlan` to a `KernelBinary`: compiles with CuTe-DSL and records how the binary is launched.

    python -m jax_fa4.kernels.build            builds what has changed of the bundle and writes it into the package
    python -m jax_fa4.kernels.build --jobs 8   the same in 8 processes
    python -m jax_fa4.kernels.build --all      builds every plan of the bundle anew
    python -m jax_fa4.kernels.build --print    prints the plans

needs nvidia-cutlass-dsl and rich (extra `build`), no GPU and no CUDA toolkit. The kernel's parameters are read off its
PTX and compared with the plan, so that a disagreement is an error here and never a wrong launch.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jax_fa4.kernels.plan import PARAMETER_BYTES, KernelPlan

COMPILER = "nvidia-cutlass-dsl"


class BuildError(RuntimeError):
    """A plan could not be compiled, or the compiled kernel is not what the plan says."""


@dataclass(frozen=True)
class KernelBinary:
    """A compiled kernel: code, entry, and where each parameter of the plan lies in the parameter block.

    `layout` holds (offset, bytes) for each parameter; `source_digest` and `compiler` say what it was made of and by.
    """

    plan: KernelPlan
    entry: str
    cubin: bytes
    ptx: str
    layout: tuple[tuple[int, int], ...]
    source_digest: str
    compiler: str

    @functools.cached_property
    def content_hash(self) -> str:
        """Names the binary in compiled XLA programs: equal for equal code and equal launch."""
        digest = hashlib.sha256()
        for part in (self.plan.canonical(), self.entry, json.dumps(self.layout), self.ptx):
            digest.update(part.encode() + b"\0")
        digest.update(self.cubin)
        return digest.hexdigest()[:32]

    def facts(self) -> dict[str, object]:
        """All but the code, for the manifest."""
        return {
            "plan_digest": self.plan.digest,
            "source_digest": self.source_digest,
            "compiler": self.compiler,
            "entry": self.entry,
            "layout": [list(one) for one in self.layout],
            "content_hash": self.content_hash,
        }

    def to_bytes(self) -> bytes:
        """The binary as one file, the same bytes for the same binary."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in (
                ("binary.json", json.dumps(self.facts(), sort_keys=True, indent=1)),
                ("kernel.cubin", self.cubin),
                ("kernel.ptx", self.ptx),
            ):
                entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, data)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, plan: KernelPlan, data: bytes) -> KernelBinary:
        """Reads what `to_bytes` wrote; BuildError where it is damaged or belongs to another plan."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                facts = json.loads(archive.read("binary.json"))
                cubin, ptx = archive.read("kernel.cubin"), archive.read("kernel.ptx").decode()
            binary = cls(
                plan=plan,
                entry=facts["entry"],
                cubin=cubin,
                ptx=ptx,
                layout=tuple((int(offset), int(size)) for offset, size in facts["layout"]),
                source_digest=facts["source_digest"],
                compiler=facts["compiler"],
            )
        except (zipfile.BadZipFile, KeyError, ValueError, TypeError, NotImplementedError, EOFError, OSError) as error:
            raise BuildError(f"The stored binary of {plan.key} is damaged: {error}.") from error
        if binary.content_hash != facts["content_hash"]:
            raise BuildError(f"The stored binary of {plan.key} is damaged, or belongs to another plan.")
        return binary


def _is_module(name: str) -> bool:
    """Whether a dotted name is a module, not a name in one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the name's parent is a module and no package
        return False


def _device_modules(module: str, found: dict[str, bytes]) -> dict[str, bytes]:
    """The texts of a module of device code and of those of this package that it imports, by name."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise BuildError(f"The module {module}, which should hold device code, is not there.")
    text = Path(spec.origin).read_bytes()
    found[module] = text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        else:
            continue
        for name in imported:
            # plan.py is left out: what it decides is in the plan, whose digest is recorded beside this one.
            is_device_code = name.startswith("jax_fa4.kernels.") and name != "jax_fa4.kernels.plan"
            is_new = name not in found and not name.startswith("jax_fa4.kernels.plan.")
            if is_device_code and is_new and _is_module(name):
                _device_modules(name, found)
    return found


@functools.cache
def source_digest(plan: KernelPlan) -> str:
    """Hash of the texts of the modules that hold the plan's device code; none of them is imported."""
    digest = hashlib.sha256()
    for name, text in sorted(_device_modules(plan.source, {}).items()):
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:32]


def compiler_version() -> str | None:
    """Name and version of the installed compiler; None without one."""
    try:
        return f"{COMPILER} {importlib.metadata.version(COMPILER)}"
    except importlib.metadata.PackageNotFoundError:
        return None


_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[busf]\d+)"
    r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+[\w$]+(?:\[(?P<count>\d+)\])?"
)


def parse_entry(ptx: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The name of the one kernel in a PTX text, and (offset, bytes) of each of its parameters. BuildError otherwise."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise BuildError(f"The PTX holds {len(entries)} kernels; a plan compiles to one.")
    entry, text = entries[0]
    layout: list[tuple[int, int]] = []
    end = 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAMETER.fullmatch(declaration)
        if match is None:
            raise BuildError(f"The PTX of {entry} declares a parameter that cannot be read: {declaration!r}.")
        element_bytes = int(match["type"][1:]) // 8
        size = element_bytes * int(match["count"] or 1)
        alignment = int(match["align"] or element_bytes)
        offset = -(-end // alignment) * alignment
        layout.append((offset, size))
        end = offset + size
    return entry, tuple(layout)


def check_layout(plan: KernelPlan, layout: Sequence[tuple[int, int]]) -> None:
    """Compares the parameters of the compiled kernel with the plan's. Raises BuildError."""
    expected = [PARAMETER_BYTES[parameter.kind] for parameter in plan.parameters]
    found = [size for _, size in layout]
    if expected != found:
        names = ", ".join(f"{one.name} {size}" for one, size in zip(plan.parameters, expected, strict=True))
        raise BuildError(f"{plan.key}: the kernel takes parameters of {found} bytes; the plan says {names}.")


def build(plan: KernelPlan) -> KernelBinary:
    """Compiles one plan, in about a second for small kernels. Raises BuildError, also where the compiler is missing."""
    compiler = compiler_version()
    if compiler is None:
        raise BuildError(f"{plan.key} cannot be built: {COMPILER} is not installed (pip install 'jax_fa4[build]').")
    import cutlass.cute as cute

    function, arguments = importlib.import_module(plan.source).trace(plan)
    with tempfile.TemporaryDirectory(prefix="jax_fa4-build-") as folder:
        options = f"--gpu-arch {plan.architecture} --keep-ptx --keep-cubin --dump-dir {folder}"
        try:
            compiled = cute.compile(function, *arguments, options=options)
        except Exception as error:  # the compiler has no common class of errors
            raise BuildError(f"{plan.key} cannot be compiled: {error}") from error
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if target is None or target[1] != plan.architecture:
        raise BuildError(f"{plan.key}: the compiler made code for {target and target[1]}, not {plan.architecture}.")
    entry, layout = parse_entry(ptx)
    check_layout(plan, layout)
    return KernelBinary(plan, entry, bytes(cubin), ptx, layout, source_digest(plan), compiler)


def build_each(plans: Sequence[KernelPlan], jobs: int = 1) -> Iterator[KernelBinary]:
    """Compiles plans in as many processes, in the order of the plans; raises what `build` raises."""
    if jobs == 1 or len(plans) < 2:
        yield from map(build, plans)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(build, plans)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of this module's text."""
    from rich.progress import track

    from jax_fa4.kernels import bundle
    from jax_fa4.kernels.plans import bundled_plans

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the plans instead of building them")
    parser.add_argument("--all", action="store_true", help="build also what is stored and up to date")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes build")
    options = parser.parse_args(arguments)
    plans = list(bundled_plans())
    if options.print:
        print("\n".join(plan.describe() for plan in plans))
        return
    found = {} if options.all else {plan: one for plan in plans if (one := bundle.stored(plan)) is not None}
    missing = [plan for plan in plans if plan not in found]
    made = track(build_each(missing, options.jobs), "Building", len(missing))
    binaries_of = found | dict(zip(missing, made, strict=True))
    binaries = [binaries_of[plan] for plan in plans]
    bundle.write(binaries)
    total = sum(len(binary.to_bytes()) for binary in binaries)
    print(f"{len(binaries)} kernels, {total} bytes, in {bundle.BUNDLE_FOLDER}")


if __name__ == "__main__":
    from jax_fa4.kernels import build as module  # other processes know the classes by this name

    module.main()
