"""Rates of a multiprocessor of an H200, where several cost models count with the same.

A family whose model was fitted with another number has it in its own module.
"""

STEP_CYCLES = 1.41
"""Cycles of one m16n8 step of a warp on ``mma.sync``."""
MEMORY_BYTES = 18.0
"""Bytes a cycle that are its share of memory's bandwidth."""
L2_BYTES = 28.0
"""Bytes a cycle that ``cp.async`` brings it from L2 while all of them read."""
