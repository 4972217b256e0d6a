"""Building: the PTX against the plan, the bundle against plans and sources, the cache and the remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jax_fa4.kernels import build, bundle, plans
from jax_fa4.kernels.hopper.backward_plans import backward_plan
from jax_fa4.kernels.plan import KernelPlan, Parameter
from jax_fa4.kernels.plans import bundled_plans, preprocess_plan

needs_compiler = pytest.mark.skipif(build.compiler_version() is None, reason="needs nvidia-cutlass-dsl")
UNBUNDLED = preprocess_plan("sm_90a", "bfloat16", 72, 0)

PTX = """
.version 8.8
.visible .entry kernel_name(
	.param .u64 .ptr .global .align 16 kernel_name_param_0,
	.param .u32 kernel_name_param_1,
	.param .align 64 .b8 kernel_name_param_2[128],
	.param .align 4 .b8 kernel_name_param_3[12],
	.param .f32 kernel_name_param_4
)
.reqntid 128, 1, 1
{ ret; }
"""


def test_layout_of_ptx() -> None:
    assert build.parse_entry(PTX) == ("kernel_name", ((0, 8), (8, 4), (64, 128), (192, 12), (204, 4)))


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (".version 8.8", "holds 0 kernels"),
        (PTX + PTX, "holds 2 kernels"),
        (PTX.replace(".u32 kernel", ".wide kernel"), "cannot be read"),
    ],
)
def test_unreadable_ptx(ptx: str, message: str) -> None:
    with pytest.raises(build.BuildError, match=message):
        build.parse_entry(ptx)


def test_bundle_is_of_these_plans_and_sources() -> None:
    plans = {plan.key: plan for plan in bundled_plans()}
    manifest = bundle.manifest()
    remedy = "run: python -m jax_fa4.kernels.build"
    assert set(plans) == set(manifest), remedy
    for key, plan in plans.items():
        assert manifest[key]["plan_digest"] == plan.digest, f"{key}: {remedy}"
        assert manifest[key]["source_digest"] == build.source_digest(plan), f"{key}: {remedy}"
        binary = build.KernelBinary.from_bytes(plan, (bundle.BUNDLE_FOLDER / f"{key}.kernel").read_bytes())
        assert binary.facts() == manifest[key], f"{key}: {remedy}"
        assert binary.cubin.startswith(b"\x7fELF")
        assert build.parse_entry(binary.ptx) == (binary.entry, binary.layout)


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100f"])
def test_building_again_gives_the_bundle(architecture: str) -> None:
    plan = preprocess_plan(architecture, "bfloat16", 128, 128)
    built, stored = build.build(plan), bundle.stored(plan)
    assert stored is not None
    if built.compiler != stored.compiler:
        pytest.skip(f"the bundle was made by {stored.compiler}, here is {built.compiler}")
    assert built == stored


@needs_compiler
def test_parameters_that_disagree_are_a_build_error() -> None:
    plan = preprocess_plan("sm_90a", "bfloat16", 64, 64)
    wrong = dataclasses.replace(plan, parameters=(*plan.parameters[:-1], Parameter("int64", "padded_length")))
    with pytest.raises(build.BuildError, match=r"the plan says .*padded_length 8"):
        build.build(wrong)


@needs_compiler
def test_several_processes_build_the_same() -> None:
    two = [UNBUNDLED, preprocess_plan("sm_100f", "bfloat16", 64, 64)]
    assert list(build.build_each(two, jobs=2)) == list(build.build_each(two))


@needs_compiler
def test_only_what_is_stale_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundle, "BUNDLE_FOLDER", tmp_path)
    monkeypatch.setattr(bundle, "cache_folder", lambda: tmp_path / "cache")
    kept = preprocess_plan("sm_90a", "bfloat16", 64, 64)
    monkeypatch.setattr(plans, "bundled_plans", lambda: iter([UNBUNDLED, kept]))
    bundle.write([build.build(kept)])
    built: list[KernelPlan] = []
    original = build.build
    monkeypatch.setattr(build, "build", lambda plan: built.append(plan) or original(plan))
    build.main([])
    assert built == [UNBUNDLED]
    assert {bundle.stored(plan).plan for plan in (UNBUNDLED, kept)} == {UNBUNDLED, kept}
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{UNBUNDLED.key}.kernel",
        f"{kept.key}.kernel",
        "manifest.json",
    }


@needs_compiler
def test_built_once_then_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundle, "cache_folder", lambda: tmp_path)
    bundle.find.cache_clear()
    built = bundle.find(UNBUNDLED)
    (file,) = tmp_path.iterdir()
    bundle.find.cache_clear()
    monkeypatch.setattr(build, "build", lambda plan: pytest.fail("built again"))
    assert bundle.find(UNBUNDLED) == built
    file.write_bytes(file.read_bytes()[:-30])
    assert bundle.stored(UNBUNDLED) is None, "a damaged file must count as none"
    file.unlink()
    bundle.find.cache_clear()


def test_file_systems_take_the_names_of_cached_kernels() -> None:
    """255 bytes, eight of which a file has in addition while it is written."""
    plan = backward_plan("bfloat16", 128, "intervals", ordered=True, split=True)
    others = (backward_plan("bfloat16", 128, "intervals", split=True), backward_plan("float16", 128, "intervals"))
    names = {bundle._cache_file(one).name for one in (plan, *others)}
    assert len(names) == 3
    assert max(map(len, names)) <= 247 < len(plan.key) + 34 + len(".kernel")


def test_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundle, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(bundle, "compiler_version", lambda: None)
    assert bundle.why_unavailable(preprocess_plan("sm_90a", "bfloat16", 64, 64)) is None
    with pytest.raises(bundle.KernelUnavailableError, match=r"value_dim_72.*pip install 'jax_fa4\[build\]'"):
        bundle.find(UNBUNDLED)
