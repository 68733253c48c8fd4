"""Data that needs no download, and the way it is dealt to ranks."""
