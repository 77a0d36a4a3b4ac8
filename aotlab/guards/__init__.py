"""What must hold for an entry to serve a call: its tensors, its Python state and what the function reaches."""
