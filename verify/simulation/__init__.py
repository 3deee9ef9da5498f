"""A fleet on virtual time: every engine, connection and process of it follows from one seed."""
