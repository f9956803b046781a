"""The op add; `spec` states its contract."""
