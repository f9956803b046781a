"""The op linear; `spec` states its contract."""
