"""Properties of plans that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class once(Generic[Value]):
    """functools.cached_property without the lock that it takes before Python 3.12.

    Planning asks thousands of plans for tens of properties, most of them a single time.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object, owner: type) -> once[Value] | Value:
        if instance is None:
            return self
        found = instance.__dict__[self.name] = self.compute(instance)
        return found
