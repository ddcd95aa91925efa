"""Workers: tasks that work through jobs, as many at once as allowed, and no more than there is work for."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

JobT = TypeVar("JobT")


class Workers(Generic[JobT]):
    """Starts jobs in the order they were added. Belongs to one event loop.

    One task does many jobs, and makes another task only if more is waiting than it can start: where jobs never wait
    for anything, a single task does them all. A task for each would cost more than most handlers.
    """

    def __init__(self, limit: int, work: Callable[[JobT], Awaitable[None]], on_idle: Callable[[], None]) -> None:
        self.waiting: deque[JobT] = deque()
        self._limit = limit
        self._work = work
        self._on_idle = on_idle
        self._tasks: set[asyncio.Task[None]] = set()
        self._guests = 0
        """Jobs that run in the tasks of their callers."""
        self._spare = False
        """Whether a task was made that has not begun yet."""
        self._stopping = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self._tasks and not self._guests

    @property
    def has_place(self) -> bool:
        """Whether a job could begin at once."""
        return not self.waiting and len(self._tasks) + self._guests < self._limit

    def add(self, jobs: Iterable[JobT]) -> None:
        """Do these, too."""
        self.waiting.extend(jobs)
        self._add_task()

    async def do(self, job: JobT) -> None:
        """Do this one in the caller's own task, if it `has_place`: that saves a lone job the making of one."""
        self._guests += 1
        try:
            await self._work(job)
        finally:
            self._guests -= 1
            self._go_on()

    async def stop(self) -> None:
        """Cancel what runs; what waits stays in `waiting`."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add_task(self) -> None:
        busy = len(self._tasks) + self._guests
        if self.waiting and not self._spare and not self._stopping and busy < self._limit:
            self._spare = True
            task = asyncio.get_running_loop().create_task(self._run(), name="raydispatch worker")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _run(self) -> None:
        self._spare = False
        while self.waiting:
            job = self.waiting.popleft()
            if not self._spare:
                self._add_task()
            await self._work(job)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._spare = False
        self._go_on()

    def _go_on(self) -> None:
        self._add_task()  # For what waited for this place, or what a task left behind that a handler cancelled.
        if self.is_idle:
            self._on_idle()
