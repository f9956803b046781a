"""The op lm_head; `spec` states its contract."""
