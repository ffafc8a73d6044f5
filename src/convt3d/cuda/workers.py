"""Threads that work in the background: urgent jobs first, and none of them outlives the program."""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

_URGENT, _NORMAL, _LAST = range(3)


class Job(Generic[Result]):
    """Work that is done once, and the future of its result."""

    __slots__ = ("_work", "future")

    def __init__(self, work: Callable[[], Result]) -> None:
        self.future: Future[Result] = Future()
        self._work = [work]

    def run(self) -> None:
        """Do the work, unless a thread has begun it. Its exceptions go to the future."""
        try:
            work = self._work.pop()  # atomic
        except IndexError:
            return
        try:
            result = work()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def drop(self) -> None:
        """Cancel the future, unless a thread has begun the work."""
        try:
            self._work.pop()
        except IndexError:
            return
        self.future.cancel()


class Workers:
    """A pool of daemon threads, which start when the first jobs come.

    The threads of :mod:`concurrent.futures` finish every job that waits before the interpreter may
    exit. These finish only what they have begun: a library that is torn down under a running call
    would crash. A forked child has no threads, and starts with an empty pool.
    """

    def __init__(self, size: int, name: str) -> None:
        """Start nothing yet.

        Args:
            size: most threads to run at once.
            name: prefix of the threads' names.
        """
        self._size, self._name = size, name
        self._reset()
        atexit.register(self._close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Job[Any] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[[], Result], *, urgent: bool = False) -> Job[Result]:
        """Queue some work. While the interpreter exits, the calling thread does it."""
        job = Job(work)
        with self._lock:
            closed = self._closed
            if not closed:
                self._put(_URGENT if urgent else _NORMAL, job)
                if len(self._threads) < self._size:
                    self._start()
        if closed:
            job.run()
        return job

    def urge(self, job: Job[Any]) -> None:
        """Put a job before all that are not urgent."""
        self._put(_URGENT, job)

    def _put(self, priority: int, job: Job[Any] | None) -> None:
        self._jobs.put((priority, next(self._numbers), job))

    def _start(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(self._jobs,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @staticmethod
    def _work(jobs: queue.PriorityQueue[tuple[int, int, Job[Any] | None]]) -> None:
        while True:
            _, _, job = jobs.get()
            if job is None:
                return
            job.run()
            del job  # the result belongs to those who asked for it

    def _close(self) -> None:
        """Drop the jobs that wait, and let the threads end those that they run."""
        with self._lock:
            self._closed = True
        while True:
            try:
                _, _, job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.drop()
        for _ in self._threads:
            self._put(_LAST, None)
        for thread in self._threads:
            thread.join()


class Turns:
    """Locks by key: threads that ask for the same thing take turns, others go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Any, tuple[threading.Lock, int]] = {}

    def of(self, key: Any) -> _Turn:
        """A context manager that one thread at a time enters for a (hashable) key."""
        return _Turn(self, key)

    def _enter(self, key: Any) -> None:
        with self._lock:
            lock, users = self._held.get(key, (threading.Lock(), 0))
            self._held[key] = lock, users + 1
        lock.acquire()

    def _exit(self, key: Any) -> None:
        with self._lock:
            lock, users = self._held.pop(key)
            if users > 1:
                self._held[key] = lock, users - 1
        lock.release()


class _Turn:
    def __init__(self, turns: Turns, key: Any) -> None:
        self._turns, self._key = turns, key

    def __enter__(self) -> None:
        self._turns._enter(self._key)

    def __exit__(self, *_: object) -> None:
        self._turns._exit(self._key)
