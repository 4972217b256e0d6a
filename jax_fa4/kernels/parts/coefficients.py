"""Polynomials that stand for 2^f on [0, 1): 1 + f (c1 + f (c2 + ...)), with c1, c2, ... by degree.

Minimax in the relative error, rounded to float32; `docs/exp2_polynomials.py` derives them and measures the errors, and
a test compares. Largest relative error in float32: 8.6e-5, 3.0e-6 and 1.4e-7; after rounding to bfloat16 3.9e-3, as of
the special-function unit.
"""

EXP2_COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (0.6951167583465576, 0.22764499485492706, 0.07706703990697861),
    4: (0.6930448412895203, 0.241280198097229, 0.052242472767829895, 0.013426683843135834),
    5: (
        0.6931512951850891,
        0.24016444385051727,
        0.05579991266131401,
        0.009017030708491802,
        0.0018671300495043397,
    ),
}
