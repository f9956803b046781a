"""The op take_rows; `spec` states its contract."""
