"""Some tests still take these from here."""

from verify.block_tables import TICKET, block_table

__all__ = ["TICKET", "block_table"]
