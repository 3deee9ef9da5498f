"""Weight updates whose members are killed and frozen at every stage."""
