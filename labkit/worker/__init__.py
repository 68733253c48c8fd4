"""Floor 1: what runs inside a rank. Imports torch; never the driver, view or planner."""
