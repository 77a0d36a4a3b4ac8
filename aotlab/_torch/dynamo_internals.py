"""The parts of Dynamo that our frontend and the notebook cells use."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import RelationalGuard
from torch.nn.utils import rnn
from torch.optim import optimizer, sgd

from aotlab._torch.modes import under_default_devices_only
from aotlab._torch.replaced import replaced
from aotlab._torch.saved_tensors import CHECKPOINT

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: The optimizers whose captured step does the same arithmetic as in eager. The others compute bias corrections and the
#: like in Python's doubles in eager, and in tensors if Dynamo captures them.
EXACT_OPTIMIZERS = (torch.optim.SGD, torch.optim.Rprop)
#: Keeps Dynamo from tracing a function.
dynamo_disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable


def in_guard(frame: types.FrameType | None) -> bool:
    """Tell whether Dynamo is building or checking a guard in this frame or in one of its callers."""
    from torch._dynamo import guards

    while frame is not None and frame.f_code.co_filename != guards.__file__:
        frame = frame.f_back
    return frame is not None


def hear_dynamo(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Register ``start`` to be called before each compilation of a frame by Dynamo, and ``end`` after it.

    Both remain registered until ``torch.compiler.reset()``. A second registration changes nothing.
    """
    from torch._dynamo.callback import callback_handler

    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)


def as_made_by_dynamo(wrapper: _Function) -> _Function:
    """Mark ``wrapper`` as one of Dynamo's own wrappers of a compiled function, so that Dynamo does not trace it.

    ``wrapper`` calls a function that `torch.compile` returned, and has the attributes of this function.
    """
    wrapper._torchdynamo_wrapper_id = id(wrapper)  # type: ignore[attr-defined]
    return wrapper


def innermost_backend(backend: object) -> object:
    """Return the backend that ``torch.compile`` was given, without the wrappers that ``torch.compile`` adds."""
    for _ in range(8):  # a limit, because a mock object has every attribute, and the loop would not end
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        inner = backend.func if inner is None and isinstance(backend, functools.partial) else inner
        if inner is None:
            break
        backend = inner
    return backend


def eager_only_behaviour(module: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say how a call of a transformer module in eager differs from the Python code that a trace or Dynamo sees.

    The text is empty if there is no difference. If nothing is differentiated, eager takes torch's fast path. There
    `torch.nn.TransformerEncoder` returns zeros at padded positions and shortens its result to the longest sequence,
    and its layers return autocast's dtype on the CPU. ``args`` and ``kwargs`` are the arguments of the call; they may
    be Dynamo's variable trackers.
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
    return "leaves out padded positions" if leaves_out else ""


def let_dynamo_follow_eager(is_ours: Callable[[object], bool], check_of_inlined: Callable[..., Any]) -> None:
    """Let Dynamo see cases that it ignores by default, in captures for our backend (torch 2.11 to 2.15).

    - It guards that the functions that it inlined, and the libraries that they use, are still the same:
      ``check_of_inlined(code, namespace, functions, classes)`` makes the guard.
    - It guards the identity of both objects that an ``is`` compares.
    - It guards that no attribute of a module hides the parameter, buffer or submodule of that name.
    - It guards that modules have no hooks. By default it does not check whether hooks were added later.
    - It breaks the graph at ``ctx.set_materialize_grads``. By default it ignores the call.
    - It breaks the graph at numpy's random functions, which would otherwise draw from torch's generator, and seed it.
    - If it does not trace numpy, it leaves arrays to Python. By default it executes ``array += 1`` while it captures.
    - It leaves to Python a transformer's encoder that leaves padded positions out, and RNNs, LSTMs and GRUs. By default
      it would unroll these step by step, or leave the whole calling function to Python.
    - An int of a module or a global varies if this very int had another value in an earlier capture. By default, Dynamo
      captures the code again for each value.
    - It breaks the graph where code uses a list to which numbers are appended in each call. By default, it captures the
      code again for each length of the list.
    - It captures ops whose results have sizes that depend on values, and numbers from ``item``, in the graph. If an
      error ends the capture, for example because Python needs such a number, it is repeated without this.
    - It reads a varying float from its tensor in the outermost graph, not in the graph of a checkpoint or of a custom
      Function. A float that is first used inside another higher-order op, such as `torch.cond`, does not vary.

    Dynamo has no hooks for this, so nine of its functions, and its handlers of ``is`` and ``is not``, are replaced.
    ``is_ours`` receives the result of `innermost_backend` and tells whether a capture is for our backend.
    """
    from torch._dynamo import config, convert_frame
    from torch._dynamo.guards import CheckFunctionManager, GuardBuilder
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator, compare_op_handlers
    from torch._dynamo.variables import builder, misc, nn_module

    arrays = getattr(getattr(builder, "np", None), "ndarray", ())  # empty without numpy

    def call_numpy(original: Any, *args: Any, **kwargs: Any) -> Any:
        with config.patch(use_numpy_random_stream=True):
            return original(*args, **kwargs)

    def wrap(original: Any, made_by: Any, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        vars(made_by.tx.output).setdefault(_KINDS, {})[kind] = None
        if isinstance(value, arrays) and not config.trace_numpy:
            _break_graph("a numpy array", "Dynamo would compute with the array, and write it, during the capture.")
        if type(value) is int and _has_changed(made_by, value):
            return made_by.wrap_symint(value)
        if _has_grown(made_by, value) if type(value) is list else _is_append_on_stack(made_by, value):
            return _unread(made_by, kind)
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

    context, modules = misc.AutogradFunctionContextVariable, nn_module.UnspecializedNNModuleVariable
    # torch 2.15 has renamed the method that looks up an attribute
    attribute = next(name for name in ("var_getattr", "tp_getattro_impl") if name in vars(context))
    hooks = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT.__name__
    for owner, name, method, output_of in (
        (CheckFunctionManager, "__init__", functools.partial(_guard_inlined, check_of_inlined), lambda *args: args[2]),
        (
            GuardBuilder,
            hooks,
            lambda _, guards, guard: guards.SEQUENCE_LENGTH(guard),
            lambda guards, *_: guards.check_fn_manager.output_graph,
        ),
        (modules, "manually_trace_nn_module_getattr", _guard_unhidden, lambda module, tx, *_: tx.output),
        (context, attribute, _look_up, lambda variable, tx, *_: tx.output),
        (misc.NumpyVariable, "call_function", call_numpy, lambda variable, tx, *_: tx.output),
        (builder.VariableBuilder, "_wrap", wrap, lambda made_by, *_: made_by.tx.output),
        (builder.VariableBuilder, "wrap_symfloat", wrap_float, lambda made_by, *_: made_by.tx.output),
        (InliningInstructionTranslator, "inline_call", _inline, lambda parent, *_: parent.output),
        (convert_frame, "trace_frame", _capture_values, lambda *args: args[5]),
    ):
        # `innermost_backend` also accepts the output graph of a capture, because an output graph stores its backend in
        # the attribute `compiler_fn`.
        _replace(owner, name, method, lambda *args, of=output_of: is_ours(innermost_backend(of(*args))))
    for operator in ("is", "is not"):
        original = compare_op_handlers[operator]
        compare_op_handlers[operator] = functools.partial(_compare_identity, original, is_ours)


#: The numbers that captures have read from modules and globals, by the module and the text of the source. None if a
#: number has changed.
_INTS: weakref.WeakKeyDictionary[Any, dict[str, int | None]] = weakref.WeakKeyDictionary()
#: The lists of numbers that captures have read, by the code and the text of the source, as an id and the contents.
_LISTS: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, list[Any]]]] = weakref.WeakKeyDictionary()


def _has_changed(made_by: Any, value: int) -> bool:
    """Tell whether an int that Dynamo would fix had another value in an earlier capture.

    The int is an attribute of a module, an item of a container in a module, or a global variable.
    """
    from torch._dynamo import config
    from torch._dynamo.utils import is_int_specialization_case

    source, root = made_by.source, made_by.tx.output.root_tx
    if config.specialize_int or not is_int_specialization_case(value, source):
        return False
    base = getattr(source, "base", None)
    owner = sys.modules.get(root.f_globals.get("__name__")) if base is None else None
    with contextlib.suppress(Exception):  # the text of a source may use functions that only Dynamo's guards know
        while base is not None and not isinstance(owner, torch.nn.Module):
            owner = eval(_text_of(base), {"L": root.f_locals, "G": root.f_globals})
            base = getattr(base, "base", None)
    if not isinstance(owner, torch.nn.Module | types.ModuleType):
        return False
    ints, name = _INTS.setdefault(owner, {}), _text_of(source)
    if ints.setdefault(name, value) != value:
        ints[name] = None
    return ints[name] is None


def _has_grown(made_by: Any, value: list[Any]) -> bool:
    """Tell whether numbers were appended to a list since an earlier capture of the same code."""
    if not all(type(item) in (int, float) for item in value):
        return False
    lists, name = _LISTS.setdefault(made_by.tx.f_code, {}), _text_of(made_by.source)
    known, before = lists.get(name, (0, []))
    if known != id(value) or value[: len(before)] != before:
        lists[name] = id(value), list(value)
        return False
    return len(value) > len(before)


def _is_append_on_stack(made_by: Any, value: Any) -> bool:
    """Tell whether a value is the ``append`` of a list that was looked up before a graph break and is called after it.

    Each look-up makes another object, and Dynamo would capture the code again for each of them.
    """
    is_append = isinstance(value, types.BuiltinMethodType) and value.__name__ == "append"
    return is_append and type(value.__self__) is list and _text_of(made_by.source).startswith("L['___stack")


def _unread(made_by: Any, kind: type) -> Any:
    """Make a variable for an object of which only the type is guarded. The graph breaks where the code uses it."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import base, misc

    look_up = "var_getattr" if "var_getattr" in vars(base.VariableTracker) else "tp_getattro_impl"
    methods = {"python_type": lambda _: kind, look_up: lambda variable, _, name: misc.GetAttrVariable(variable, name)}
    made_by.install_guards(GuardBuilder.TYPE_MATCH)
    return type("Unread", (base.VariableTracker,), methods)(source=made_by.source)


def _text_of(source: Any) -> str:
    """Return the Python expression of a source. Torch 2.11 has a method for it, later ones a property."""
    return str(source.name() if callable(source.name) else source.name)


def keep_argument_checks() -> None:
    """Keep Dynamo from switching the argument checks of `torch.distributions` off.

    Dynamo patches torch when it is first used. This function lets Dynamo do so now, and then restores the checks.
    """
    from torch._dynamo.eval_frame import TorchPatcher

    checks = torch.distributions.Distribution._validate_args
    TorchPatcher.patch()
    torch.distributions.Distribution.set_default_validate_args(checks)


#: The name of an attribute that we add to the output graph of a capture. The attribute is a list of pairs: an inlined
#: function, and the first argument of its call, or None if this argument is not a user's object or class.
_INLINED = "_aotlab_inlined"
#: The name of another attribute that we add to the output graph of a capture. The attribute is a dictionary whose keys
#: are classes; its values are not used. For each value that Dynamo wrapped in a variable tracker, it has the value
#: itself if the value is a class, and otherwise the class of the value.
_KINDS = "_aotlab_kinds"


def _guard_inlined(
    check_of_inlined: Callable[..., Any], original: Any, manager: Any, code: Any, output: Any, *more: Any, **others: Any
) -> None:
    original(manager, code, output, *more, **others)
    inlined, kinds = vars(output).get(_INLINED, ()), vars(output).get(_KINDS, ())
    check = check_of_inlined(code, output.global_scope, inlined, kinds)
    text = "the code that was captured, or a library that it uses, was replaced"
    manager.guard_manager.root.add_lambda_guard(lambda _: check(), [text], None)


def _capture_values(original: Any, code: types.CodeType, *args: Any, **kwargs: Any) -> Any:
    """Capture a frame, with the sizes and numbers that depend on values. If an error ends this, capture without them.

    Dynamo starts again after `RestartAnalysis`. The log of the first capture would not fit the second one.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import RestartAnalysis, TorchDynamoException, TorchRuntimeError
    from torch._dynamo.symbolic_convert import SpeculationLog

    if code in _NEEDING_VALUES:
        return original(code, *args, **kwargs)
    try:
        with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            return original(code, *args, **kwargs)
    except Exception as error:
        if isinstance(error, TorchDynamoException) and not isinstance(error, TorchRuntimeError):
            raise
        _NEEDING_VALUES.add(code)
        next(each for each in args if isinstance(each, SpeculationLog)).clear()
        raise RestartAnalysis(restart_reason=str(error)) from error


def _look_up(original: Any, variable: Any, tx: Any, name: Any, *more: Any) -> Any:
    if name == "set_materialize_grads":
        _break_graph("ctx.set_materialize_grads", "Dynamo ignores it: the backward would get zeros instead of None.")
    return original(variable, tx, name, *more)


def _guard_unhidden(original: Any, module: Any, tx: Any, name: str) -> Any:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    attribute = original(module, tx, name)
    if module.source:
        inverted: Any = functools.partial(GuardBuilder.DICT_CONTAINS, invert=True)  # for torch 2.11
        absent = functools.partial(getattr(GuardBuilder, "DICT_NOT_CONTAINS", inverted), key=name)
        install_guard(AttrSource(module.source, "__dict__").make_guard(absent))
    return attribute


def _compare_identity(original: Any, is_ours: Callable[[object], bool], tx: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``is`` and ``is not``: call Dynamo's handler, and guard the identities of the two compared objects.

    Dynamo itself guards only the contents of the objects that it uses.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    result = original(tx, args, kwargs)
    sources = [each.source for each in map(_object_of, args) if each is not None]
    if len(sources) == 2 and all(sources) and is_ours(innermost_backend(tx.output)):
        install_guard(*(source.make_guard(GuardBuilder.ID_MATCH) for source in sources))
    return result


def _object_of(variable: Any, *, or_class: bool = False) -> Any:
    """Return Dynamo's variable tracker of a user's object or, with ``or_class``, of a user's class.

    The result is None for other variable trackers, and for lazy ones that Dynamo has not realized yet.
    """
    from torch._dynamo.variables import LazyVariableTracker, UserDefinedClassVariable, UserDefinedObjectVariable

    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():  # the next `isinstance` would make Dynamo realize and guard it
            return None
        variable = variable.realize()
    is_class = or_class and isinstance(variable, UserDefinedClassVariable)
    return variable if is_class or isinstance(variable, UserDefinedObjectVariable) else None


_ENCODERS = [kind.forward.__code__ for kind in (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)]
_RECURRENT = [kind.forward.__code__ for kind in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU)]
#: The code of the ``step`` methods of optimizers that Dynamo must leave to Python (`inexact_steps_left_to_python`).
_inexact_steps: frozenset[types.CodeType] = frozenset()
#: The code of functions that Dynamo captures without sizes and numbers that depend on values.
_NEEDING_VALUES: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
#: The code of functions whose results have sizes that depend on values.
_PACKING = [rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__]


def _inline(original: Any, parent: Any, func: Any, args: Any, kwargs: Any, *more: Any, **others: Any) -> Any:
    """Handle a call that Dynamo would inline: note the function for a guard, or break the graph if Python must run it.

    Python runs steps of most optimizers, recurrent layers, packed sequences, and some calls of transformers.
    """
    from torch._dynamo import config, variables

    code, function = None, getattr(func, "im_func", func)  # torch 2.15 has a separate class for methods
    if isinstance(function, variables.UserFunctionVariable):
        code, receiver = function.get_code(), _object_of(args[0], or_class=True) if args else None
        call = function.get_function(), None if receiver is None else receiver.value
        vars(parent.output).setdefault(_INLINED, []).append(call)
        step = inspect.unwrap(call[0]) if _inexact_steps else None
        # If torch's own wrapper calls the step, then the step is a separate frame, which Python runs anyway.
        if getattr(step, "__code__", None) in _inexact_steps and parent.f_code.co_filename != optimizer.__file__:
            name = type(call[1]).__name__
            _break_graph(f"the step of {name}", "The captured form of this step rounds differently than eager.")
    if code in _ENCODERS and (behaviour := eager_only_behaviour(getattr(args[0], "value", None), args[1:], kwargs)):
        leave_frame_to_python(code)
        _break_graph(
            "a transformer's encoder", f"In eager it {behaviour} if no gradient is needed; a captured graph does not."
        )
    if code in _PACKING or (code in _RECURRENT and not config.allow_rnn):
        leave_frame_to_python(code)
        why = "Dynamo captures no LSTM, GRU or RNN, nor packed sequences: they run eagerly."
        _break_graph("a recurrent layer", why)
    return original(parent, func, args, kwargs, *more, **others)


@functools.lru_cache(maxsize=1)
def _steps_of(kinds: tuple[type, ...]) -> frozenset[types.CodeType]:
    """Return the code objects of the ``step`` methods of these optimizer classes, except `EXACT_OPTIMIZERS`."""
    steps = [
        inspect.unwrap(vars(kind)["step"]) for kind in kinds if kind not in EXACT_OPTIMIZERS and "step" in vars(kind)
    ]
    return frozenset(step.__code__ for step in steps if hasattr(step, "__code__"))


def _rate_as_in_eager(rate: Any) -> Any:
    """Return a learning rate as a number, even if it is a tensor.

    In eager, SGD converts a learning rate that is a tensor to a number. In a capture by Dynamo, SGD would compute with
    the tensor, which rounds differently.
    """
    return rate.item() if isinstance(rate, torch.Tensor) and not rate.requires_grad else rate


@contextmanager
def inexact_steps_left_to_python() -> Iterator[None]:
    """Keep Dynamo from capturing the ``step`` of any optimizer except `EXACT_OPTIMIZERS`, for the length of a block.

    Python runs the step and everything that the step calls, whichever function calls it.
    """
    global _inexact_steps
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    before = _inexact_steps
    steps = _steps_of(tuple(kinds)) - before
    _inexact_steps = before | steps
    try:
        for code in steps:
            set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        with replaced(sgd, "_to_scalar", _rate_as_in_eager) if hasattr(sgd, "_to_scalar") else nullcontext():
            yield
    finally:
        for code in steps:
            set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))
        _inexact_steps = before


def _replace(owner: Any, name: str, method: Callable[..., Any], applies: Callable[..., bool]) -> None:
    """Replace a method of ``owner`` by ``method`` for the calls for which ``applies`` returns true.

    ``method`` gets the original as its first argument.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs) if applies(*args) else original(*args, **kwargs)

    setattr(owner, name, staticmethod(chosen) if isinstance(vars(owner)[name], (staticmethod, classmethod)) else chosen)


def _break_graph(what: str, why: str) -> NoReturn:
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type=f"aotlab: {what}", context=what, explanation=why, hints=[])


def dynamo_breaks() -> list[Any]:
    """Return Dynamo's records of its graph breaks so far. Each has the attributes ``reason`` and ``user_stack``."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def dynamo_compile_id() -> tuple[int | None, str]:
    """Return Dynamo's number for the frame that it is compiling, and the name of this compilation.

    If Dynamo is not compiling, the number is None and the name is empty.
    """
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return (None, "") if current is None else (current.frame_id, str(current))


def dynamo_failed_guards() -> tuple[types.CodeType | None, Mapping[str, Any], list[tuple[str, str, int]]]:
    """Return the code that Dynamo is capturing, its scope, and a row for each earlier capture of it, latest first.

    The scope maps ``"L"`` to the local variables and ``"G"`` to the global ones, as the texts of Dynamo's guards name
    them. A row has the name of the earlier capture, the first guard that fails, and how many guarded values differ.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # the backend was called without Dynamo
        return None, {}, []
    backend, inner = None, output.compiler_fn
    while inner is not None:
        backend, inner = inner, getattr(inner, "_torchdynamo_orig_backend", None)
    code = output.root_tx.f_code
    scope = {"L": output.local_scope, "G": output.global_scope}
    failed = []
    for entry in _debug_get_cache_entry_list(code):
        if entry.backend != backend:
            continue  # the capture belongs to another torch.compile of the same code
        verdict = entry.guard_manager.check_verbose(output.local_scope)
        if not verdict.result:
            names = {**scope, **(entry.guard_manager.closure_vars or {})}
            differing = _count_differing(entry.guard_manager.root, names)
            # a guard on a relation between values may fail although the guards of each value hold
            failed.append((str(entry.compile_id), "\n".join(verdict.verbose_code_parts), max(differing, 1)))
    return code, scope, failed


def _count_differing(manager: Any, names: dict[str, Any]) -> int:
    """Count the values for which a guard fails. If a guard of an object fails, its attributes are not counted.

    ``manager`` is Dynamo's guard manager of one value; its children are the managers of attributes and items.
    """
    try:
        value = eval(manager.get_source(), names)  # an expression of Dynamo, such as L['self'].weight
        guards = [guard for guard in manager.get_leaf_guards() if not isinstance(guard, RelationalGuard)]
        if not all(guard(value) for guard in guards):
            return 1
    except Exception:  # noqa: BLE001  # this call has no such value, or the expression is only a label
        return 0
    return sum(_count_differing(child, names) for child in manager.get_child_managers())


def behind_dynamo(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that Dynamo's code calls for the graph that is being compiled.

    This function calls ``call``, and Dynamo does not trace it. ``call`` runs without the program's function modes,
    because Dynamo has traced the effects of these modes into the graph.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        modes = InstructionTranslator.current_tx().output.torch_function_mode_stack
    except AttributeError:  # the backend was called without Dynamo
        modes = []
    return dynamo_disable(under_default_devices_only(call) if modes else call)


def leave_frame_to_python(code: types.CodeType) -> None:
    """Keep Dynamo from capturing a frame that runs ``code``. Dynamo still captures the frames that this frame calls."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
