"""placeholder"""
SAMPLE: tuple[str, ...] = ()
