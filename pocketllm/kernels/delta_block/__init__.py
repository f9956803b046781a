"""The op delta_block; `spec` states its contract."""
