"""What shells complete: the commands as data, and one module a shell that writes its script."""
