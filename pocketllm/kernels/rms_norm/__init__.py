"""The op rms_norm; `spec` states its contract."""
