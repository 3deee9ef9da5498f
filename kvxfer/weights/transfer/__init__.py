"""The execution of weight updates: senders, receivers, and the coordinator that counts votes."""
