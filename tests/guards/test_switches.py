"""The flags of torch's backends: allowed attention kernels, active libraries, and the precision of float32.

Some decide which ops a function is traced as; every entry checks these. Kernels read the others at run time, also in a
compiled graph. These need a guard only if the user's code reads them. The number of threads changes results only in
rounding; torch's own guard of global settings checks it, so a change compiles again.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.backends.cuda import math_sdp_enabled as may_use_plain_attention
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotlab import _torch as internals
from aotlab.errors import EscapeError
from tests.engine_helpers import compiled, entry_of, refusing, same
from tests.guards.two_calls import MODES, ROOTS, assigned, two_calls, var

B = torch.backends


def chosen(flag):
    """Give another result for each value of a flag."""
    return {
        True: 2.0,
        False: 3.0,
        "tf32": 5.0,
        "ieee": 7.0,
        "none": 11.0,
        "high": 13.0,
        "medium": 17.0,
        None: 19.0,
        "auto": 23.0,
        "optimal": 29.0,
    }[flag]


def attribute(owner, name, value):
    """Make a (change, undo) pair for a flag that is an attribute of one of torch's modules."""
    return assigned(functools.partial(setattr, owner, name), value, lambda: getattr(owner, name))


READ = {
    "cuda.flash_sdp_enabled()": (
        lambda x: x * chosen(B.cuda.flash_sdp_enabled()),
        lambda: assigned(B.cuda.enable_flash_sdp, False, B.cuda.flash_sdp_enabled),
        "False where the compiled entry expects True",
    ),
    "cuda.math_sdp_enabled()": (
        lambda x: x * chosen(may_use_plain_attention()),
        lambda: assigned(B.cuda.enable_math_sdp, False, B.cuda.math_sdp_enabled),
        "False where the compiled entry expects True",
    ),
    "cuda.mem_efficient_sdp_enabled()": (
        lambda x: x * chosen(torch.backends.cuda.mem_efficient_sdp_enabled()),
        lambda: assigned(B.cuda.enable_mem_efficient_sdp, False, B.cuda.mem_efficient_sdp_enabled),
        "False where the compiled entry expects True",
    ),
    "cuda.cudnn_sdp_enabled()": (
        lambda x: x * chosen(B.cuda.cudnn_sdp_enabled()),
        lambda: assigned(B.cuda.enable_cudnn_sdp, False, B.cuda.cudnn_sdp_enabled),
        "False where the compiled entry expects True",
    ),
    "cuda.fp16_bf16_reduction_math_sdp_allowed()": (
        lambda x: x * chosen(B.cuda.fp16_bf16_reduction_math_sdp_allowed()),
        lambda: assigned(B.cuda.allow_fp16_bf16_reduction_math_sdp, True, B.cuda.fp16_bf16_reduction_math_sdp_allowed),
        "True where the compiled entry expects False",
    ),
    "cudnn.enabled": (
        lambda x: x * chosen(B.cudnn.enabled),
        lambda: attribute(B.cudnn, "enabled", False),
        "False where the compiled entry expects True",
    ),
    "cudnn.benchmark": (
        lambda x: x * chosen(B.cudnn.benchmark),
        lambda: attribute(B.cudnn, "benchmark", True),
        "True where the compiled entry expects False",
    ),
    "cudnn.deterministic": (
        lambda x: x * chosen(B.cudnn.deterministic),
        lambda: attribute(B.cudnn, "deterministic", True),
        "True where the compiled entry expects False",
    ),
    "mkldnn.enabled": (
        lambda x: x * chosen(B.mkldnn.enabled),
        lambda: attribute(B.mkldnn, "enabled", False),
        "False where the compiled entry expects True",
    ),
    "mkldnn.deterministic": (
        lambda x: x * chosen(B.mkldnn.deterministic),
        lambda: attribute(B.mkldnn, "deterministic", True),
        "True where the compiled entry expects False",
    ),
    "mha.get_fastpath_enabled()": (
        lambda x: x * chosen(B.mha.get_fastpath_enabled()),
        lambda: assigned(B.mha.set_fastpath_enabled, False, B.mha.get_fastpath_enabled),
        "False where the compiled entry expects True",
    ),
    "opt_einsum.enabled": (
        lambda x: x * chosen(B.opt_einsum.enabled),
        lambda: attribute(B.opt_einsum, "enabled", not B.opt_einsum.enabled),
        "where the compiled entry expects",
    ),
    "opt_einsum.strategy": (
        lambda x: x * chosen(B.opt_einsum.strategy),
        lambda: attribute(B.opt_einsum, "strategy", "optimal"),
        "optimal where the compiled entry expects",
    ),
    "is_warn_always_enabled()": (
        lambda x: x * chosen(torch.is_warn_always_enabled()),
        lambda: assigned(torch.set_warn_always, True, torch.is_warn_always_enabled),
        "True where the compiled entry expects False",
    ),
    "fill_uninitialized_memory": (
        lambda x: x * chosen(torch.utils.deterministic.fill_uninitialized_memory),
        lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "False where the compiled entry expects True",
    ),
    "cudnn.conv.fp32_precision": (
        lambda x: x * chosen(B.cudnn.conv.fp32_precision),
        lambda: attribute(B.cudnn.conv, "fp32_precision", "ieee"),
        "ieee where the compiled entry expects tf32",
    ),
    "cudnn.allow_tf32": (
        lambda x: x * chosen(B.cudnn.allow_tf32),
        lambda: attribute(B.cudnn, "allow_tf32", False),
        "none where the compiled entry expects tf32",
    ),
    "mkldnn.matmul.fp32_precision": (
        lambda x: x * chosen(B.mkldnn.matmul.fp32_precision),
        # "highest", which other tests set, means "ieee" here
        lambda: (
            setattr(B.mkldnn.matmul, "fp32_precision", "none") or attribute(B.mkldnn.matmul, "fp32_precision", "ieee")
        ),
        "ieee where the compiled entry expects none",
    ),
}


@MODES
@pytest.mark.parametrize("name", READ)
def test_a_flag_that_the_code_reads(name, grad):
    """Each flag that the code reads is guarded, by every function or attribute that reads it."""
    function, pair, reason = READ[name]
    change, undo = pair()
    two_calls(function, lambda: (var([1.0, 2.0], grad=grad),), reason=reason, change=change, undo=undo)


def test_from_high_to_medium():
    """Torch's own guard takes these two for one."""
    torch.set_float32_matmul_precision("high")
    try:
        two_calls(
            lambda x: x * chosen(torch.get_float32_matmul_precision()),
            lambda: (var([1.0, 2.0], grad=True),),
            reason="matmul precision is medium where the compiled entry expects high",
            change=lambda: torch.set_float32_matmul_precision("medium"),
            undo=lambda: torch.set_float32_matmul_precision("high"),
        )
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precisions_that_contradict_the_older_flag():
    """Calls are compiled even if torch cannot report the matmul precision because old and new flags contradict."""
    change, undo = attribute(B.cuda.matmul, "fp32_precision", "tf32")
    change()
    try:
        with pytest.raises(RuntimeError, match="precision"):
            torch.get_float32_matmul_precision()
        same(lambda x: x @ x, torch.ones(2, 2, requires_grad=True))
    finally:
        undo()


def test_a_flag_that_nothing_depends_on():
    """A flag that neither the trace nor the code reads is not checked, and its change compiles nothing again."""
    f = compiled(lambda x: x * 2)
    f(torch.ones(2))
    change, undo = attribute(B.cudnn, "benchmark", True)
    change()
    try:
        assert f(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        undo()
    assert f.recompiles == ()
    assert "benchmark" not in entry_of(f).source


# --- flags that change the trace ---------------------------------------------------------------------------------


def queries(grad):
    """Make the input of an attention, always the same."""
    x = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    if grad:
        ROOTS.append(x.requires_grad_())
    return (x,)


def attention(x):
    """Attend."""
    return F.scaled_dot_product_attention(x, x, x)


@MODES
def test_attention_kernels(grad):
    """Another attention kernel gets another entry, with eager's last bits."""
    context = sdpa_kernel(SDPBackend.MATH)
    made = two_calls(
        attention,
        lambda: queries(grad),
        reason="torch.backends.cuda.flash_sdp_enabled() is False where the compiled entry expects True",
        change=context.__enter__,
        undo=lambda: context.__exit__(None, None, None) if not B.cuda.flash_sdp_enabled() else None,
    )
    first, second = (str(entry.records.partition.forward.graph) for entry in reversed(made.entries))
    assert "_scaled_dot_product_flash_attention" in first
    assert "_scaled_dot_product_flash_attention" not in second


def test_no_attention_kernel():
    """If no attention kernel is allowed, eager's error is raised, also after a compiled call."""
    f = compiled(attention)
    (x,) = queries(False)
    f(x)
    with sdpa_kernel([]):
        with pytest.raises(RuntimeError, match="No viable backend") as expected:
            attention(x)
        with pytest.raises(RuntimeError, match="No viable backend") as seen:
            f(x)
    assert str(expected.value) == str(seen.value)


@MODES
def test_a_context_inside_of_the_function(grad):
    """`sdpa_kernel` in the function itself: the trace is inside of it, and nothing is left changed."""

    def f(x):
        with sdpa_kernel(SDPBackend.MATH):
            return attention(x)

    same(f, *queries(grad))
    assert B.cuda.flash_sdp_enabled()


# --- functions that change a flag --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "switch", [s for s in internals.SWITCHES if s.name != "os.environ"], ids=lambda switch: switch.name
)
def test_a_function_that_leaves_a_flag_changed(switch):
    """A function that changes a flag is refused by the flag's name, and the flag is restored."""
    before = switch.read()
    others = {True: False, False: True, "ieee": "none", (None,): (True,)}
    other = before[::-1] if isinstance(before, list) else others.get(before, "ieee")

    def f(x):
        switch.write(other)
        return x * 2

    try:
        with refusing(EscapeError, match="leaves a global setting changed") as error:
            compiled(f)(torch.ones(2))
        assert switch.name in str(error.value)
        assert switch.read() == before
    finally:
        switch.write(before)
