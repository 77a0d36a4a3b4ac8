"""Guards: the conditions under which an entry serves a call.

They concern the arguments, torch's settings, and the *reached* values: all other values that the function may read.
"""
