"""The op gated_rms_norm; `spec` states its contract."""
