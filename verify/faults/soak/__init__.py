"""A fleet of workers under random transfers for long, in which some join, leave and are killed."""
