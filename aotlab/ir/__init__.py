"""The records that flow between the stages: specs, metadata, signatures, graphs, and their checks."""
