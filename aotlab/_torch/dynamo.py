"""Dynamo, as our frontend and the cells of a notebook need it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.utils import rnn

from aotlab._torch.replaced import replaced
from aotlab._torch.saved import CHECKPOINT

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Keeps Dynamo from looking into a function.
dynamo_disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable


def in_guard(frame: types.FrameType | None) -> bool:
    """Tell whether a frame belongs to the making or the check of a guard of Dynamo's."""
    from torch._dynamo import guards

    while frame is not None and frame.f_code.co_filename != guards.__file__:
        frame = frame.f_back
    return frame is not None


def hear_dynamo(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call ``start`` before and ``end`` after Dynamo compiles a frame, until ``torch.compiler.reset()``."""
    from torch._dynamo.callback import callback_handler

    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)


def as_made_by_dynamo(wrapper: _Function) -> _Function:
    """Let Dynamo take a function that was given the attributes of a compiled one for that one, and not look into it."""
    wrapper._torchdynamo_wrapper_id = id(wrapper)  # type: ignore[attr-defined]
    return wrapper


def innermost_backend(backend: object) -> object:
    """Return the function that ``torch.compile`` was given as a backend, without what it has put around it."""
    for _ in range(8):  # it has put a few around; an object that has every attribute would never end
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        inner = backend.func if inner is None and isinstance(backend, functools.partial) else inner
        if inner is None:
            break
        backend = inner
    return backend


def way_of_its_own(module: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say how a module called with these arguments differs in eager from what a trace and Dynamo see of it.

    Where nothing is differentiated, `torch.nn.TransformerEncoder` returns zeros at padded places, and as many places as
    the longest sequence has; its layers return autocast's dtype on the CPU. Dynamo's variables stand for arguments.
    """
    if not isinstance(module, torch.nn.TransformerEncoder | torch.nn.TransformerEncoderLayer):
        return ""
    layer: Any = module.layers[0] if isinstance(module, torch.nn.TransformerEncoder) else module
    if layer.training or (torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters())):
        return ""
    if layer is module:
        return "returns autocast's dtype" if torch.is_autocast_enabled("cpu") else ""
    mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    leaves_out = mask is not None and getattr(mask, "value", mask) is not None and module.use_nested_tensor
    return "leaves padded places out" if leaves_out else ""


def let_dynamo_follow_eager(is_ours: Callable[[object], bool]) -> None:
    """Let Dynamo see, where it captures for a backend of ours, what it passes over otherwise (torch 2.11 to 2.15).

    - It guards that modules have no hooks; by default it does not look whether there are some by now.
    - It breaks the graph at ``ctx.set_materialize_grads``, which it forgets.
    - It breaks the graph at numpy's random functions, which it would let draw from, and seed, torch's generator.
    - Where it does not trace numpy, it leaves arrays to Python; by itself it writes ``array += 1`` while it captures.
    - It leaves a transformer's encoder to Python that leaves padded places out, and RNNs, LSTMs and GRUs, which it
      would write step by step, or leave with the whole function that calls them.
    - It takes a float that varies out of its tensor in the whole graph, not in the one of a checkpoint or a custom
      Function; one that is met in another op that takes functions, such as `torch.cond`, does not vary.

    It has no hooks for this: six methods are replaced. ``is_ours`` is asked about what `innermost_backend` returns.
    """
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator
    from torch._dynamo.variables import builder, misc

    arrays = getattr(getattr(builder, "np", None), "ndarray", ())  # none without numpy

    def guard_hooks(original: Any, guards: Any, guard: Any) -> None:
        guards.SEQUENCE_LENGTH(guard)

    def look_up(original: Any, variable: Any, tx: Any, name: Any, *more: Any) -> Any:
        if name == "set_materialize_grads":
            _break_graph("ctx.set_materialize_grads", "Dynamo forgets it: the backward would get zeros for None.")
        return original(variable, tx, name, *more)

    def call_numpy(original: Any, *args: Any, **kwargs: Any) -> Any:
        with config.patch(use_numpy_random_stream=True):
            return original(*args, **kwargs)

    def wrap(original: Any, made_by: Any, value: Any) -> Any:
        if isinstance(value, arrays) and not config.trace_numpy:
            _break_graph("a numpy array", "Dynamo would compute with it, and write it, while it captures.")
        if isinstance(value, torch.nn.RNNBase) and made_by.tx.f_code not in _RECURRENT:
            with config.patch(allow_rnn=True):
                return original(made_by, value)
        return original(made_by, value)

    def wrap_float(original: Any, made_by: Any, value: Any) -> Any:
        whole, *inner = made_by.tx.output.tracers
        fixed = any(each.source_target not in (CHECKPOINT, "autograd.Function") for each in inner)
        settings = config.patch(specialize_float=fixed or config.specialize_float)
        with replaced(made_by.tx.output, "tracers", [whole]), settings:
            return original(made_by, value)

    context = misc.AutogradFunctionContextVariable
    attribute = next(name for name in ("var_getattr", "tp_getattro_impl") if name in vars(context))  # torch 2.15's last
    hooks = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT.__name__
    for owner, name, method, output_of in (
        (GuardBuilder, hooks, guard_hooks, lambda guards, *_: guards.check_fn_manager.output_graph),
        (context, attribute, look_up, lambda variable, tx, *_: tx.output),
        (misc.NumpyVariable, "call_function", call_numpy, lambda variable, tx, *_: tx.output),
        (builder.VariableBuilder, "_wrap", wrap, lambda made_by, *_: made_by.tx.output),
        (builder.VariableBuilder, "wrap_symfloat", wrap_float, lambda made_by, *_: made_by.tx.output),
        (InliningInstructionTranslator, "inline_call", _inline, lambda parent, *_: parent.output),
    ):
        # The output of a capture refers to its backend as one wrapper refers to the next.
        _replace(owner, name, method, lambda *args, of=output_of: is_ours(innermost_backend(of(*args))))


_ENCODERS = [kind.forward.__code__ for kind in (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)]
_RECURRENT = [kind.forward.__code__ for kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU)]
_PACKING = [rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__]  # whose sizes are values


def _inline(original: Any, parent: Any, func: Any, args: Any, kwargs: Any, *more: Any, **others: Any) -> Any:
    """Break the graph at calls of what Python is to run."""
    from torch._dynamo import config, variables

    code = func.get_code() if isinstance(func, variables.UserFunctionVariable) else None
    if code in _ENCODERS and (own := way_of_its_own(getattr(args[0], "value", None), args[1:], kwargs)):
        leave_frame_to_python(code)
        _break_graph("a transformer's encoder", f"In eager it {own} where nothing is differentiated; not by Dynamo.")
    if code in _PACKING or (code in _RECURRENT and not config.allow_rnn):
        leave_frame_to_python(code)
        why = "Dynamo captures no LSTM, GRU or RNN, nor packed sequences: they run by eager's kernels."
        _break_graph("a recurrent layer", why)
    return original(parent, func, args, kwargs, *more, **others)


def _replace(owner: Any, name: str, method: Callable[..., Any], applies: Callable[..., bool]) -> None:
    """Have ``method``, which gets the original first, called in the place of a method of ``owner``'s if it applies."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs) if applies(*args) else original(*args, **kwargs)

    setattr(owner, name, staticmethod(chosen) if isinstance(vars(owner)[name], (staticmethod, classmethod)) else chosen)


def _break_graph(what: str, why: str) -> NoReturn:
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type=f"aotlab: {what}", context=what, explanation=why, hints=[])


def dynamo_breaks() -> list[Any]:
    """Return why Dynamo broke captures off so far, each with a ``reason`` and a ``user_stack``."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def dynamo_compile_id() -> tuple[int | None, str]:
    """Return Dynamo's number for the code that it is compiling, or None, and the name of this compilation."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return (None, "") if current is None else (current.frame_id, str(current))


def dynamo_failed_guards() -> tuple[types.CodeType | None, Mapping[str, Any], list[tuple[str, str]]]:
    """Return the code being compiled, its variables L and G, and (entry, failed guards) of others, latest first."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # somebody calls the backend without Dynamo
        return None, {}, []
    backend, inner = None, output.compiler_fn
    while inner is not None:
        backend, inner = inner, getattr(inner, "_torchdynamo_orig_backend", None)
    code = output.root_tx.f_code
    failed = []
    for entry in _debug_get_cache_entry_list(code):
        if entry.backend != backend:
            continue  # that of another torch.compile
        found = entry.guard_manager.check_verbose(output.local_scope)
        if not found.result:
            failed.append((str(entry.compile_id), "\n".join(found.verbose_code_parts)))
    return code, {"L": output.local_scope, "G": output.global_scope}, failed


def leave_frame_to_python(code: types.CodeType) -> None:
    """Keep Dynamo from capturing a frame that runs ``code``, though not from looking at the frames that it calls."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
