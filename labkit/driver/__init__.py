"""Floor 2: the kernel's side of a launch. Imports no torch and no worker code."""
