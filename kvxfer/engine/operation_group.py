"""Operations that were submitted together."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvxfer.engine.operation import Operation


class OperationGroup:
    """`await` it: it returns when all operations have ended well. If any failed it raises the
    first error in the order of the operations, once all have ended; `errors` has all of them.
    """

    __slots__ = ("operations",)

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)

    @property
    def immediates(self) -> tuple[int, ...]:
        """For each operation what its receiver's counter grows by; known at once."""
        return tuple(operation.immediates for operation in self.operations)

    @property
    def nbytes(self) -> int:
        """Payload of all of them."""
        return sum(operation.nbytes for operation in self.operations)

    @property
    def errors(self) -> tuple[Exception | None, ...]:
        """Why each failed; None for one that did not, or is under way."""
        return tuple(operation.error for operation in self.operations)

    def __await__(self) -> Generator[object, None, None]:
        for operation in self.operations:
            yield from operation._until_ended()
        for error in self.errors:
            if error is not None:
                raise error

    def done(self) -> bool:
        return all(operation.done() for operation in self.operations)

    def cancel(self) -> None:
        """Cancels each; see Operation.cancel. Any thread."""
        for operation in self.operations:
            operation.cancel()
