"""The records that stages pass to each other: specs, metadata, signatures and graphs, with their checks."""
