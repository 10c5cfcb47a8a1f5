"""The steps of a program while it is written: their code, the constants and texts that they read, the values they make.

It does not know the graph that they come from: see ``program_steps.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.torch_steps import DTYPES, NUMBER, REAL, TENSOR, TEXT, WHOLE, Operand

OPERATORS = (
    "linear", "experts", "attend", "cross", "recur", "norm", "gated", "rotate", "look_up", "rows", "kept", "size",
    "view", "transpose", "unsqueeze", "slice", "part", "contiguous", "add", "sub", "mul", "div", "clamp_min",
    "clamp_max", "whole", "torch",
)  # fmt: skip
"""In the order of Op in program.h."""
ARITHMETIC = ("aten::add", "aten::sub", "aten::mul", "aten::floor_divide")
"""Arithmetic of whole numbers, in the order of Arithmetic in program.h."""
VIEWS = {"kept", "view", "transpose", "unsqueeze", "slice", "part", "contiguous"}
"""Steps whose results may share the memory of their first operand."""
COUNTING = {"size", "whole"}
"""Steps that make a whole number."""
IDS, POSITIONS, KEEP = range(3)  # the first values


class StepList:
    """Steps, in the order in which they run.

    Attributes:
        code: the steps as numbers, for `sk_program`.
        count: number of values.
        constants: tensors that are the same in all passes, by number of the value.
        texts: texts that steps refer to.
        lasting: values in memory that other passes also read.
        shared: values that share their memory with another value.
    """

    def __init__(self) -> None:
        self.code: list[int] = []
        self.count = 3
        self.constants: dict[int, Tensor] = {}
        self.texts: list[str] = []
        self.lasting = {IDS, POSITIONS, KEEP}
        self.shared: set[int] = set()

    def value(self) -> int:
        """The number of a new value."""
        self.count += 1
        return self.count - 1

    def constant(self, tensor: Tensor) -> Operand:
        """A tensor that is the same in all passes.

        Raises:
            UnsupportedError: the kernels do not have its dtype.
        """
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(f"a tensor of {tensor.dtype}")
        value = self.value()
        self.constants[value] = tensor.detach()
        self.lasting.add(value)
        return Operand(TENSOR, value)

    def operand(self, known: Any) -> Operand:
        """The operand of a step: an operand, or a constant of all passes.

        Raises:
            UnsupportedError: it is neither a tensor nor a number.
        """
        if isinstance(known, Operand):
            return known
        if isinstance(known, Tensor):
            if known.dim():
                return self.constant(known)
            known = known.item()
        if isinstance(known, bool | int):
            return Operand(WHOLE, int(known))
        if isinstance(known, float):
            return Operand(REAL, int(struct.unpack("=q", struct.pack("=d", known))[0]))
        raise UnsupportedError(f"a step that reads {type(known).__name__}")

    def text(self, text: str) -> Operand:
        """A text, such as an operator's name."""
        if text not in self.texts:
            self.texts.append(text)
        return Operand(TEXT, self.texts.index(text))

    def emit(self, name: str, *given: tuple[int, int]) -> Operand:
        """Add a step of the kernels.

        Args:
            name: of ``OPERATORS``.
            given: its operands.

        Returns:
            Its result.
        """
        value = self.value()
        self.code += [OPERATORS.index(name), value, len(given), *(x for operand in given for x in operand)]
        if name in VIEWS:
            self.share(given[0][1], value)
        return Operand(NUMBER if name in COUNTING else TENSOR, value)

    def call(self, name: str, overload: str, returns: int, given: Sequence[Operand]) -> list[Operand]:
        """Add a call of an operator of torch; the tensors that it returns."""
        head = self.text(name), self.text(overload), Operand(WHOLE, returns)
        first = self.emit("torch", *head, *given).value
        self.count += returns - 1
        return [Operand(TENSOR, first + i) for i in range(returns)]

    def counted(self, kind: str, *given: Operand) -> Operand:
        """Add arithmetic of whole numbers, one of ``ARITHMETIC``."""
        return self.emit("whole", (WHOLE, ARITHMETIC.index(kind)), *given)

    def after(self, end: Operand, size: Operand) -> Operand:
        """The sum of two whole numbers, computed here where both are known."""
        if size.kind == WHOLE and end.kind == WHOLE:
            return Operand(WHOLE, end.value + size.value)
        return self.counted("aten::add", end, size)

    def share(self, value: int, view: int) -> None:
        """Note that two values may lie in the same memory."""
        self.shared |= {value, view}
        if value in self.lasting:
            self.lasting.add(view)
