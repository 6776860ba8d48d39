"""One process or several (torchrun, accelerate): sharing the work and gathering the results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all: `rank` from 0 of `count`; `accelerator` is None if there is only one."""

    rank: int = 0
    count: int = 1
    accelerator: Any = None

    @property
    def main(self) -> bool:
        """Whether this process prints and writes the result."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's share: every `count`-th item, so that all processes get some of each subtask."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    def end(self) -> None:
        """Close the connections between processes once all have called this; exiting with open ones can crash."""
        self.wait()
        if self.accelerator is not None:
            self.accelerator.end_training()

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes, in every process."""
        if self.accelerator is None:
            return items
        from accelerate.utils import gather_object

        return list(gather_object(items))


def processes(cpu: bool) -> Processes:
    """Join the processes that `torchrun` or `accelerate launch` started; `cpu` stops accelerate from using a GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=cpu)
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator)
