"""torch's dispatch level above autograd, where each op is still the op that the program called."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.out_dtype import out_dtype_fallback as out_dtype_fallback
from torch._subclasses.schema_check_mode import SchemaCheckMode as SchemaCheckMode

#: The dispatch key of this level. The only dispatch modes that it supports are torch's own, such as `SchemaCheckMode`.
PRE_DISPATCH: Any = torch._C.DispatchKey.PreDispatch
#: The op that runs another op with a different result dtype. `out_dtype_fallback` computes the same with ordinary ops.
OUT_DTYPE: Any = out_dtype
#: Switches function modes on for a block, even if they were switched off around it.
function_modes_again: Any = torch._C._EnableTorchFunction
