"""Operations that were submitted together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvxfer.engine.arguments import REFUSALS, refused
from kvxfer.engine.operation import Operation, until_ended


class OperationGroup:
    """`await` it: it returns when all operations have ended well. If any failed it raises the
    first error in the order of the operations, once all have ended; `errors` has all of them. A
    wait that is cancelled cancels all of them, as of `Operation`.
    """

    __slots__ = ("nbytes", "operations")

    nbytes: int
    """Payload of all of them."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        try:
            self.operations = tuple(operations)
            self.nbytes = sum(operation.nbytes for operation in self.operations)
        except REFUSALS as error:
            raise refused(error, OperationGroup.__init__, locals()) from None

    @property
    def immediates(self) -> tuple[int, ...]:
        """For each operation what its receiver's counter grows by; known at once."""
        return tuple(operation.immediates for operation in self.operations)

    @property
    def errors(self) -> tuple[Exception | None, ...]:
        """Why each failed; None for one that did not, or is under way."""
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
