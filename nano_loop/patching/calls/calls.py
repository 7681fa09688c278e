"""Wrappers around every outermost call into a model, such as autocast.

A call is outermost if no other call into a set-up model is running in its thread. Examples are `model(x)`,
`model.encoder(x)`, `model[0](x)`, `model.forward(x)` and `model.my_loss(x)`.

Nothing is attached to the model. While at least one model has wrappers, `torch.nn.Module.__call__` and the public
methods of the model's classes are replaced by functions that look the module up in a table and call the original if it
is not there. So `type(layer) is nn.Linear` holds inside the loop, and copies and pickles are plain objects.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from nano_loop.patching.attributes import replaced
from nano_loop.patching.calls.entry import (
    MODULE_CALL,
    called_by_loops,
    entry_points,
    is_exporting,
    plain_models_exported,
    through_interceptor,
)
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.ownership import NO_RULES, NONE, Rules, call_state, forget_graphs, note_graph, rules_now
from nano_loop.patching.patch_table import process_wide, shared_change
from nano_loop.patching.torch_private_autograd import in_backward, next_node_number
from nano_loop.patching.torch_private_compiler import constant_when_traced

#: Accepts a function and its arguments, and returns the function's outputs.
Call = Callable[..., Any]
#: Accepts the next inner call and returns a call around it, which may change the arguments and the outputs.
CallWrapper = Callable[[Call], Call]
#: The name of the functions around modules that choose the modules' compute dtypes.
DTYPES = "dtypes"


_interceptors: dict[int, tuple[CallInterceptor, ...]] = call_state.interceptors
_lock = threading.RLock()  # reentrant: freeing a model while the lock is held ends its run
#: The ids of interceptors with a call that `torch.compile` has traced.
_traced: set[int] = process_wide("traced interceptors", set())
_FORWARD = frozenset({nn.Module.__call__.__name__, "__call__", "forward"})


@constant_when_traced
def _note_trace(interceptor: int) -> bool:
    """Note that a call was traced. torch runs this function once, while tracing the call."""
    _traced.add(interceptor)
    return True


class CallInterceptor:
    """The wrappers of one run around the outermost calls into one model, from the outermost to the innermost.

    With `trainings_only`, calls in evaluation mode and calls that record no gradients run as without a run.
    """

    def __init__(self, trainings_only: bool = False) -> None:
        self.trainings_only = trainings_only
        self._had_other_calls = False
        self.thread = threading.get_ident()
        self._modules: dict[int, weakref.ref[nn.Module]] = {}  # by id, until they are freed
        self._called: set[int] = set()
        self._by_name: dict[str, CallWrapper] = {}
        #: Calls a function inside all wrappers.
        self.call_wrapped: Call = _innermost
        self._arounds: dict[str, Callable[[nn.Module], Call | None]] = {}
        #: The functions around the calls of modules, by module id.
        self.inner: dict[int, Call] = {}
        #: The rules for these calls. Replaced rather than mutated, because a backward uses the rules of its forward.
        self.rules = NO_RULES._replace(owner=id(self))
        #: Receives a method and its arguments. Returns whether to leave the call alone, but not the calls inside it.
        #: The result is passed to `convert_output`.
        self.is_left_alone: Callable[..., bool] | None = None
        self.convert_output: Callable[[Any], Any] = lambda value: value
        #: Whether the calls use torch's own kernels, as the plain loop does, even if other runs replace kernels.
        self.is_plain = False

    def add(self, name: str, wrapper: CallWrapper) -> None:
        """Add `wrapper` as the innermost one, or replace the wrapper with the same name."""
        self._by_name[name] = wrapper
        call: Call = _innermost
        for wrap in reversed(self._by_name.values()):
            call = wrap(call)
        self.call_wrapped = call

    def around_modules(self, around: Callable[[nn.Module], Call | None], name: str) -> None:
        """Put a function around each call of the model's modules, including inner calls.

        `around` accepts a module and returns a function, called as ``function(call, module, *args, **kwargs)``, or
        None. `name` is the name of its purpose. A second function with this name replaces the first. The name that was
        added first is the outermost.
        """
        with _lock:
            self._arounds[name] = around
            self.inner.clear()
            for reference in [*self._modules.values()]:
                if (module := reference()) is not None:
                    self._note_inner(module)

    def _note_inner(self, module: nn.Module) -> None:
        wrapped = [around(module) for around in self._arounds.values()]
        functions = [function for function in wrapped if function is not None]
        if functions:
            self.inner[id(module)] = functools.reduce(_composed, functions)

    def cover(self, modules: Iterable[nn.Module]) -> None:
        """Route calls into these modules to this interceptor."""
        with _lock:
            for module in modules:
                if id(module) not in self._modules:
                    self._modules[id(module)] = weakref.ref(module, functools.partial(self._forget, id(module)))
                    self._note_inner(module)
                    _interceptors[id(module)] = (*_interceptors.get(id(module), ()), self)

    def uncover(self) -> None:
        """Stop routing calls to this interceptor."""
        with _lock:
            for key in [*self._modules]:
                others = tuple(interceptor for interceptor in _interceptors.get(key, ()) if interceptor is not self)
                if others:
                    _interceptors[key] = others
                else:
                    _interceptors.pop(key, None)
            self._modules.clear()
            self.inner.clear()
            _traced.discard(id(self))

    @property
    def is_idle(self) -> bool:
        """Whether nothing surrounds the calls, and no compiled graph depends on their interception."""
        return not self._by_name and not self.inner and id(self) not in _traced

    def _forget(self, key: int, _: object) -> None:
        """Forget a module that is being freed, because its id may be reused."""
        _interceptors.pop(key, None)
        self._modules.pop(key, None)
        self.inner.pop(key, None)
        self._called.discard(key)

    @property
    def was_called(self) -> bool:
        """Whether any call reached this interceptor, or was traced by `torch.compile`."""
        return bool(self._called) or self._had_other_calls or id(self) in _traced

    def _is_left_plain(self, module: nn.Module) -> bool:
        """Whether a call of the loop should run as without a run."""
        return self.trainings_only and not (module.training and torch.is_grad_enabled())

    def _surroundings(self, module: nn.Module) -> tuple[Call, Rules]:
        """Return the function that makes a call into `module` inside its wrappers, and the rules of the call.

        An activation checkpoint inside a model calls modules again during the backward and restores the context of the
        forward, including the effects of wrappers. Only modules that the loop called directly need them again. The
        recomputation must use the rules of its forward.
        """
        if not in_backward():
            self._called.add(id(module))
            return self.call_wrapped, self.rules
        of_node = rules_now()
        rules = self.rules if of_node is None or of_node.owner != self.rules.owner else of_node
        return self.call_wrapped if id(module) in self._called else _innermost, rules

    def enter(self, original: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module's `original` for the loop, inside the wrappers of the run that the call belongs to."""
        if is_exporting():
            return original(module, *args, **kwargs)
        interceptors = _interceptors.get(id(module), ())  # empty if another thread just removed them
        interceptor = self if len(interceptors) < 2 else _of_this_thread(interceptors)
        if torch.compiler.is_compiling():
            if interceptor._is_left_plain(module):
                return original(module, *args, **kwargs)
            return interceptor.traced(original, module, *args, **kwargs)
        if interceptor.is_left_alone is not None and interceptor.is_left_alone(original, args, kwargs):
            interceptor._had_other_calls = True
            return interceptor.convert_output(original(module, *args, **kwargs))
        if interceptor._is_left_plain(module):
            interceptor._had_other_calls = True
            return _inside(_PLAIN, _innermost, NO_RULES, original, module, *args, **kwargs)
        call, rules = interceptor._surroundings(module)
        return _inside(interceptor, call, rules, original, module, *args, **kwargs)

    def traced(self, function: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` inside the wrappers while torch traces the call. The graph node is created later."""
        _note_trace(id(self))
        call_state.in_call = call_state.accelerated = True
        try:
            return self.call_wrapped(function, *args, **kwargs)
        finally:
            call_state.in_call = call_state.accelerated = False


class CallInterceptors:
    """The interceptors of one run, by model, which keep no module alive; see `CallInterceptor` for `trainings_only`."""

    def __init__(self, trainings_only: bool = False) -> None:
        self.trainings_only = trainings_only
        self._by_model: Any = WeakIdKeyDictionary()
        self._in_use: weakref.WeakSet[CallInterceptor] = weakref.WeakSet()
        self._entry_points: set[tuple[type, str]] = set()
        self._users: set[str] = set()
        self._undoing = ExitStack()

    def add(self, model: nn.Module, name: str, wrapper: CallWrapper) -> CallInterceptor:
        """Add a wrapper around outermost calls into `model`, in place of one of this name; return the interceptor."""
        interceptor = self.for_model(model)
        interceptor.add(name, wrapper)
        return interceptor

    def for_model(self, model: nn.Module, user: str | None = None) -> CallInterceptor:
        """Intercept calls into `model`, even without wrappers, so that operators' kernels are replaced for `user`."""
        if user is not None:
            self._users.add(user)
        interceptor: CallInterceptor | None = self._by_model.get(model)
        if interceptor is None:
            interceptor = self._by_model[model] = self._open(model)
        return interceptor

    def rules_of(self, model: nn.Module) -> Rules:
        """Return the rules of the calls into `model`, without intercepting them."""
        interceptor: CallInterceptor | None = self._by_model.get(model)
        return NO_RULES if interceptor is None else interceptor.rules

    def release(self, user: str) -> None:
        """Stop intercepting calls without wrappers if this was the last user, since interception costs microseconds."""
        self._users.discard(user)
        if not self._users and all(interceptor.is_idle for interceptor in self._in_use):
            self.close()

    def close(self) -> None:
        """Remove all wrappers of this run, but keep those of an enclosing run."""
        self._by_model.clear()
        self._entry_points.clear()
        for interceptor in [*self._in_use]:
            interceptor.uncover()
        self._undoing.close()
        if not _interceptors:
            forget_graphs()

    def _open(self, model: nn.Module) -> CallInterceptor:
        modules = called_by_loops(model)
        if not self._entry_points:
            self._undoing.enter_context(new_modules_covered())
            self._undoing.enter_context(plain_models_exported())
        points = {MODULE_CALL} if self.trainings_only else entry_points(modules)
        for owner, name in points - self._entry_points:
            self._entry_points.add((owner, name))
            self._undoing.enter_context(replaced(owner, name, through_interceptor))
        interceptor = CallInterceptor(self.trainings_only)
        self._in_use.add(interceptor)
        interceptor.cover(modules)
        return interceptor


def _composed(outer: Call, inner: Call) -> Call:
    """Return a function around module calls that composes two such functions."""

    def around(function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return outer(functools.partial(inner, function), module, *args, **kwargs)

    return around


def is_forward(function: Call) -> bool:
    """Whether `function`, as passed to a wrapper, is a module's ``__call__`` or ``forward`` and not another method."""
    return getattr(function, "__name__", None) in _FORWARD


def _cover_new_module(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Intercept calls into a module that is registered in a set-up model during the run."""
    if module is not None:
        for interceptor in _interceptors.get(id(parent), ()):
            interceptor.cover(called_by_loops(module))


def new_modules_covered() -> AbstractContextManager[Any]:
    """Return a context in which modules that are registered in set-up models are covered.

    Keep it active while any thread trains: torch raises if the hooks change while it calls them.
    """
    return shared_change(_cover_new_module, lambda: register_module_module_registration_hook(_cover_new_module))


def _innermost(function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module's `function` inside the wrapper that the current interceptor has for the module."""
    inner = None if torch.compiler.is_dynamo_compiling() else call_state.modules.get(id(module))
    if inner is None:
        return function(module, *args, **kwargs)
    return inner(function, module, *args, **kwargs)


#: The interceptor of calls that run as without a run.
_PLAIN = CallInterceptor()
_PLAIN.is_plain = True


def _inside(interceptor: CallInterceptor, call: Call, rules: Rules, /, *args: Any, **kwargs: Any) -> Any:
    """Run `call`, and mark its operators and their backward as belonging to a set-up model."""
    start = next_node_number()
    call_state.in_call, call_state.accelerated = True, not interceptor.is_plain
    call_state.modules, call_state.rules = interceptor.inner, rules
    try:
        return call(*args, **kwargs)
    finally:
        call_state.in_call, call_state.accelerated, call_state.modules, call_state.rules = False, False, NONE, NO_RULES
        if not interceptor.is_plain:
            note_graph(start, next_node_number(), rules)


def _of_this_thread(interceptors: tuple[CallInterceptor, ...]) -> CallInterceptor:
    """Return the interceptor of this thread's innermost run, or of the run that started last if there is none."""
    thread = threading.get_ident()
    own = (interceptor for interceptor in reversed(interceptors) if interceptor.thread == thread)
    return next(own, interceptors[-1])
