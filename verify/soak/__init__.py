"""A fleet of workers under random transfers for a long time; workers join, leave and are killed."""
