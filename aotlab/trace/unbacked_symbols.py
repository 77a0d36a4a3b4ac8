"""Unbacked symbols: sizes and numbers that depend on the values of tensors.

    rows = x[x > 0]           # rows.shape == (u0,)
    k = n.item()              # k is u1
    torch._check(k < 10)

The op that makes such a number *binds* its symbol. In the graph, an op after `index` reads the size from its result,
and `_local_scalar_dense` (`item`) returns the number itself. Later ops, the epilogue and the backward use these nodes.
The forward returns their values. A condition of `torch._check` becomes an assertion in the graph.

The first trace of a function has no unbacked symbols. If it meets an op that needs values, the pipeline traces the
function again. If that trace does not succeed either, because Python needs the number (for example in a branch), the
call runs eagerly.
"""

from __future__ import annotations

from typing import Any

import torch

from aotlab import _torch as internals
from aotlab.guards.user_code import user_code_position
from aotlab.trace.tape import Operation, Tape, Untraceable, numbers_in, tensors_in


class UnbackedSymbols:
    """Binds the unbacked symbols of a trace on its ``tape``. ``sizes`` are the symbolic sizes of the trace."""

    def __init__(self, tape: Tape, sizes: internals.Sizes) -> None:
        self._tape = tape
        self._sizes = sizes

    def depend_on_values(self, result: Any, arguments: Any) -> bool:
        """Tell whether sizes of a result depend on values: the arguments do not have the symbols of these sizes."""
        return not _symbols_of_tensors(result) <= _symbols_of_tensors(arguments)

    def bind(self, operation: Operation) -> None:
        """Bind the unbacked symbols in the result of an op that was just appended.

        If the result is a number, the op itself binds the symbol. Otherwise the symbol is a size of the result, and an
        op that reads this size is appended.
        """
        operation.binds = self._sizes.new_symbols(operation.result)
        for symbol in operation.binds:
            if isinstance(operation.result, torch.SymInt | torch.SymFloat):
                self._tape.bind(operation, symbol)
                continue
            tensors = tensors_in(operation.result)
            sizes = [(tensor, dim, size) for tensor in tensors for dim, size in enumerate(tensor.shape)]
            # A symbol that is no size may be a storage offset (of `x[i.item()]`, for example). No op reads it.
            for tensor, dim, size in [each for each in sizes if internals.expression_of(each[2]) == symbol][:1]:
                reads = self._append(torch.ops.aten.sym_size.int, (tensor, dim), size, operation)
                self._tape.bind(reads, symbol)
        numbers = numbers_in((operation.args, operation.kwargs))
        if not {s for each in numbers for s in internals.unbacked_in(each)} <= self._tape.bound.keys():
            raise Untraceable(f"`{operation.target}` takes a number that depends on values and is not a size")

    def record_assertions(self) -> None:
        """Append an op for each assertion about unbacked symbols (of `torch._check`) that is not on the tape yet."""
        for assertion in self._sizes.assertions(self._tape.bound):
            self._append(internals.ASSERT_SCALAR, assertion, None, None)

    def finish(self) -> None:
        """Append the last assertions, after the function has run.

        Raise `Untraceable` if the program asked something about a number that no trace can know. The program may have
        caught the error that it got then.
        """
        self.record_assertions()
        if self._sizes.env.asked_in_vain:
            raise Untraceable(self._sizes.env.asked_in_vain)

    def _append(self, target: Any, args: tuple[Any, ...], result: Any, after: Operation | None) -> Operation:
        index, phase = len(self._tape.operations), "forward" if after is None else after.phase
        position, sequence = (user_code_position(), None) if after is None else (after.code_position, after.sequence)
        operation = Operation(index, target, args, {}, result, phase, position, sequence, None, target)
        self._tape.append(operation)
        return operation


def _symbols_of_tensors(value: Any) -> set[Any]:
    sizes = [size for tensor in tensors_in(value) for size in tensor.shape]
    return {symbol for size in sizes for symbol in internals.unbacked_in(size)}
