"""Runs the programs of an interpreted launch side by side, as a GPU does.

Triton's interpreter runs one program after another, so one that waits for a later one would wait
for ever. Here each program has a thread. One thread runs at a time, until it gives way at an atomic
operation, so a schedule is the same every time.
"""

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# atomic operations of a launch: one with more waits for ever
MOST = 5000


class _Launch:
    """Stands in for a kernel's function: keeps its calls, and runs all of them at the last one."""

    def __init__(self, kernel: Callable[..., None], builder: Any, patient: bool) -> None:
        functools.update_wrapper(self, kernel)
        # what the interpreter reads of a function
        self.__globals__ = kernel.__globals__
        self.__signature__ = inspect.signature(kernel)
        self._kernel, self._builder, self._patient = kernel, builder, patient
        self._calls: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self._turns: list[threading.Semaphore] = []
        self._alive: list[int] = []
        self._last: dict[int, Any] = {}
        self._running, self._count, self._errors = 0, 0, list[BaseException]()

    def __call__(self, **arguments: Any) -> None:
        self._calls.append((self._builder.grid_idx, arguments))
        if len(self._calls) < math.prod(self._builder.grid_dim):
            return
        self._alive = list(range(len(self._calls)))
        self._turns = [threading.Semaphore(0) for _ in self._calls]
        threads = [threading.Thread(target=self._run, args=(i,)) for i in self._alive]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, program: int) -> None:
        try:
            self._wait_for_turn(program)
            self._kernel(**self._calls[program][1])
        except BaseException as error:
            self._errors.append(error)
        at = self._alive.index(program)
        del self._alive[at]
        if self._alive:
            self._turns[self._alive[at % len(self._alive)]].release()

    def _wait_for_turn(self, program: int) -> None:
        self._turns[program].acquire()
        if self._errors:
            raise self._errors[0]
        self._running, self._builder.grid_idx = program, self._calls[program][0]

    def before(self, operation: tuple[int, int]) -> None:
        """Called before an atomic operation, an address and what is added there."""
        program, self._count = self._running, self._count + 1
        if self._count > MOST:
            raise RuntimeError(f"after {MOST} atomic operations programs still wait")
        waits = self._last.get(program) == operation
        self._last[program] = operation
        if waits or self._patient:
            after = self._alive[(self._alive.index(program) + 1) % len(self._alive)]
            self._turns[after].release()
            self._wait_for_turn(program)


@contextlib.contextmanager
def side_by_side(patient: bool) -> Iterator[list[tuple[str, str]]]:
    """Run the programs of each launch inside side by side.

    Args:
        patient: whether a program gives way at every atomic operation. If not, it gives way only
            where it does the same again, which is how it waits, so one that should have waited is
            far ahead of the others.

    Yields:
        The order and the scope of every atomic operation.
    """
    from triton.runtime import interpreter

    builder, launches, orders = interpreter.interpreter_builder, list[_Launch](), []
    atomic = builder.create_atomic_rmw

    def started(kernel: Any, *rest: Any) -> Any:
        executor = executor_of(kernel, *rest)
        executor.fn = _Launch(kernel, builder, patient)
        launches.append(executor.fn)
        return executor

    def watched(op: Any, pointer: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        orders.append((order.name, scope.name))
        launches[-1].before((int(pointer.data.item()), int(value.data.item())))
        return atomic(op, pointer, value, mask, order, scope)

    executor_of = interpreter.GridExecutor
    with (
        mock.patch.object(interpreter, "GridExecutor", started),
        mock.patch.object(builder, "create_atomic_rmw", watched),
    ):
        yield orders
