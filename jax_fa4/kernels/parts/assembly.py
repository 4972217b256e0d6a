"""One PTX instruction, or a few, as a function of values.

For what CuTe-DSL has no function, or one that hides what matters here: which lane issues, and with which operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

_LLVM: Any = llvm  # without stubs
_IR: Any = ir
_LETTERS = {"f32": "f", "i32": "r", "i64": "l"}  # constraint of an operand by its type


def assembly(text: str, outputs: Sequence[Any], *inputs: Any, has_effect: bool = True) -> Any:
    """The instruction's results.

    Args:
        text: PTX with operands $0, $1, ...: outputs first, then inputs.
        outputs: the results' types; one gives a value, several a tuple, none None.
        inputs: values of 32 or 64 bits.
        has_effect: whether it does more than compute its results. If not, it may be moved, merged and dropped.
    """
    values = [one.ir_value() if hasattr(one, "ir_value") else one for one in inputs]
    letters = [f"={_LETTERS[str(kind.mlir_type)]}" for kind in outputs] + [_LETTERS[str(one.type)] for one in values]
    options: dict[str, Any] = {"has_side_effects": has_effect, "asm_dialect": llvm.AsmDialect.AD_ATT}
    if not outputs:
        llvm.inline_asm(None, values, text, ",".join(letters), **options)
        return None
    if len(outputs) == 1:
        return outputs[0](llvm.inline_asm(outputs[0].mlir_type, values, text, ",".join(letters), **options))
    whole = _LLVM.StructType.get_literal([kind.mlir_type for kind in outputs])
    found = llvm.inline_asm(whole, values, text, ",".join(letters), **options)
    position = _IR.DenseI64ArrayAttr
    return tuple(
        kind(llvm.extractvalue(kind.mlir_type, found, position.get([place]))) for place, kind in enumerate(outputs)
    )
