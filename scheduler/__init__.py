"""The fleet and its pairs: the registry, leases, pairing and reservations."""
