"""The polynomials of the software exponential are the minimax ones, with the errors that FlashAttention-4 publishes."""

from __future__ import annotations

import numpy as np
import pytest

from docs import exp2_polynomials
from jax_fa4.kernels.parts.coefficients import EXP2_COEFFICIENTS

# arXiv 2603.05451: largest and mean relative error in float32, largest after rounding to bfloat16.
PUBLISHED = {3: (8.77e-5, 5.43e-5, 3.90e-3), 4: (3.05e-6, 1.84e-6, 3.9e-3), 5: (1.44e-7, 5.48e-8, 3.9e-3)}


@pytest.mark.parametrize("degree", exp2_polynomials.DEGREES)
def test_coefficients_are_those_of_the_script(degree: int) -> None:
    coefficients, error = exp2_polynomials.minimax(degree)
    np.testing.assert_array_equal(coefficients.astype(np.float32), np.float32(EXP2_COEFFICIENTS[degree]))
    # Equal heights of alternating sign, one more than there are coefficients: no polynomial does better.
    grid = np.linspace(0.0, 1.0, 1 << 16)[1:]
    errors = exp2_polynomials.relative_error(coefficients, grid)
    peaks = [run[np.abs(run).argmax()] for run in np.split(errors, np.flatnonzero(np.diff(np.sign(errors))) + 1)]
    np.testing.assert_allclose(np.abs(peaks[-(degree + 1) :]), error, rtol=1e-6)


@pytest.mark.parametrize("degree", exp2_polynomials.DEGREES)
def test_errors_are_the_published_ones(degree: int) -> None:
    found = exp2_polynomials.errors(np.float32(EXP2_COEFFICIENTS[degree]))
    largest, mean, rounded = PUBLISHED[degree]
    assert found["max"] <= largest * 1.01
    assert found["mean"] == pytest.approx(mean, rel=0.02)
    assert found["bfloat16_max"] == pytest.approx(rounded, rel=0.01)
