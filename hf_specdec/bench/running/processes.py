"""One process or several (torchrun, accelerate): sharing the work and gathering the results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all: `rank` from 0 of `count`; `accelerator` is None where there is only one."""

    rank: int = 0
    count: int = 1
    accelerator: Any = None

    @property
    def main(self) -> bool:
        """Whether this process prints and writes the result."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `count`-th item, so that all processes get some of each subtask."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Returns once every process is here."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    def end(self) -> None:
        """Closes the connections between processes, once all are here: one that exits with them open can crash."""
        self.wait()
        if self.accelerator is not None:
            self.accelerator.end_training()

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, in each of them."""
        if self.accelerator is None:
            return items
        from accelerate.utils import gather_object

        return list(gather_object(items))


def processes(cpu: bool) -> Processes:
    """The processes that `torchrun` or `accelerate launch` started; `cpu` keeps accelerate from looking for a GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=cpu)
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator)
