"""Floor 1: draws tables of numbers. Knows nothing of processes, launches or runs."""

WIDTH_PX, HEIGHT_PX = 900, 270  # a figure's place on the page, live and at rest
