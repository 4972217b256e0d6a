"""Derives the polynomials that stand for 2^f on [0, 1), and measures their errors.

    python docs/exp2_polynomials.py

The polynomial 1 + f (c1 + f (c2 + ...)) is exact at 0, where most exponentials of a softmax are, and has the smallest
largest relative error there can be (Remez 1934). Its coefficients are those of `jax_fa4/kernels/parts/coefficients.py`;
the table of errors is the one that FlashAttention-4's authors publish (arXiv 2603.05451, table of exp2 emulation).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

DEGREES = (3, 4, 5)
SAMPLES = 1 << 22


def relative_error(coefficients: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """p(f) / 2^f - 1 in float64."""
    power = np.zeros_like(fraction)
    for coefficient in coefficients[::-1]:
        power = (power + coefficient) * fraction
    return (power + 1.0) * np.exp2(-fraction) - 1.0


def minimax(degree: int) -> tuple[np.ndarray, float]:
    """The coefficients c1 .. c_degree and the largest relative error, by Remez's exchange in float64."""
    grid = np.linspace(0.0, 1.0, 1 << 16)[1:]
    points = 0.5 - 0.5 * np.cos(np.pi * (np.arange(degree + 1) + 0.75) / (degree + 1))
    error = 0.0
    for _ in range(50):
        powers = points[:, None] ** np.arange(1, degree + 1) * np.exp2(-points)[:, None]
        signs = (-1.0) ** np.arange(degree + 1)
        solution = np.linalg.solve(np.column_stack([powers, signs]), 1.0 - np.exp2(-points))
        errors = relative_error(solution[:-1], grid)
        # The new points: the greatest error of each run of one sign, the last degree + 1 of them.
        runs = np.split(np.arange(grid.size), np.flatnonzero(np.diff(np.sign(errors))) + 1)
        extremes = np.array([run[np.abs(errors[run]).argmax()] for run in runs])[-(degree + 1) :]
        points, error = grid[extremes], float(np.abs(errors).max())
        if error <= abs(solution[-1]) * (1 + 1e-9):
            break
    return solution[:-1], error


def evaluated(coefficients: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """The polynomial in float32 multiply-adds, as a kernel computes it."""
    wide = fraction.astype(np.float64)
    power = np.full_like(fraction, coefficients[-1])
    for coefficient in (*coefficients[-2::-1], np.float32(1.0)):
        power = (power.astype(np.float64) * wide + np.float64(coefficient)).astype(np.float32)
    return power


def errors(coefficients: np.ndarray) -> dict[str, float]:
    """Largest and mean relative error in float32, and the largest after rounding to bfloat16."""
    fraction = ((np.arange(SAMPLES) + 0.5) / SAMPLES).astype(np.float32)
    exact = np.exp2(fraction.astype(np.float64))
    power = evaluated(coefficients.astype(np.float32), fraction)
    relative = np.abs(power / exact - 1.0)
    rounded = np.abs(power.astype(ml_dtypes.bfloat16).astype(np.float64) / exact - 1.0)
    return {"max": float(relative.max()), "mean": float(relative.mean()), "bfloat16_max": float(rounded.max())}


def main() -> None:
    """Print coefficients and errors."""
    for degree in DEGREES:
        coefficients, error = minimax(degree)
        narrow = coefficients.astype(np.float32)
        print(f"degree {degree}: {', '.join(repr(float(one)) for one in narrow)}  (minimax error {error:.3e})")
        print("  " + ", ".join(f"{name} {value:.3e}" for name, value in errors(narrow).items()))


if __name__ == "__main__":
    main()
