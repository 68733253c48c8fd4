"""Floor 1: what runs inside a rank. Never imports driver, view or planner."""
