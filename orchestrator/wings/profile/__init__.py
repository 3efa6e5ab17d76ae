"""A wing: what two steps of a run did, by module; time, operations and memory."""
