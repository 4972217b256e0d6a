"""The feeds-and-speeds model against the published and recomputed tables, and its command line."""

import pytest

from jax_fa4 import cost
from jax_fa4.cost import ARCHITECTURES, SOFTMAX_LOOPS, ItemCost, backward_tile, forward_tile

B200, B300, H200 = ARCHITECTURES["sm_100"], ARCHITECTURES["sm_103"], ARCHITECTURES["sm_90"]


# From arXiv 2603.05451, sections 3.1.1 and 3.2.1; other head dimensions and pairs recomputed by hand.
@pytest.mark.parametrize(
    ("tile", "mma", "shared", "exp", "binding"),
    [
        (forward_tile(B200, 128, 128, 128, 128), 1024, 768, 1024, ("MMA", "EXP")),
        (forward_tile(B200, 256, 128, 128, 128), 2048, 1536, 2048, ("MMA", "EXP")),
        (forward_tile(B200, 256, 128, 128, 128, ctas=2), 2048, 1024, 2048, ("MMA", "EXP")),
        (forward_tile(B200, 256, 128, 64, 64), 1024, 768, 2048, ("EXP",)),
        (forward_tile(B200, 256, 128, 192, 128), 2560, 2048, 2048, ("MMA",)),
        (forward_tile(B300, 256, 128, 128, 128), 2048, 1536, 1024, ("MMA",)),
        (backward_tile(B200, 128, 128, 128, 128), 2560, 3328, 1024, ("SMEM",)),
        (backward_tile(B200, 128, 128, 128, 128, ctas=2), 2560, 2560, 1024, ("MMA", "SMEM")),
        (
            backward_tile(B200, 128, 128, 128, 128, ctas=2, exchange_counted_twice=True),
            2560,
            2688,
            1024,
            ("SMEM",),
        ),
        (backward_tile(B200, 128, 128, 64, 64), 1280, 1920, 1024, ("SMEM",)),
    ],
)
def test_published_tiles(tile, mma, shared, exp, binding):
    assert (tile.mma, tile.shared, tile.exp) == (mma, shared, exp)
    assert tile.binding == binding
    assert tile.clocks == max(mma, shared, exp)


@pytest.mark.parametrize(
    ("tile", "parts"),
    [
        (backward_tile(B200, 128, 128, 128, 128), {"operands": 2048, "dS": 256, "dQ": 1024}),
        (backward_tile(B200, 128, 128, 64, 64), {"operands": 1152, "dS": 256, "dQ": 512}),
        (
            backward_tile(B200, 128, 128, 128, 128, ctas=2),
            {"operands": 1536, "dS": 256, "dQ": 512, "exchange": 256},
        ),
        (
            backward_tile(B200, 128, 128, 128, 128, ctas=2, exchange_counted_twice=True),
            {"operands": 1536, "dS": 256, "dQ": 512, "exchange": 384},
        ),
    ],
)
def test_what_shared_memory_does_in_the_backward(tile, parts):
    assert tile.shared_parts == parts


def test_fills_come_on_top():
    assert forward_tile(B200, 256, 128, 128, 128).fill == 512
    assert forward_tile(B200, 256, 128, 128, 128, ctas=2).fill == 256
    assert backward_tile(B200, 128, 128, 128, 128).fill == 512
    one_cta, pair = forward_tile(B200, 256, 128, 128, 128), forward_tile(B200, 256, 128, 128, 128, ctas=2)
    assert (one_cta.shared + one_cta.fill, pair.shared + pair.fill) == (2048, 1280)


@pytest.mark.parametrize(
    ("label", "arch", "exp", "issue", "measured"),
    [
        ("d=128 causal, 16 of 128 emulated", "sm_100", 1808, 1216, None),
        ("d=128 dense 2-CTA, 24 emulated", "sm_100", 1680, 1271, 2860),
        ("d=128, none emulated", "sm_100", 2064, 918 + 186, None),
        ("d=128, none emulated", "sm_103", 1032, 955, None),
        ("d=64, 16 emulated", "sm_100", 1808, 1135, 2620),
    ],
)
def test_softmax_loops(label, arch, exp, issue, measured):
    (loop,) = (loop for loop in SOFTMAX_LOOPS if (loop.label, loop.arch.name) == (label, arch))
    assert (loop.exp_clocks, loop.issue_clocks) == (exp, issue)
    if measured is None:
        assert loop.measured_clocks is None
    else:
        assert round(loop.measured_clocks, -1) == measured


def test_clocks_and_bounds():
    assert B200.clock_ghz == pytest.approx(1.856, abs=1e-3)
    assert H200.clock_ghz == pytest.approx(1.83, abs=1e-3)
    assert forward_tile(B200, 256, 128, 128, 128).tflops == B200.peak_tflops
    assert forward_tile(B200, 256, 128, 64, 64).tflops == B200.peak_tflops / 2
    # 12.5% of the exponentials emulated lifts head_dim 64 to 57% of the peak.
    emulated = forward_tile(B200, 256, 128, 64, 64, emulated_fraction=0.125)
    assert emulated.tflops / B200.peak_tflops == pytest.approx(0.5714, abs=1e-4)
    # Hopper's forward at head_dim 128 is bound by its matrix unit: twice the clocks of Blackwell's.
    hopper = forward_tile(H200, 128, 128, 128, 128)
    assert (hopper.mma, hopper.exp, hopper.binding) == (2048, 1024, ("MMA",))


def test_flop_conventions():
    # d=128, T = S = 8192, 4 x 16 heads, causal: the forward of the published tables counts 4 T S d / 2 for each head.
    pairs = 4 * 16 * 8192 * 8192 / 2
    assert cost.forward_flops(pairs, 128, 128) == 4 * 8192 * 8192 * 128 * 4 * 16 / 2
    assert cost.backward_flops(pairs, 128, 128) == 2.5 * cost.forward_flops(pairs, 128, 128)
    assert cost.forward_flops(10, 192, 128) == 2 * 10 * 320


def test_masks_cost_instructions():
    assert forward_tile(B200, 256, 128, 128, 128).masked_clocks == 2048 + 2 * 174
    assert forward_tile(H200, 128, 128, 128, 128).masked_clocks == 2048 + 2 * 90
    assert backward_tile(B200, 128, 128, 128, 128).masked_clocks == 3328 + 2 * 36
    item = ItemCost.of(forward_tile(B200, 256, 128, 128, 128))
    assert (item.full, item.partial) == (2048, 2396)


@pytest.mark.parametrize("formula", [forward_tile, backward_tile])
@pytest.mark.parametrize(("arch", "ctas"), [(H200, 2), (B200, 3), (B200, 0)])
def test_impossible_pairs_are_refused(formula, arch, ctas):
    with pytest.raises(ValueError, match=f"ctas {ctas} is not possible on {arch.name}"):
        formula(arch, 128, 128, 128, 128, ctas=ctas)


def test_command_line(capsys):
    cost.main(["--arch", "sm_100", "--head-dims", "128", "192/128"])
    printed = capsys.readouterr().out
    assert "sm_100" in printed
    assert "sm_90" not in printed
    assert ["128", "bwd", "128x128", "1", "2560", "3328", "1024", "512", "SMEM", "1731", "77%"] in [
        line.split() for line in printed.splitlines()
    ]
    assert "192/128  fwd" in printed
    assert "2857" in printed


def test_command_line_fits_a_terminal(capsys):
    cost.main([])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ARCHITECTURES)
    assert max(map(len, printed.splitlines())) <= 80


def test_command_line_refuses_nonsense(capsys):
    with pytest.raises(SystemExit):
        cost.main(["--head-dims", "wide"])
    assert "'wide' is not a head dimension" in capsys.readouterr().err
