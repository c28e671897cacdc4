"""Several processes or machines that serve one catalog."""
