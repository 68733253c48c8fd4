"""Ways to start N rank processes. Nothing above an engine knows where they run."""
