"""The op rotary; `spec` states its contract."""
