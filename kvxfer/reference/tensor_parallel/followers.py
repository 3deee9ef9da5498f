"""The processes of the ranks other than the first, for rank 0."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from kvxfer.clock import Clock
from kvxfer.errors import RankLost, without_traceback
from kvxfer.reference.tensor_parallel.follower import BEAT_SECONDS, follow
from kvxfer.reference.tensor_parallel.messages import Beat, Command, Done, Failed, Refused
from kvxfer.reference.tensor_parallel.rank import RankSpec

_LOOK_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 0.2
_CAUSE_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 5.0
_STARVED: Final = 3  # times the patience, for a process that would run if it had a core


# Imports torch, once for all ranks: then a process starts within milliseconds.
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([follow.__module__])


class _Follower:
    def __init__(self, spec: RankSpec, rank: int) -> None:
        self.rank, self.name = rank, f"rank {rank} of {spec.ranks}"
        self.connection: Connection
        self.connection, theirs = _CONTEXT.Pipe()
        self.process: BaseProcess = _CONTEXT.Process(
            target=follow, args=(spec, rank, theirs), name=f"kvxfer-rank-{rank}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.answers: queue.SimpleQueue[Done | Refused | None] = queue.SimpleQueue()
        self.heard: float | None = None  # set by the first message
        self.failure = ""

    def died(self) -> str:
        """Describes its unexpected end; empty if it has not ended, or has reported a failure."""
        code = self.process.exitcode
        if code is None or self.failure:
            return ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"{self.name} (process {self.process.pid}) {how}"


class Followers:
    """The processes of all ranks but the first. One thread at a time may call it. A separate thread
    watches them: if one ends, fails or is silent for `patience_seconds`, all are killed, and every
    call raises RankLost, which names the first one."""

    def __init__(self, spec: RankSpec, patience_seconds: float, clock: Clock) -> None:
        """Starts the processes. Each loads its weights, then sends an answer for gather()."""
        self._patience, self._clock = patience_seconds, clock
        self._lost: RankLost | None = None
        self._ended = threading.Event()
        self._closing = threading.Event()
        self._followers = [_Follower(spec, rank) for rank in range(1, spec.ranks)]
        self._thread = threading.Thread(target=self._watch, name="kvxfer-ranks", daemon=True)
        self._thread.start()

    @property
    def processes(self) -> list[int]:
        """The process ids, from rank 1 on."""
        return [each.process.pid or 0 for each in self._followers]

    def tell(self, command: Command) -> None:
        """Sends a command to all. Raises RankLost."""
        self.require()
        for each in self._followers:
            try:
                each.connection.send(command)
            except OSError:
                raise self.loss() from None

    def gather(self, seconds: float) -> list[Done | Refused]:
        """Returns each rank's answer. Raises RankLost, also if one has none within `seconds`."""
        give_up = self._clock.monotonic() + seconds
        answers = []
        for each in self._followers:
            try:
                answer = each.answers.get(timeout=max(give_up - self._clock.monotonic(), 0))
            except queue.Empty:
                self.end(f"{each.name} has not answered for {seconds:g} s")
                raise self.loss() from None
            if answer is None:
                raise self.loss()
            answers.append(answer)
        return answers

    def require(self) -> None:
        """Raises RankLost if a rank has been lost."""
        if self._lost is not None:
            raise without_traceback(self._lost)

    def loss(self) -> RankLost:
        """Returns the reason why a call to the ranks failed. Ends them all if no loss is known."""
        if not self._ended.wait(_CAUSE_SECONDS):
            self.end("rank 0 cannot reach the others")
        assert self._lost is not None  # noqa: S101 (it has ended)
        return without_traceback(self._lost)

    def close(self) -> None:
        """Ends the processes, and waits until they have ended."""
        self._closing.set()
        self._thread.join()
        for each in self._followers:
            each.connection.close()
        give_up = self._clock.monotonic() + _STOP_SECONDS
        for each in self._followers:
            each.process.join(max(give_up - self._clock.monotonic(), 0))
            if each.process.exitcode is None:
                each.process.kill()
                each.process.join()
        self._lost = self._lost or RankLost("this group of ranks is closed")
        self._ended.set()

    def end(self, reason: str) -> None:
        """Kills all processes: what they compute together cannot continue. Any thread."""
        if self._lost is None:
            self._lost = RankLost(f"{reason}; this instance serves no more, start it again")
        for each in self._followers:
            each.process.kill()
            each.answers.put(None)
        self._ended.set()

    def _watch(self) -> None:
        looked = self._clock.monotonic()
        by_connection = {each.connection: each for each in self._followers}
        sentinels = [each.process.sentinel for each in self._followers]
        while not self._closing.is_set() and self._lost is None:
            found = wait([*by_connection, *sentinels], _LOOK_SECONDS)
            now = self._clock.monotonic()
            paused, looked = max(now - looked - BEAT_SECONDS, 0), now
            trouble = any(each in sentinels for each in found)
            for connection, each in by_connection.items():
                if connection in found:
                    trouble |= not self._take(each, now)
                elif each.heard is not None:
                    # While this process did not run, it could not receive messages.
                    each.heard += paused
            if trouble:
                self.end(self._first_to_end())
            elif silent := self._silent(now):
                self.end(silent)
        if self._lost is not None:
            for each in self._followers:
                each.process.join()

    def _take(self, each: _Follower, now: float) -> bool:
        """Receives a message. True if the rank continues after it."""
        try:
            answer = each.connection.recv()
        except (OSError, EOFError):
            return False
        each.heard = now
        match answer:
            case Done() | Refused():
                each.answers.put(answer)
            case Failed(reason):
                each.failure = reason
                return False
            case Beat():
                pass
        return True

    def _first_to_end(self) -> str:
        """Describes the rank that ended first. One that was killed makes the others fail, so it is
        named before these."""
        if self._closing.wait(_SETTLE_SECONDS):
            return "this group of ranks is closed"
        for each in self._followers:
            while each.connection.poll() and self._take(each, 0):
                pass
        died = [how for each in self._followers if (how := each.died())]
        failed = [f"{each.name} failed: {each.failure}" for each in self._followers if each.failure]
        return [*died, *failed, "a rank closed its connection"][0]

    def _silent(self, now: float) -> str | None:
        for each in self._followers:
            if each.heard is None:
                continue
            silent = now - each.heard
            if silent > self._patience * _STARVED or (
                silent > self._patience and not _wants_to_run(each.process.pid)
            ):
                return (
                    f"{each.name} (process {each.process.pid}) is frozen: it has said nothing for "
                    f"{silent:.1f} s"
                )
        return None


def _wants_to_run(pid: int | None) -> bool:
    """True if a thread of the process runs, or waits for a core. No thread of a stopped process
    does."""
    try:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    except OSError:
        pass
    return False
