"""Programs that leave the process: what `jax.export` must be told, and how a loaded program finds its kernels.

A call names its kernel by content hash, and nothing of it depends on the process. A process that imports jax_fa4 has
the call's target registered; a kernel that no call of this process has traced is looked up by its hash among those of
the wheel when it is to be loaded.
"""

import contextlib

from jax.export import DisabledSafetyCheck

from jax_fa4.ffi import launch

__all__ = ["export_disabled_checks"]


def export_disabled_checks() -> list[DisabledSafetyCheck]:
    """What `jax.export.export` takes as `disabled_checks` for programs with kernels of jax_fa4.

    JAX refuses custom calls that it does not know to be stable. Ours are as stable as the kernels that the wheel
    carries: an exported program runs where the installed jax_fa4 has the kernels that it was traced with.

    Returns:
      One check for each custom call of jax_fa4.
    """
    return [DisabledSafetyCheck.custom_call(launch.TARGET)]


def register_targets() -> None:
    """Registers the custom call with XLA, where the compiled part of the package is there.

    A process that only loads programs traces nothing, so this happens on import.
    """
    with contextlib.suppress(ImportError):
        launch.native()
