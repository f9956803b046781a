"""The op kv_write; `spec` states its contract."""
