"""The op score; `spec` states its contract."""
