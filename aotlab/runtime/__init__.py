"""Stage 7: the generated run-time function that serves calls with the compiled graphs."""
