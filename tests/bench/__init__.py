"""Measurements of speed, as ratios taken side by side in one run.

    python -m tests.bench NAME

prints one JSON line: what was measured, the target, and whether it was met. Nothing
here is part of the tests: machines are shared, and times are noisy.
"""
