"""Answers the conditions of a traced function that are cheap to compute from its inputs.

See `aotlab.guards.conditions` for the guards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.errors import BY_DYNAMO, DataDependentError
from aotlab.guards.conditions import Condition
from aotlab.guards.objects import is_installed
from aotlab.guards.user_code import user_line
from aotlab.trace.inputs import TracedInput
from aotlab.trace.recorder import Recorder
from aotlab.trace.tape import tensors_in

#: At most this many conditions of one function are answered, each computed by at most this many ops. Each call computes
#: them again, and each combination of answers needs an entry.
_MOST = 8
_MOST_OPS = 16
#: Cheap ops that are neither pointwise ops, nor views, nor ops of torch's core set.
_REDUCTIONS = frozenset(
    ("all", "sum", "mean", "max", "min", "count_nonzero", "linalg_vector_norm", "zero", "zeros", "zeros_like", "ones",
     "ones_like", "stack")
)  # fmt: skip
_SORTS = frozenset(("sort", "topk", "cumsum", "cumprod"))


class Conditions:
    """A context manager in which a recorder answers conditions and collects their guards.

    ``inputs`` are the traced inputs. A condition that depends on another tensor gets no answer: on a synthetic base,
    for example.
    """

    def __init__(self, recorder: Recorder, inputs: Sequence[TracedInput]) -> None:
        self._recorder, self._tape, self._guards = recorder, recorder.tape, recorder.conditions
        self._inputs = {id(item.fake): (k, item) for k, item in enumerate(inputs) if _can_be_read(item.real)}
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._log_record)
        self._recorder.answer = self.answer

    def __exit__(self, *error: object) -> None:
        logging.setLogRecordFactory(self._make_record)
        self._recorder.answer = None  # it would keep the caller's tensors alive

    def _log_record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Make a log record. Raise `DataDependentError` if the user's code logs after it has asked for a condition.

        A compiled call logs nothing, and the text often depends on the condition. Installed packages may log, because
        they log most messages only once in a process.
        """
        record: logging.LogRecord = self._make_record(*args, **kwargs)
        if self._guards and threading.get_ident() == self._thread and not is_installed(record.pathname):
            raise DataDependentError(
                "the function logs text, perhaps because of a condition",
                line=user_line(),
                why="a compiled call logs nothing",
                suggestion=f"log outside of the compiled function, or {BY_DYNAMO}",
            )
        return record

    def answer(self, func: OpOverload, args: tuple[Any, ...]) -> bool | None:
        """Return the value of a condition for the traced call, and guard it.

        Return None for an op that is no condition, and for a condition that is not cheap to compute from the inputs.
        """
        if not (func is torch.ops.aten.equal.default or (func is internals.ITEM and args[0].dtype is torch.bool)):
            return None
        tensors = tensors_in(args)
        indices, outside = self._tape.needed(tensors, set())
        operations = [self._tape.operations[index] for index in indices]
        leaves = internals.pytree.tree_leaves([(operation.args, operation.kwargs) for operation in operations])
        if (
            len(self._guards) >= _MOST
            or len(operations) > _MOST_OPS
            or any(id(fake) not in self._inputs for fake in outside)
            or any(internals.is_symbolic(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
            or any(operation.draws_as or not _is_cheap(operation.target) for operation in operations)
        ):
            return None
        items = [self._inputs[id(fake)] for fake in outside]
        placeholders = [(f"arg{n}_1", item.fake) for n, (_, item) in enumerate(items)]
        compute = internals.forward_of(self._tape.graph("Condition", placeholders, tensors))
        condition = Condition(
            inputs=tuple(k for k, _ in items),
            compute=lambda *values: bool(func(*compute(*values))),
            expected=True,
            line=user_line(),
        )
        condition.fails(*[item.real for _, item in items])
        if condition.found is None:  # an op raises an error
            return None
        condition.expected = condition.found
        self._guards.append(condition)
        return condition.expected


def _is_cheap(target: Any) -> bool:
    """Tell whether an op is one of torch's own, and does little work for each element."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    is_basic = target.is_view or torch.Tag.core in target.tags or torch.Tag.pointwise in target.tags
    name = target.overloadpacket.__name__
    return (is_basic or name in _REDUCTIONS) and name not in _SORTS and target.overloadpacket not in flop_registry


def _can_be_read(tensor: Tensor) -> bool:
    """Tell whether a tensor has values: it is not fake, and its memory is not freed."""
    return not internals.is_fake(tensor) and (tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0)
