"""Who is in the fleet and who serves whom: the registry, leases, pairing and reservations."""
