"""The choice of an implementation: order, reasons, targets, and what `explain` says."""

import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import dispatch
from jax_fa4.reference import Reference

QUERY, KEY = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))


class Picky(Reference):
    """Refuses by name, or when it is run; else the reference."""

    def __init__(self, name, reason=None, error=None):
        self.name, self.reason, self.error, self.targets = name, reason, error, []

    def why_not(self, problem, target):
        self.targets.append(str(target))
        return self.reason

    def forward(self, problem, operands):
        self.targets.append(f"run on {dispatch.current_target()}")
        if self.error is not None:
            raise self.error
        return super().forward(problem, operands)


@pytest.fixture
def register(monkeypatch):
    """Makes an implementation known for one test."""

    def add(implementation):
        module = types.ModuleType(f"picky_{implementation.name}")
        setattr(module, implementation.name, implementation)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(dispatch.MODULES, implementation.name, module.__name__)
        dispatch.why_not.cache_clear()
        dispatch._explain.cache_clear()
        return implementation

    return add


def test_automatic_choice_goes_on_to_blockwise():
    assert jax_fa4.explain(QUERY, KEY, KEY).implementation == "blockwise"
    assert jax_fa4.explain(QUERY, KEY, KEY, implementation="reference").implementation == "reference"


def test_names_are_tried_in_order(register):
    register(Picky("first", reason="it is shy; pass implementation='reference'."))
    register(Picky("second", error=NotImplementedError("it gave up.")))
    third = register(Picky("third"))
    out = jax_fa4.attention(QUERY, KEY, KEY, implementation=["first", "second", "third", "reference"])
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    assert third.targets == ["cpu", "run on cpu"]


def test_the_combined_error_has_every_reason(register):
    register(Picky("first", reason="it is shy; pass implementation='reference'."))
    register(Picky("second", error=NotImplementedError("it gave up.")))
    with pytest.raises(NotImplementedError) as caught:
        jax_fa4.attention(QUERY, KEY, KEY, implementation=("first", "second", "fa4"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "No implementation takes this call:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["first", "second", "fa4"]
    assert "shy" in lines[1]
    assert "gave up" in lines[2]
    with pytest.raises(NotImplementedError, match=r"'first' does not take this call: it is shy.*reference"):
        jax_fa4.attention(QUERY, KEY, KEY, implementation="first")


@pytest.mark.parametrize("error", [ValueError("wrong"), TypeError("wrong"), RuntimeError("wrong")])
def test_other_errors_are_never_swallowed(register, error):
    register(Picky("broken", error=error))
    with pytest.raises(type(error), match="wrong"):
        jax_fa4.attention(QUERY, KEY, KEY, implementation=("broken", "reference"))


def test_reasons_are_asked_once(register):
    picky = register(Picky("once", reason="no."))
    for _ in range(3):
        jax_fa4.explain(QUERY, KEY, KEY, implementation=("once", "reference"), segment_ids=np.zeros((2, 8), int))
    assert picky.targets == ["cpu"]


def test_target_by_context_environment_and_device(monkeypatch):
    assert str(dispatch.current_target()) == "cpu"
    monkeypatch.setenv("JAX_FA4_TARGET", "sm_90a")
    assert str(dispatch.current_target()) == "cuda sm_90"
    with jax_fa4.target("sm_100") as chosen:
        assert chosen == jax_fa4.Target("cuda", "sm_100")
        assert dispatch.current_target() == chosen
        with jax_fa4.target("cpu"):
            assert str(dispatch.current_target()) == "cpu"
        assert dispatch.current_target() == chosen
    monkeypatch.setenv("JAX_FA4_TARGET", "hopper")
    with pytest.raises(ValueError, match=r"JAX_FA4_TARGET is 'hopper'.*sm_90"):
        jax_fa4.attention(QUERY, KEY, KEY)


@pytest.mark.parametrize("name", ["sm100", "SM_100", "gpu", "", 100, None, "sm_100x"])
def test_unknown_targets(name):
    with pytest.raises(ValueError, match=r"target is .*sm_100"), jax_fa4.target(name):
        pass


def test_target_is_left_on_errors_and_is_of_its_thread():
    with pytest.raises(RuntimeError, match="inside"), jax_fa4.target("sm_90"):
        raise RuntimeError("inside")
    assert str(dispatch.current_target()) == "cpu"
    seen = []
    with jax_fa4.target("sm_103"):
        thread = threading.Thread(target=lambda: seen.append(str(dispatch.current_target())))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_a_new_target_traces_anew(register):
    """The choice is a trace-time one, so the library's own cache must not carry it over."""
    picky = register(Picky("watching"))
    for name in ("sm_90", "sm_100", "sm_90"):
        with jax_fa4.target(name):
            jax_fa4.attention(QUERY, KEY, KEY, implementation="watching")
    assert [line for line in picky.targets if line.startswith("run")] == ["run on cuda sm_90", "run on cuda sm_100"]


def test_device_kinds():
    """What JAX's devices call themselves, and the targets that they make."""
    for platform, capability, target in (
        ("gpu", "9.0", "cuda sm_90"),
        ("gpu", "10.3", "cuda sm_103"),
        ("cuda", "12.0", "cuda sm_120"),
        ("gpu", "gfx942", "rocm"),
        ("tpu", None, "tpu"),
        ("cpu", None, "cpu"),
    ):
        device = types.SimpleNamespace(platform=platform, compute_capability=capability)
        assert str(dispatch._target_of(device)) == target
    with jax.default_device(jax.devices("cpu")[0]):
        assert str(dispatch.current_target()) == "cpu"


def test_explain_prints_within_a_terminal():
    options = {
        "segment_ids": (np.zeros((2, 8), int), jnp.zeros((2, 8), int)),
        "local_window_size": (3, None),
        "is_causal": True,
        "logits_soft_cap": 30.0,
        "sinks": jnp.zeros(4),
        "bias": np.zeros((1, 4, 8, 8)),
        "mask": np.ones((8, 8), bool),
        "query_seq_lengths": jnp.array([3, 8]),
        "key_value_seq_lengths": [1, 2],
        "scale": jnp.float32(1),
    }
    report = jax_fa4.explain(QUERY, KEY, KEY, **options)
    text = str(report)
    assert repr(report) == text
    assert max(map(len, text.splitlines())) <= 96
    for part in (
        "batch 2, 8 queries, 8 keys, 4 heads over 2 key heads of 16",
        "causal",
        "window (3, None)",
        "boolean mask",
        "bias",
        "query lengths (traced)",
        "key lengths (known when traced)",
        "soft cap 30.0",
        "sinks",
        "cpu",
        "not fa4",
        "blockwise",
    ):
        assert part in " ".join(text.split())
    assert [name for name, _ in report.passed_over] == ["fa4"]


def test_explain_refuses_an_unknown_option_by_name():
    with pytest.raises(TypeError, match=r"explain was given 'windows'\. The keyword arguments of jax_fa4.attention"):
        jax_fa4.explain(QUERY, KEY, KEY, windows=3)


def test_explain_computes_nothing_and_takes_shapes():
    huge = jax.ShapeDtypeStruct((1, 2**20, 64, 128), jnp.bfloat16)
    report = jax_fa4.explain(huge, huge, huge, is_causal=True, implementation=("fa4", "reference"))
    assert report.problem.query_length == 2**20
    assert report.implementation == "reference"
    assert jax_fa4.explain(huge, huge, huge, implementation="fa4").implementation is None
    traced = []
    jax.jit(lambda x: traced.append(jax_fa4.explain(x, KEY, KEY).implementation))(QUERY)
    assert traced == ["blockwise"]


def test_import_needs_no_gpu_and_no_compiler():
    """Importing registers the calls of kernels, and loads neither kernels nor any of the optional packages."""
    code = (
        "import sys, jax_fa4\n"
        "heavy = {'cutlass', 'flax', 'matplotlib', 'jax_fa4.blockwise', 'jax_fa4.schedule.plot'}\n"
        "heavy |= {'jax_fa4.kernels.attention', 'jax_fa4.kernels.hopper.forward', 'jax_fa4.ffi.hopper_forward'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
