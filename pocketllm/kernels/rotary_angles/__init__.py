"""The op rotary_angles; `spec` states its contract."""
