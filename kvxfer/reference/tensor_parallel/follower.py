"""The process of a rank other than the first: executes commands until rank 0 ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Final

import torch

from kvxfer.errors import KvxferError
from kvxfer.reference.tensor_parallel.messages import (
    Answer,
    Applied,
    Apply,
    Beat,
    Command,
    Decode,
    Done,
    Failed,
    Meet,
    Pin,
    Prefill,
    Refused,
    Unpin,
)
from kvxfer.reference.tensor_parallel.rank import Rank, RankSpec

BEAT_SECONDS: Final = 0.2


def follow(spec: RankSpec, rank: int, connection: Connection) -> None:
    """Runs the process of a rank from start to end. It ends silently if rank 0 has ended."""
    # Ctrl-C in the terminal is for rank 0, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(spec.threads)
    answers = _Answers(connection)
    answers.begin()
    try:
        here = Rank(spec, rank)
        answers.say(Done())
        with contextlib.closing(here), contextlib.suppress(EOFError):
            while True:
                answer = _obey(here, connection.recv())
                if answer is not None:
                    answers.say(answer)
    except BaseException as error:
        answers.say(Failed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _obey(rank: Rank, command: Command) -> Answer | None:
    match command:
        case Prefill(tokens, blocks):
            rank.prefill(tokens, blocks)
            return None
        case Decode(token, position, blocks):
            rank.decode(token, position, blocks)
            return None
        case Pin(update_id):
            try:
                return Done(rank.pin(update_id))
            except KvxferError as error:
                return Refused(str(error))
        case Meet():
            rank.join()
            return Done(address=rank.address)
        case Unpin():
            rank.unpin()
        case Apply(staged):
            try:
                rank.apply(staged)
            except BaseException as error:
                rank.broken(error)
                raise
        case Applied(staged):
            rank.applied(staged, None)
    return Done()


class _Answers:
    """The messages of this process to rank 0, from two threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="kvxfer-beat", daemon=True)
        self._never = threading.Event()

    def begin(self) -> None:
        self._thread.start()

    def say(self, answer: Answer) -> None:
        try:
            with self._lock:
                self._connection.send(answer)
        except OSError:
            # Rank 0 has ended. The main thread may be in a collective, which it would not leave.
            os._exit(1)

    def _beat(self) -> None:
        while not self._never.wait(BEAT_SECONDS):
            self.say(Beat())
