"""The processes of all ranks, for the process that starts them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Final, Self, TypeAlias

from kvxfer.errors import RankLost
from kvxfer.reference.expert_parallel.messages import Ended, Failed, Generated, Here, Said
from kvxfer.reference.expert_parallel.plan import Plan
from kvxfer.reference.expert_parallel.rank import run

Life: TypeAlias = Callable[[Plan, int, Connection], None]

# Imports torch, once for all ranks.
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([run.__module__])


class ExpertRanks:
    """A context manager within which the processes run. One thread uses it.

    tokens: the generated tokens, by rank and prompt. ended: the last message of each rank that has
    taken all steps.
    """

    def __init__(self, plan: Plan, life: Life = run) -> None:
        """`life` is the function that each process runs."""
        self.tokens: list[list[list[int]]] = [[[] for _ in prompts] for prompts in plan.prompts]
        self.ended: dict[int, Ended] = {}
        self._plan, self._life = plan, life
        self._processes: list[BaseProcess] = []
        self._connections: dict[Connection, int] = {}

    def __enter__(self) -> Self:
        for rank in range(self._plan.ranks):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=self._life,
                args=(self._plan, rank, theirs),
                name=f"kvxfer-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections[ours] = rank
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def kill(self, rank: int) -> None:
        """Ends the process of a rank; the others continue."""
        self._processes[rank].kill()

    def generated(self) -> Iterator[int]:
        """Runs the ranks until all live ones have ended; yields the rank of each token.

        Raises RankLost if a rank reports a failure, or if all are lost.
        """
        addresses: dict[int, str] = {}
        while self._connections:
            for connection in wait(list(self._connections)):
                assert isinstance(connection, Connection)  # noqa: S101 (for the type)
                rank = self._connections[connection]
                match self._hear(connection):
                    case Here(address):
                        addresses[rank] = address
                        if len(addresses) == self._plan.ranks:
                            self._introduce([addresses[each] for each in sorted(addresses)])
                    case Generated(prompt, token):
                        self.tokens[rank][prompt].append(token)
                        yield rank
                    case Ended() as how:
                        self.ended[rank] = how
                    case Failed(reason):
                        raise RankLost(f"rank {rank} failed: {reason}")
        if not self.ended:
            raise RankLost("all ranks were lost")

    def _hear(self, connection: Connection) -> Said | None:
        """Returns the next message of a process, or None if it has ended."""
        try:
            said: Said = connection.recv()
        except (EOFError, OSError):
            del self._connections[connection]
            connection.close()
            return None
        return said

    def _introduce(self, addresses: list[str]) -> None:
        for connection in self._connections:
            connection.send(addresses)
