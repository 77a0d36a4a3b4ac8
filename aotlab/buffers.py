"""Objects of the standard library that hold bytes: bytearrays, arrays of `array`, values of `ctypes`.

Like a numpy array, one is compared at every call: the same object with the same bytes. What a pointer points to is not
looked at, which is why pointers count as something that no guard can watch (`aotlab.unseen`).
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterator
from typing import Any

#: By the class of their class, so that `ctypes` is not loaded for it.
_OF_CTYPES = frozenset(("PyCSimpleType", "PyCStructType", "PyCArrayType", "UnionType"))


def is_buffer(value: Any) -> bool:
    """Tell whether ``value`` is such an object."""
    return isinstance(value, (bytearray, array.array)) or _is_of_ctypes(value, _OF_CTYPES)


def is_pointer(value: Any) -> bool:
    """Tell whether ``value`` is a pointer of `ctypes`."""
    return _is_of_ctypes(value, frozenset(("PyCPointerType",)))


def _is_of_ctypes(value: Any, metaclasses: frozenset[str]) -> bool:
    return any(each.__module__ == "_ctypes" and each.__name__ in metaclasses for each in type(type(value)).__mro__)


def size_of(value: Any) -> int:
    """Return how many bytes it holds."""
    with memoryview(value) as view:
        return view.nbytes


class BufferSnapshot:
    """Bytes: in the same object, with the same contents."""

    __slots__ = ("bytes", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.bytes = bytes(memoryview(value))

    def holds(self, now: Any) -> bool:
        """Compare object and bytes."""
        return now is self.value and bytes(memoryview(now)) == self.bytes

    def restore(self) -> None:
        """Give the object the bytes back that it had."""
        if isinstance(self.value, bytearray):
            self.value[:] = self.bytes
        elif isinstance(self.value, array.array):
            self.value[:] = array.array(self.value.typecode, self.bytes)
        else:
            ctypes = sys.modules["ctypes"]
            ctypes.memmove(ctypes.addressof(self.value), self.bytes, len(self.bytes))

    def differences(self, now: Any, path: str) -> Iterator[tuple[str, str]]:
        """Say whether it is the object or its contents."""
        if not self.holds(now):
            other = now is not self.value
            yield path, "is another object" if other else "is the same object with other contents"
