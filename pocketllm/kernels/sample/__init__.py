"""The op sample; `spec` states its contract."""
