"""The function that stands between the caller and the compiled graphs."""
