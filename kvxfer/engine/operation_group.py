"""Operations that were submitted together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvxfer.engine.arguments import REFUSALS, refused
from kvxfer.engine.operation import Operation, until_ended


class OperationGroup:
    """Operations with one `await`. It returns when all operations have succeeded. If any failed it
    raises the first error in the order of the operations, once all have ended; `errors` has all
    errors. A wait that is cancelled cancels all operations, as for `Operation`.
    """

    __slots__ = ("nbytes", "operations")

    nbytes: int
    """Bytes of payload of all operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        try:
            self.operations = tuple(operations)
            self.nbytes = sum(operation.nbytes for operation in self.operations)
        except REFUSALS as error:
            raise refused(error, OperationGroup.__init__, locals()) from None

    @property
    def immediates(self) -> tuple[int, ...]:
        """The number by which the receiver's counter grows, of each operation; known at once."""
        return tuple(operation.immediates for operation in self.operations)

    @property
    def errors(self) -> tuple[Exception | None, ...]:
        """The error of each operation; None for one that did not fail, or is under way."""
        return tuple(operation.error for operation in self.operations)

    def __await__(self) -> Generator[object, None, None]:
        yield from until_ended(self.operations)
        for error in self.errors:
            if error is not None:
                raise error

    def done(self) -> bool:
        """Whether all have ended, delivered or not."""
        return all(operation.done() for operation in self.operations)

    def cancel(self) -> None:
        """Cancels each; see Operation.cancel. Any thread."""
        for operation in self.operations:
            operation.cancel()
