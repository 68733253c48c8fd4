"""Models, built from the specs in `labkit.core.models`."""
