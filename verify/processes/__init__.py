"""Programs of the project as processes: what starts, awaits, freezes, kills and reaps them."""
