"""Floor 0: the words that both sides of a launch share. Standard library and orjson."""
