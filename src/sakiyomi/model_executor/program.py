"""A pass as a list of steps that the compiled kernels run by themselves.

`kernels/program.h` runs it with the operators that torch would call, so that its logits are equal to the last bit.
Values that depend on positions alone, such as the angles of rotary embeddings, are computed once for all positions and
then looked up. Operators that the kernels do not have are torch's, called by name (``torch_steps.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.build import loaded
from sakiyomi.kernels.native import numbers
from sakiyomi.model_executor.attention.registry import PassResult
from sakiyomi.model_executor.program_steps import Builder
from sakiyomi.model_executor.torch_steps import DTYPES

TABLE_ROWS = 2048  # positions that are computed at first


class Program:
    """Runs passes of a model: see ``PassForward``.

    Args:
        graph: TorchScript from token ids, positions, perhaps the rows to keep, and ``given`` to the outputs of a pass.
        given: tensors that are the same in all passes.
        rows: width and dtype of a row of each output: logits first, then what the head reads, then outputs of layers.
        chosen: numbers of the outputs that a pass gives; None: all.

    Attributes:
        number: of the program in the kernels.
        calls: names of the operators of torch that it calls.
        rows: of these outputs, see above.

    Raises:
        UnsupportedError: there are no kernels, or one of its operators cannot be called.
    """

    def __init__(
        self,
        graph: Any,
        given: Sequence[Tensor],
        rows: Sequence[tuple[int, torch.dtype]],
        chosen: Sequence[int] | None = None,
    ) -> None:
        self.number = 0
        if loaded() is None:
            raise UnsupportedError("there are no kernels")
        self._kernels = cast(Any, loaded())
        graph = graph.copy()
        torch._C._jit_pass_inline(graph)
        torch._C._jit_pass_dce(graph)
        builder = Builder(graph, given)
        steps = builder.steps
        outputs = builder.outputs if chosen is None else [builder.outputs[number] for number in chosen]
        self.calls = tuple(text for text in steps.texts if "::" in text)
        self._held, self._functions = steps.constants, builder.functions
        self._tables, self._table_rows = builder.tables, 0
        self.rows = tuple(rows if chosen is None else [rows[number] for number in chosen])
        code = numbers(steps.code)
        tables = numbers([number for number, _ in self._tables])
        places = zip(outputs, self.rows, strict=True)
        about = [x for made, (width, dtype) in places for x in (made.value, width, DTYPES[dtype])]
        sizes = steps.count, len(code), code, len(outputs), numbers(about), len(tables), tables
        texts = [text.encode() for text in steps.texts]
        self.number = int(self._kernels.sk_program(*sizes, len(texts), (ctypes.c_char_p * len(texts))(*texts)))
        for number, tensor in self._held.items():
            self._set(number, tensor)
        self._extend(1)

    def __del__(self) -> None:
        if self.number:
            self._kernels.sk_free_program(self.number)

    def reach(self, positions: int) -> None:
        """Make tables for at least so many positions, if they are not there."""
        if positions > self._table_rows:
            self._extend(positions)

    def gives(self, vocab: int, dtype: torch.dtype) -> bool:
        """Whether its logits have this width and dtype."""
        return self.rows[0] == (vocab, dtype)

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor | None = None) -> PassResult:
        """Run the pass that was begun.

        Args:
            ids, positions: (1, N) of its rows.
            keep: (K,) numbers of the rows whose logits are wanted, and what the head reads; None: all.

        Raises:
            RuntimeError: it cannot be run.
        """
        count = ids.shape[1] if keep is None else len(keep)
        made = [
            torch.empty(1, count if place < 2 else ids.shape[1], width, dtype=dtype)
            for place, (width, dtype) in enumerate(self.rows)
        ]
        places = (ctypes.c_void_p * len(made))(*[tensor.data_ptr() for tensor in made])
        why = ctypes.c_char_p()
        kept = (-1, None) if keep is None else (count, keep.data_ptr())
        given = ids.shape[1], ids.data_ptr(), positions.data_ptr(), *kept, places, ctypes.byref(why)
        code = self._kernels.sk_run(self.number, *given)
        if code == 1:
            self._extend(int(positions.max()) + 1)
            code = self._kernels.sk_run(self.number, *given)
        if code:
            raise RuntimeError(f"a program does not run: {(why.value or b'a position below 0').decode()}")
        return made[0], tuple(made[1:])

    def _set(self, number: int, tensor: Tensor) -> None:
        self._held[number] = tensor
        about = DTYPES[tensor.dtype], tensor.dim(), numbers(tensor.shape), numbers(tensor.stride())
        self._kernels.sk_constant(self.number, number, tensor.data_ptr(), *about)

    def _extend(self, positions: int) -> None:
        """Make tables for at least so many positions."""
        wanted = max(positions, 2 * self._table_rows, TABLE_ROWS)
        while positions > self._table_rows:
            try:
                for number, table in self._tables:
                    self._set(number, table(wanted).contiguous())
                self._table_rows = wanted
            except IndexError:  # learned embeddings of positions have an end
                if wanted == positions:
                    raise
                wanted = (wanted + positions) // 2
