"""What torch has above autograd, where ops are still those that were called."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.out_dtype import out_dtype_fallback as out_dtype_fallback
from torch._subclasses.schema_check_mode import SchemaCheckMode as SchemaCheckMode

#: The dispatch key; of modes it takes torch's own alone, such as `SchemaCheckMode`.
PRE_DISPATCH: Any = torch._C.DispatchKey.PreDispatch
#: The op that calls another one, for a result of another dtype; `out_dtype_fallback` calls what it consists of.
OUT_DTYPE: Any = out_dtype
#: Lets function modes see what is called, whatever is around.
function_modes_again: Any = torch._C._EnableTorchFunction
