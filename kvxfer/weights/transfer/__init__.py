"""Weight updates carried out: senders, receivers, and the coordinator that they vote to."""
